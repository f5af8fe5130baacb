"""Was anything lost or repeated where a stream went on elsewhere? Pure: token ids in, a verdict out.

Two checks, each blind where the other sees: the count (usage and the asked length against what arrived),
and, where the rest of the answer reappears shifted against the reference, by how much it is shifted.
An answer that merely goes on differently (recomputed KV differs in the last bits) loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW = 8
"""Tokens that must agree for a shifted continuation to count as one."""
_MAX_SHIFT = 64


@dataclass(frozen=True)
class Verdict:
    """`diverged_at`: the first token that differs from the reference, -1 if none does."""

    lost: int
    repeated: int
    equal: bool
    diverged_at: int


def compare(
    reference: Sequence[int], received: Sequence[int], *, reported: int | None, asked: int | None
) -> Verdict:
    """Compare an answer with the uninterrupted one.

    reported: completion tokens by the usage of the stream. asked: the length it had to have (None: it ended
    by itself).
    """
    expected = asked if asked is not None else reported
    lost = max(0, expected - len(received)) if expected is not None else 0
    repeated = max(0, len(received) - expected) if expected is not None else 0
    diverged = next(
        (i for i, (want, got) in enumerate(zip(reference, received, strict=False)) if want != got), -1
    )
    if diverged < 0 and len(reference) != len(received):
        diverged = min(len(reference), len(received))
    if diverged >= 0:
        shift = _shift(reference, received, diverged)
        lost, repeated = max(lost, shift), max(repeated, -shift)
    return Verdict(lost, repeated, equal=diverged < 0, diverged_at=diverged)


def _shift(reference: Sequence[int], received: Sequence[int], at: int) -> int:
    """Tokens skipped (above 0) or repeated (below 0) at `at`; 0 if the rest is no shifted reference."""
    rest = received[at:]
    for distance in range(1, _MAX_SHIFT + 1):
        for shift in (distance, -distance):
            begin = at + shift
            want = reference[begin:] if begin >= 0 else ()
            common = min(len(rest), len(want))
            if common >= _WINDOW and list(rest[:common]) == list(want[:common]):
                return shift
    return 0

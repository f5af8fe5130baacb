"""Progress that the journal has announced and the GPU has not made yet is held back here. Pure.

An engine on a GPU writes its records while the kernels that they speak of still run. What a step may
overwrite must count at once; what it computed must not. So records pass through here with the number of the
newest complete step: `take` lets through all but claims of progress, `release` gives these as their steps
complete.

Invariants: a sequence is never said to have more tokens computed than complete steps have; a claim about
blocks that a sequence has lost, or about an earlier life of it, never comes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from segue_core.messages.journal import Begin, Commit, Record

MAX_CLAIMS = 64
"""Steps ahead for each sequence; engines run one or two ahead. Past it, claims are merged into later ones."""


class HeldProgress:
    """The claims of one engine life that wait for their steps."""

    def __init__(self, computed_of: Callable[[str], int]) -> None:
        """`computed_of(seq)`: tokens of it that are said to be computed now (0: it is not known)."""
        self._computed_of = computed_of
        self._step = 0
        self._claims: dict[str, deque[tuple[int, int]]] = {}
        """(step, computed) by sequence, oldest first."""

    def __bool__(self) -> bool:
        return bool(self._claims)

    def take(self, record: Record, complete: int) -> Record:
        """What of `record` counts now that all steps up to `complete` are."""
        self._step = record.step
        if isinstance(record, Commit):
            return self._commit(record, complete)
        return self._begin(record, complete)

    def _commit(self, record: Commit, complete: int) -> Commit:
        if record.step <= complete:
            for seq, _ in record.computed:
                self._claims.pop(seq, None)
            return record
        lower = tuple((seq, n) for seq, n in record.computed if n < self._computed_of(seq))
        for seq, computed in record.computed:
            self._claim(seq, record.step, computed)
        return msgspec.structs.replace(record, computed=lower)  # what is taken back is taken back at once

    def _begin(self, record: Begin, complete: int) -> Begin:
        if record.reset:
            self._claims.clear()
        for seq in (*record.ended, *record.paused):
            self._claims.pop(seq, None)
        begun = []
        for start in record.begun:
            self._claims.pop(start.seq, None)
            if start.computed and record.step - 1 > complete:
                # It may count what the step before computed, which the GPU may still be at.
                self._claim(start.seq, record.step - 1, start.computed)
                start = msgspec.structs.replace(start, computed=0)
            begun.append(start)
        return msgspec.structs.replace(record, begun=tuple(begun))

    def _claim(self, seq: str, step: int, computed: int) -> None:
        claims = self._claims.setdefault(seq, deque())
        while claims and (len(claims) >= MAX_CLAIMS or claims[-1][1] > computed):
            claims.pop()  # taken back, or merged: its tokens come with this one, a little later
        claims.append((step, computed))

    def release(self, complete: int) -> Commit | None:
        """The claims whose steps are complete by now, or None."""
        computed: list[tuple[str, int]] = []
        for seq, claims in list(self._claims.items()):
            newest = None
            while claims and claims[0][0] <= complete:
                newest = claims.popleft()[1]
            if newest is not None:
                computed.append((seq, newest))
            if not claims:
                del self._claims[seq]
        return Commit(self._step, tuple(computed)) if computed else None

    def forget(self) -> None:
        """Records were lost: everything is announced anew."""
        self._claims.clear()

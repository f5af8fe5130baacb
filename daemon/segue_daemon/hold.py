"""Copies that wait for their engine's word. Pure.

An engine that gives no notice before it overwrites (`Register.notice` is "after") can only say later that a
block was its sequence's all the time. So a finished copy is held back here until a commit was written to the
journal *after* the copy was complete; if the blocks still belong to the sequence at the same place then,
nobody else has written them in between (what an engine promises: `segue_shim.table_exporter`).

Invariants: one copy a sequence; copies settle in the order in which they were made; `limit_bytes` bounds what
is held, but for the one copy that goes past it.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue_daemon.differ import Built
from segue_daemon.ledger import Sequence


@dataclass(frozen=True)
class Held:
    """A copy of `sequence`, with bytes of its own. `written`: bytes in the journal when it was complete.
    `tail`: whether it is a decode tail."""

    sequence: Sequence
    built: Built
    written: int
    tail: bool

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return len(self.built.payload) + (self.built.tail.nbytes if self.built.tail is not None else 0)


class HoldBack:
    """The copies of one engine life that wait on their way to one peer."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[str, Held] = {}
        self.nbytes = 0

    def __contains__(self, seq: object) -> bool:
        return seq in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        """Whether the next copy has to wait until one of these is settled."""
        return bool(self._held) and self.nbytes >= self._limit_bytes

    def add(self, held: Held) -> None:
        """Hold back a finished copy; its sequence has none here yet."""
        seq = held.sequence.seq
        assert seq not in self._held, "a sequence has one copy held back"
        self._held[seq] = held
        self.nbytes += held.nbytes

    def settled(self, committed_at: int) -> Held | None:
        """The oldest copy, if a commit that ends at `committed_at` of the journal came after it. Whether its
        blocks still belong to the sequence is the caller's to ask: only then it may be sent."""
        oldest = next(iter(self._held.values()), None)
        return oldest if oldest is not None and committed_at > oldest.written else None

    def waiting(self, committed_at: int) -> list[str]:
        """Sequences whose copy no commit has come after yet."""
        return [seq for seq, held in self._held.items() if held.written >= committed_at]

    def drop(self, seq: str) -> Held | None:
        """What is held of `seq` is taken or void; None if there is nothing."""
        held = self._held.pop(seq, None)
        if held is not None:
            self.nbytes -= held.nbytes
        return held

"""Epochs below which nobody writes a sequence here: those that were promoted, and those of writers whose
replica is gone. Plain data.

Invariant: at most `MAX_FENCES` are remembered; the one that was raised longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_FENCES = 100_000


class Fences:
    """The newest epoch of each sequence that is known without a replica of it."""

    def __init__(self, limit: int = MAX_FENCES) -> None:
        self._limit = limit
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self.forgotten = 0
        """Each of them a late writer could begin anew: with the right KV of its ids, but in vain."""

    def __len__(self) -> int:
        return len(self._epochs)

    def of(self, seq: str) -> int:
        """The epoch below which nobody writes `seq`; 0: none is known."""
        return self._epochs.get(seq, 0)

    def lift(self, seq: str, epoch: int) -> None:
        """From now on nobody below `epoch`; a fence is never lowered."""
        if epoch <= self.of(seq):
            return
        self._epochs[seq] = epoch
        self._epochs.move_to_end(seq)
        if len(self._epochs) > self._limit:
            self._epochs.popitem(last=False)
            self.forgotten += 1

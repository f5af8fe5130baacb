"""What a peer is told of sequences that are over, until it is sure that it heard. Plain data, no I/O.

Bulk is ordered: an answer to a delta proves that what was said before it arrived. Invariant: an end is said
again on the next link to the same life of the peer, unless it was heard or its sequence began anew. Of either
kind `MAX_PENDING_ENDS` are kept: a replica whose end is lost goes with its writer, or as stale.
"""

from __future__ import annotations

from collections.abc import Collection

from segue_core.messages.peer import End

MAX_PENDING_ENDS = 100_000


class Ends:
    """Of one link. `pending` are to be said; `said`: those that may not have arrived, with the number of
    deltas that had gone before, lowest first."""

    def __init__(self) -> None:
        self.pending: dict[End, None] = {}
        self.said: dict[End, int] = {}

    def __bool__(self) -> bool:
        return bool(self.pending)

    def add(self, end: End) -> None:
        """To be said, now or when the peer is back."""
        if len(self.pending) < MAX_PENDING_ENDS:
            self.pending[end] = None

    def say(self, number: int) -> End:
        """The next one, after `number` deltas."""
        end = next(iter(self.pending))
        del self.pending[end]
        self.said.pop(end, None)
        if len(self.said) < MAX_PENDING_ENDS:
            self.said[end] = number
        return end

    def heard(self, number: int) -> None:
        """Delta `number` was answered."""
        while self.said and next(iter(self.said.values())) < number:
            del self.said[next(iter(self.said))]

    def begun(self, seqs: Collection[str]) -> None:
        """These are shipped anew: their old ends are not said again."""
        self.said = {end: number for end, number in self.said.items() if end.seq not in seqs}

    def again(self) -> None:
        """A new link to the same life of the peer."""
        self.pending = dict.fromkeys(self.said) | self.pending
        self.said = {}

    def clear(self) -> None:
        """Another life of the peer: it holds nothing."""
        self.pending, self.said = {}, {}

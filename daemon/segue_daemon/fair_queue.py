"""A queue that is fair in what its names are charged: who waits and paid least comes next. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996). Weights are the caller's: who is charged half the price for
the same bytes gets twice as many. Invariants: between two names that wait all the time, what they were
charged never differs by more than the largest single charge of each, so nobody starves; a name that was idle
saves nothing up. Each operation costs O(log n) of what waits.
"""

from __future__ import annotations

import heapq


class FairQueue:
    """Names waiting for their turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._served: dict[str, int] = {}
        self._clock = 0
        self._entries = 0

    def add(self, name: str) -> None:
        """`name` waits; nothing happens if it does already."""
        if name in self._waiting:
            return
        self._entries += 1
        self._waiting[name] = self._entries
        start = max(self._clock, self._served.get(name, 0))
        heapq.heappush(self._heap, (start, self._entries, name))

    def discard(self, name: str) -> None:
        """`name` does not wait (any more)."""
        if self._waiting.pop(name, None) is not None and len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> str | None:
        """Whose turn it is, taken off; None if nobody waits."""
        while self._heap:
            start, entry, name = heapq.heappop(self._heap)
            if self._waiting.get(name) == entry:
                del self._waiting[name]
                self._clock = start
                self._served[name] = start
                return name
        return None

    def charge(self, name: str, cost: int) -> None:
        """What `name` took with its last turn."""
        self._served[name] = max(self._clock, self._served.get(name, 0)) + cost
        if name in self._waiting:  # it came back before it was charged: its next turn is not for nothing
            self.discard(name)
            self.add(name)

    def forget(self, name: str) -> None:
        """`name` is over."""
        self.discard(name)
        self._served.pop(name, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, name: object) -> bool:
        return name in self._waiting

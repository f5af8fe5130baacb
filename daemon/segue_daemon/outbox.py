"""What goes to one peer next: its shipments, the credit that it gave, the budget that is left. Pure.

Nothing is kept here: a delta is built when it may leave. Invariants: at most a window of bytes is unacked;
nothing but what is whole by nature (a block, a delta's header) overdraws the budget.
"""

from __future__ import annotations

from collections.abc import Callable

from segue_daemon.bucket import Throttle
from segue_daemon.shipment import Ready, Shipment


class Outbox:
    """The way out to one peer. `shipments`: one for each engine life, by incarnation."""

    def __init__(self, throttle: Throttle) -> None:
        self.shipments: dict[int, Shipment] = {}
        self.throttle = throttle
        self.window = 0
        self._sent = 0
        self._consumed = 0
        self._answered = 0
        self.number = 0
        """Of the latest delta."""

    def opened(self, window_bytes: int) -> None:
        """A new link: the peer takes `window_bytes` unacked."""
        self.window = window_bytes
        self._sent = self._consumed = self._answered = 0

    def delta_bytes(self, most: int) -> int:
        """How large a delta may be, at most `most`: two fit the window, so that one can be on its way while
        the other is acked; and a tail waits behind no more than what the budget lets out at once."""
        limits = [most, self.window // 2 or most, self.throttle.burst or most]
        return min(limits)

    @property
    def in_flight(self) -> int:
        """Bytes that were sent and not acked."""
        return self._sent - self._consumed

    def sent(self, nbytes: int) -> None:
        """So many bytes of deltas went out."""
        self._sent += nbytes

    def lacks_answer(self, consumed_bytes: int) -> bool:
        """Whether an answer was lost: a later message than it would have been says `consumed_bytes`."""
        return consumed_bytes > self._answered

    def consumed(self, upto: int) -> None:
        """The peer has taken `upto` bytes of this link; more than was sent is not believed."""
        self._answered = max(self._answered, upto)
        self._consumed = min(max(self._consumed, upto), self._sent)

    def next_deltas(self, drain: Callable[[], None], now_ns: int) -> list[Ready] | int:
        """The delta to send now, or several that are small; else when to look again, in ns (0: when something
        has happened). `drain` applies the journal after the copies."""
        shipments = sorted(self.shipments.values(), key=lambda s: not s.urgent(now_ns))
        # A delta is at most half the window: with half of it free, the whole is never exceeded.
        if not any(s.waiting for s in shipments) or self.in_flight > self.window // 2:
            self.throttle.idle(now_ns)
            due = [ns for s in shipments if (ns := s.planner.due_ns()) is not None]
            return max(1, min(due) - now_ns) if due else 0
        wait_ns = self.throttle.wait_ns(urgent=shipments[0].urgent(now_ns), now_ns=now_ns)
        if wait_ns:
            return wait_ns
        for shipment in shipments:
            ready = shipment.next_deltas(self.number + 1, drain, now_ns, self._tail_bytes(shipment))
            if ready:
                self.number = ready[-1].delta.number
                return ready
        self.throttle.idle(now_ns)
        return 1

    def _tail_bytes(self, shipment: Shipment) -> int:
        """How much of small deltas may go at once, and one more: within half the window, and one at a time
        where bandwidth is limited."""
        differ = shipment.differ
        room = self.window // 2 - max(differ.delta_bytes, differ.block_bytes)
        return 0 if self.throttle.burst else max(0, min(differ.batch_bytes, room))

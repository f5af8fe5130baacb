"""Bandwidth budgets: token buckets in bytes, and one that several links share. Pure: `now_ns` is passed in.

A bucket may be overdrawn by what goes out as a whole, and is then closed until the debt is paid. Invariant:
in any stretch of time at most burst + rate x time + one delta leaves it, and with something to send always
at least rate x time. All sums are integers: nothing drifts.
"""

from __future__ import annotations

from dataclasses import dataclass

NS = 1_000_000_000
BURST_MS = 100
"""How much time's worth of bytes may leave at once after a pause."""
LATE_NS = 20_000_000
"""A link that was told to wait and is this late has left the queue."""
URGENT_BYTES_PER_BYTE = 8
"""Tails of one link may not starve the others: they get a byte for so many of theirs."""


class Bucket:
    """`rate` bytes a second, at most `burst` saved up (default: `BURST_MS` worth). Rate 0: no limit."""

    def __init__(self, rate: int, burst: int = 0, now_ns: int = 0) -> None:
        self.rate = rate
        self.burst = burst or rate * BURST_MS // 1000
        self._level = self.burst * NS
        self._at_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """How long until something may be sent: 0 is now."""
        if not self.rate:
            return 0
        self._refill(now_ns)
        return -(self._level // self.rate) if self._level < 0 else 0

    def take(self, nbytes: int, now_ns: int) -> None:
        """`nbytes` are being sent."""
        if self.rate:
            self._refill(now_ns)
            self._level -= nbytes * NS

    def _refill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)
        self._level = min(self.burst * NS, self._level + passed_ns * self.rate)
        self._at_ns = max(self._at_ns, now_ns)


@dataclass
class _Claim:
    """A link that has something to send. It asks again at `again_ns`; who does not has gone."""

    urgent: bool
    turn: int
    again_ns: int


class SharedBudget:
    """The bucket of a whole daemon: links with decode tails first, then whoever has waited longest. Those
    without tails get a byte for `URGENT_BYTES_PER_BYTE` of the others while they wait."""

    def __init__(self, rate: int, burst: int = 0, now_ns: int = 0) -> None:
        self.bucket = Bucket(rate, burst, now_ns)
        self._claims: dict[str, _Claim] = {}
        self._turn = 0
        self._urgent_bytes = 0
        """Sent by links with tails while one without waited, less what such a one got for it."""

    def wait_ns(self, who: str, *, urgent: bool, now_ns: int) -> int:
        """How long `who` waits before it asks again: 0 is its turn. `urgent`: it has decode tails."""
        if not self.bucket.rate:
            return 0
        wait_ns = self.bucket.wait_ns(now_ns)
        claim = self._claims.get(who)
        if claim is None:
            self._turn += 1
            claim = self._claims[who] = _Claim(urgent, self._turn, 0)
        claim.urgent = urgent
        if not wait_ns and not self._is_first(claim, now_ns):
            wait_ns = LATE_NS // 10
        claim.again_ns = now_ns + wait_ns
        return wait_ns

    def _is_first(self, claim: _Claim, now_ns: int) -> bool:
        last = self._urgent_bytes >= URGENT_BYTES_PER_BYTE * self.bucket.burst
        rank = (claim.urgent is last, claim.turn)
        return all(rank <= (other.urgent is last, other.turn) for other in self._waiting(now_ns))

    def _waiting(self, now_ns: int) -> list[_Claim]:
        return [claim for claim in self._claims.values() if claim.again_ns + LATE_NS >= now_ns]

    def take(self, who: str, nbytes: int, now_ns: int) -> None:
        """`who` is sending; it goes to the end of the queue."""
        claim = self._claims.pop(who, None)
        if claim is not None and not claim.urgent:
            self._urgent_bytes = max(0, self._urgent_bytes - URGENT_BYTES_PER_BYTE * nbytes)
        elif claim is not None:
            starved = any(not other.urgent for other in self._waiting(now_ns))
            self._urgent_bytes = self._urgent_bytes + nbytes if starved else 0
        self.bucket.take(nbytes, now_ns)

    def leave(self, who: str) -> None:
        """`who` has nothing to send, or nowhere to send it."""
        self._claims.pop(who, None)


class Throttle:
    """What one link may send now: its own bucket and the daemon's, and what they cost it."""

    def __init__(self, who: str, own: Bucket, shared: SharedBudget) -> None:
        self.waited_ns = 0
        """Time that something was ready and the budget was spent."""
        self.deferred_bytes = 0
        """Bytes of deltas that had to wait for the budget."""
        self._who = who
        self._own = own
        self._shared = shared
        self._since_ns: int | None = None
        self._late = False

    @property
    def burst(self) -> int:
        """Most bytes that leave at once within the budgets; 0: no limit."""
        limits = [b.burst for b in (self._own, self._shared.bucket) if b.rate]
        return max(1, min(limits)) if limits else 0

    def wait_ns(self, *, urgent: bool, now_ns: int) -> int:
        """Something is ready to be sent: how long until it may be; 0 is now. `urgent`: a decode tail."""
        wait_ns = self._own.wait_ns(now_ns)
        if wait_ns:
            self._shared.leave(self._who)
        else:
            wait_ns = self._shared.wait_ns(self._who, urgent=urgent, now_ns=now_ns)
        if wait_ns and self._since_ns is None:
            self._since_ns = now_ns
        elif not wait_ns and self._since_ns is not None:
            self._stop_waiting(now_ns)
            self._late = True
        return wait_ns

    def take(self, nbytes: int, now_ns: int) -> None:
        """`nbytes` are being sent."""
        self._own.take(nbytes, now_ns)
        self._shared.take(self._who, nbytes, now_ns)
        self.deferred_bytes += nbytes if self._late else 0
        self._late = False

    def idle(self, now_ns: int) -> None:
        """Nothing is ready (any more), or something else than the budget is in the way."""
        self._shared.leave(self._who)
        self._stop_waiting(now_ns)
        self._late = False

    def _stop_waiting(self, now_ns: int) -> None:
        if self._since_ns is not None:
            self.waited_ns += now_ns - self._since_ns
            self._since_ns = None

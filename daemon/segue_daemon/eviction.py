"""What has to go when the replica store runs short of room. Pure: no I/O, no clock.

Use of the arena may pass the *high mark*; then it is brought down to the *low mark*, in this order:

1. cached blocks that no replica uses, least recently asked for first;
2. what is kept for the engine of this host, those of lowest value first;
3. stale sessions: replicas that nothing happened to for `session_ttl_ns`;
4. live replicas, those of lowest value first: of the `WINDOW` least recently touched the one with the fewest
   tokens, because the cost to compute a prefix again grows faster than its length.

A replica is dropped whole (its sealed blocks become cache), and its writer is told. New replicas are admitted
only up to the low mark and never push another peer's out: only the growth of what is here already does. So a
sequence that was dropped is not sent again, to push out the next, before there really is room. What is kept
for the engine of this host stays below the low mark, and nothing but cache goes for it.

Invariants: what is being loaded, or is receiving a delta, is not touched; nobody gives way to itself;
`relieve` and `trim` stop after `MAX_BLOCKS` blocks, each O(1), but finish the one replica that they drop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from segue_daemon.blocks import BlockPool
from segue_daemon.replicas import Replica

MAX_BLOCKS = 512
WINDOW = 16
SCAN = 64
"""Most replicas looked at for a victim: those under a lease or a delta are passed over."""


class Budget:
    """How much of the arena may be taken: `limit` bytes, which memory pressure of the host can lower."""

    def __init__(self, capacity: int, *, high_watermark: float = 1.0, low_watermark: float = 1.0) -> None:
        assert 0 < low_watermark <= high_watermark <= 1
        self.capacity = capacity
        self.limit = capacity
        self._high = high_watermark
        self._low = low_watermark

    @property
    def high(self) -> int:
        """Past this many bytes things are given up."""
        return int(self.limit * self._high)

    @property
    def low(self) -> int:
        """Down to this many bytes."""
        return int(self.limit * self._low)


class Evictor:
    """Gives up what the store can spare."""

    def __init__(
        self,
        pool: BlockPool,
        budget: Budget,
        *,
        session_ttl_ns: int,
        loading: Callable[[str], bool],
        drop: Callable[[Replica], None],
    ) -> None:
        """`loading(seq)`: an engine is loading it. `drop` takes a replica out of the store, which must call
        `gone`, and tells its writer. `session_ttl_ns` 0: no session ever is stale."""
        self._pool = pool
        self._replicas: OrderedDict[str, Replica] = OrderedDict()
        self._own: OrderedDict[str, Replica] = OrderedDict()
        self._budget = budget
        self._ttl_ns = session_ttl_ns
        self._loading = loading
        self._drop = drop
        self._relieving = False
        self._wanted_bytes = 0
        """The most that was refused for lack of room, and is still wanted."""
        self.cached_blocks = 0
        self.own_replicas = 0
        self.stale_replicas = 0
        self.live_replicas = 0

    def touched(self, replica: Replica) -> None:
        """`replica` is new, has grown or was asked for: it is the last that goes."""
        replicas = self._own if replica.own else self._replicas
        replicas[replica.seq] = replica
        replicas.move_to_end(replica.seq)

    def gone(self, replica: Replica) -> None:
        """`replica` is not in the store any more."""
        (self._own if replica.own else self._replicas).pop(replica.seq, None)

    @property
    def own(self) -> int:
        """Replicas kept for the engine of this host."""
        return len(self._own)

    @property
    def live_bytes(self) -> int:
        """Bytes that replicas, deltas on their way and loads take."""
        return self._pool.used_bytes - self._pool.cached_bytes

    @property
    def room_bytes(self) -> int:
        """Room for peers' replicas that are not here yet; what is kept for the engine here gives way."""
        own = sum(replica.placed_bytes for replica in self._own.values())
        return max(0, self._budget.low - max(0, self.live_bytes - own))

    def admit_own(self, nbytes: int) -> bool:
        """Whether what is kept for the engine of this host may take `nbytes` more. If there is nothing else
        it may begin with whatever there is."""
        return not (self._replicas or self._own) or self.live_bytes + nbytes <= self._budget.low

    def admit(self, nbytes: int, now_ns: int) -> bool:
        """Whether a replica that is not here yet may begin with `nbytes`; only stale ones, and what is kept
        for the engine here, give way to it. The first one of all may take whatever there is."""
        while self._replicas and self.live_bytes + nbytes > self._budget.low:
            if not self._drop_own() and not self._drop_stale(now_ns, None):
                self._wanted_bytes = max(self._wanted_bytes, nbytes)
                return False
        return True

    def make_room(self, nbytes: int, now_ns: int, beneficiary: Replica | None) -> bool:
        """Bring use down until `nbytes` more fit within the limit. Live replicas give way to the growth of
        `beneficiary`; without one they do not."""
        own = beneficiary.held_bytes if beneficiary is not None else 0
        if own + nbytes > self._budget.limit:
            return False  # whatever the others gave up, it would not fit
        while self._pool.used_bytes + nbytes > self._budget.limit:
            if not self._evict_one(now_ns, beneficiary, live=beneficiary is not None):
                if beneficiary is None or not beneficiary.own:
                    self._wanted_bytes = max(self._wanted_bytes, nbytes)
                return False
        return True

    def evict_for_extent(self, now_ns: int, beneficiary: Replica | None) -> bool:
        """There is room, but not in one piece (blocks of several sizes): give up one thing more, but nothing
        live. False if there is nothing."""
        return self._evict_one(now_ns, beneficiary, live=False) > 0

    def relieve(self, now_ns: int, beneficiary: Replica) -> None:
        """After `beneficiary` got room: past the high mark, take a bounded step towards the low mark."""
        if self._pool.used_bytes > self._budget.high:
            self._relieving = True
        live = beneficiary.held_bytes < self._budget.low
        work = 0
        while self._relieving and work < MAX_BLOCKS:
            done = 0
            if self._pool.used_bytes > self._budget.low:
                done = self._evict_one(now_ns, beneficiary, live=live)
            work += done
            self._relieving = done > 0

    def trim(self, now_ns: int) -> bool:
        """A bounded step of what is due without anybody asking: past the high mark cached blocks and stale
        sessions go, past the limit live replicas too; stale ones also for what was refused before. Whether
        there is more to do."""
        work = 0
        used = self._pool.used_bytes
        self._relieving = used > self._budget.low and (self._relieving or used > self._budget.high)
        while self._relieving and work < MAX_BLOCKS:
            used = self._pool.used_bytes
            done = 0
            if used > self._budget.low:
                done = self._evict_one(now_ns, None, live=used > self._budget.limit)
            work += done
            self._relieving = done > 0
        while self._wanted_bytes and work < MAX_BLOCKS:
            if self.room_bytes >= min(self._wanted_bytes, self._budget.low):
                self._wanted_bytes = 0
            else:
                done = self._drop_stale(now_ns, None)
                if not done:
                    break
                work += done
        return work >= MAX_BLOCKS

    def _evict_one(self, now_ns: int, beneficiary: Replica | None, *, live: bool) -> int:
        """Give up the next thing in order; how many blocks that concerned, 0 if there is nothing."""
        if self._pool.evict():
            self.cached_blocks += 1
            return 1
        if beneficiary is not None and beneficiary.own:
            return 0
        done = self._drop_own() or self._drop_stale(now_ns, beneficiary)
        if done or not live:
            return done
        victim = self._cheapest(self._replicas, beneficiary)
        if victim is None:
            return 0
        self.live_replicas += 1
        self._drop(victim)
        return max(1, len(victim.blocks))

    def _cheapest(
        self, replicas: OrderedDict[str, Replica], beneficiary: Replica | None = None
    ) -> Replica | None:
        spare = [replica for replica in islice(replicas.values(), SCAN) if self._spare(replica, beneficiary)]
        return min(spare[:WINDOW], key=lambda replica: replica.watermark, default=None)

    def _drop_own(self) -> int:
        victim = self._cheapest(self._own)
        if victim is None:
            return 0
        self.own_replicas += 1
        self._drop(victim)
        return max(1, len(victim.blocks))

    def _drop_stale(self, now_ns: int, beneficiary: Replica | None) -> int:
        if not self._ttl_ns:
            return 0
        for replica in islice(self._replicas.values(), SCAN):
            if replica.touched_ns + self._ttl_ns > now_ns:
                return 0
            if self._spare(replica, beneficiary):
                self.stale_replicas += 1
                self._drop(replica)
                return max(1, len(replica.blocks))
        return 0

    def _spare(self, replica: Replica, beneficiary: Replica | None) -> bool:
        """Whether `replica` can be given up now."""
        return replica is not beneficiary and not replica.busy and not self._loading(replica.seq)


class HostPressure:
    """How much memory the host lets the replicas have. Pure.

    What the arena may take at most is what it takes now, plus what the host has to spare beyond
    `min_free_bytes`. It shrinks at once and grows only when a quarter more than that is spare, so that it
    does not swing. `resident_bytes` must be what the arena really takes, not what is allocated in it.
    """

    def __init__(self, capacity: int, *, min_free_bytes: int) -> None:
        self._capacity = capacity
        self._min_free = min_free_bytes
        self.limit = capacity

    def observe(self, available_bytes: int, resident_bytes: int) -> int:
        """The new limit, given the host's available memory."""
        if not self._min_free:
            return self.limit
        spare = available_bytes - self._min_free
        if spare < 0:
            self.limit = min(self.limit, max(0, resident_bytes + spare))
        else:
            spare -= self._min_free // 4
            if spare > 0:
                self.limit = max(self.limit, min(self._capacity, resident_bytes + spare))
        return self.limit

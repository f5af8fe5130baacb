"""Leases: blocks that stay put while an engine copies them into its own pages.

Invariant: a block under a lease is pinned exactly once for it, from `take` until `end`; a lease that is
past its deadline is ended by `expired` and cannot be ended twice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from segue_daemon.blocks import Block, BlockPool


@dataclass(eq=False)
class Lease:
    """Blocks pinned for an engine that loads them, until `deadline_ns`. `before` are the blocks of the same
    prefix that the engine has already: they are not loaded, but wanted all the same."""

    number: int
    seq: str
    blocks: list[Block]
    deadline_ns: int
    before: list[Block] = field(default_factory=list)


MAX_LEASES = 4096
"""An engine that asks more often within a lease's time gets nothing: what it pins nobody else can use."""


class Leases:
    """All leases that are out. Deadlines are in order: each lease lasts equally long."""

    def __init__(self, pool: BlockPool, *, lease_ns: int) -> None:
        self._pool = pool
        self._lease_ns = lease_ns
        self._out: OrderedDict[int, Lease] = OrderedDict()
        self._seqs: Counter[str] = Counter()
        self._next = 1

    def __len__(self) -> int:
        return len(self._out)

    def take(self, seq: str, blocks: list[Block], now_ns: int, *, before: list[Block]) -> Lease:
        """Pin `blocks` for an engine that asked for `seq`."""
        for block in blocks:
            self._pool.pin(block)
        lease = Lease(self._next, seq, blocks, now_ns + self._lease_ns, before)
        self._next += 1
        self._out[lease.number] = lease
        self._seqs[seq] += 1
        return lease

    def end(self, number: int) -> Lease | None:
        """Unpin; None if that lease is over already. What was asked for last, and of that the start of the
        prefix, is given up last: without its start the rest of a prefix cannot be found."""
        lease = self._out.pop(number, None)
        if lease is None:
            return None
        for block in reversed(lease.blocks):
            self._pool.unpin(block)
        for block in reversed(lease.before):
            self._pool.touch(block)
        self._seqs[lease.seq] -= 1
        if not self._seqs[lease.seq]:
            del self._seqs[lease.seq]
        return lease

    def expired(self, now_ns: int) -> list[int]:
        """Numbers of leases past their deadline."""
        late = []
        for lease in self._out.values():
            if lease.deadline_ns >= now_ns:
                break
            late.append(lease.number)
        return late

    def covers(self, seq: str) -> bool:
        """Whether an engine is loading `seq`."""
        return seq in self._seqs

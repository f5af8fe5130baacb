"""The planner: which sequence a peer gets next, and how much of it. Pure: no I/O; time is passed in.

One `Planner` a peer. Ordering rule: decode tails (at most one block behind) before prefill bulk, so that an
answer being written never waits behind somebody's long prompt; fair in bytes within each, weighted by
`PRICE`, so that no priority starves another. Tails that grow all the time may not starve bulk either: it gets
a byte for `TAIL_BYTES_PER_BULK_BYTE` of theirs. Nothing is queued: a plan is made when the link can take it,
from what is true then, so a slow or throttled link means larger deltas and never a backlog. Cost is
proportional to sequences with something to send, not to sequences that live.

When a tail is due: `sync_every_tokens` are unsent, or a block is full, or the oldest unsent token is
`sync_every_ms` old (`due_ns` says when to ask again), or it is what bulk left over.

Invariant: for each sequence, `sent` >= `acked`, and a plan starts where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from segue_core.messages.peer import MAX_PARTS
from segue_core.messages.request import Replication
from segue_daemon.fair_queue import FairQueue
from segue_daemon.ledger import Sequence

TAIL_BYTES_PER_BULK_BYTE = 8
PRICE: dict[Replication, int] = {"low": 16, "normal": 4, "high": 1}
"""What a byte of a sequence is charged: where the way is short, high gets four bytes for one of normal, and
normal four for one of low."""


@dataclass
class Progress:
    """What one peer has of one sequence: tokens sent to it, tokens it acknowledged."""

    epoch: int
    sent: int = 0
    acked: int = 0
    stopped: str = ""
    """Why this sequence is not sent (fenced, malformed); empty while it is."""


class Plan(NamedTuple):
    """Send tokens [base, upto) of `seq`; `upto == base` never happens."""

    seq: str
    base: int
    upto: int


class Planner:
    """Decides for one peer."""

    def __init__(
        self,
        *,
        block_size: int,
        sync_every_tokens: int,
        delta_tokens: int,
        sync_every_ms: int = 0,
        token_bytes: int = 1,
    ) -> None:
        """`delta_tokens`: most tokens of one delta (rounded down to whole blocks, at least one).
        `sync_every_tokens`, `sync_every_ms`: 0 leaves that rule out. `token_bytes`: KV of one token."""
        self._block_size = block_size
        self._sync_every = sync_every_tokens
        self._sync_ns = sync_every_ms * 1_000_000
        self._delta_blocks = max(1, min(delta_tokens // block_size, MAX_PARTS))
        self._token_bytes = token_bytes
        self._bulk_turn_at = TAIL_BYTES_PER_BULK_BYTE * self._delta_blocks * block_size * token_bytes
        self._tail_bytes = 0
        self._tails = FairQueue()
        self._bulk = FairQueue()
        self._turn = self._tails
        self._young: dict[str, int] = {}
        """Tails that are not due yet: when they will be. The order of insertion is the order of time."""
        self._flushing = False
        self.progress: dict[str, Progress] = {}

    def note(self, sequence: Sequence, now_ns: int = 0) -> None:
        """`sequence` began or grew."""
        self._list(sequence, now_ns, due=self._flushing)

    def _list(self, sequence: Sequence, now_ns: int, *, due: bool) -> None:
        """Put `sequence` where it belongs. `due`: whatever it has to send is."""
        seq = sequence.seq
        progress = self.progress.get(seq)
        if progress is None or progress.epoch != sequence.epoch:
            progress = self.progress[seq] = Progress(sequence.epoch)
        behind = sequence.shippable - progress.sent
        if behind <= 0 or progress.stopped or sequence.fenced or not sequence.replicated:
            return
        if not progress.sent or behind > self._block_size:
            self._tails.discard(seq)
            self._young.pop(seq, None)
            self._bulk.add(seq)
            return
        self._bulk.discard(seq)
        sealed = sequence.shippable // self._block_size > progress.sent // self._block_size
        if due or sealed or 0 < self._sync_every <= behind:
            self._young.pop(seq, None)
            self._tails.add(seq)
        elif self._sync_ns and seq not in self._tails:
            self._young.setdefault(seq, now_ns + self._sync_ns)

    def next(self, find: Callable[[str], Sequence | None], now_ns: int = 0) -> Plan | None:
        """The next thing to send, taken off the list; None if there is nothing. `find` gives the
        live sequence of that name."""
        self._ripen(now_ns)
        bulk_first = self._tail_bytes >= self._bulk_turn_at
        for waiting in (self._bulk, self._tails) if bulk_first else (self._tails, self._bulk):
            while (seq := waiting.pop()) is not None:
                plan = self._plan(find(seq), self.progress.get(seq))
                if plan is not None:
                    self._turn = waiting
                    return plan
        return None

    def _ripen(self, now_ns: int) -> None:
        while self._young:
            seq, due_ns = next(iter(self._young.items()))
            if due_ns > now_ns:
                return
            del self._young[seq]
            self._tails.add(seq)

    def _plan(self, sequence: Sequence | None, progress: Progress | None) -> Plan | None:
        if sequence is None or progress is None or progress.stopped or sequence.fenced:
            return None
        base, have = progress.sent, sequence.shippable
        last_block = base // self._block_size + self._delta_blocks
        upto = min(have, last_block * self._block_size)
        return Plan(sequence.seq, base, upto) if upto > base else None

    def put_back(self, plan: Plan, *, tail: bool) -> None:
        """`plan` was not made use of: its sequence has its turn again, planned anew."""
        (self._tails if tail else self._bulk).add(plan.seq)

    @property
    def tail_turn(self) -> bool:
        """Whether the latest plan was a decode tail's; set it back to charge an earlier one."""
        return self._turn is self._tails

    @tail_turn.setter
    def tail_turn(self, tail: bool) -> None:
        self._turn = self._tails if tail else self._bulk

    @property
    def tail_next(self) -> bool:
        """Whether a decode tail is due, and nothing comes before it."""
        return bool(self._tails) and self._tail_bytes < self._bulk_turn_at

    def sent(self, sequence: Sequence, upto: int, now_ns: int = 0, nbytes: int | None = None) -> None:
        """The delta that was planned last went out, up to `upto` tokens; what remains is listed again.
        `nbytes`: what it took of the link (default: the KV of its tokens)."""
        progress = self.progress[sequence.seq]
        cost = max(1, (upto - progress.sent) * self._token_bytes if nbytes is None else nbytes)
        self._turn.charge(sequence.seq, cost * PRICE.get(sequence.replication, 1))
        if self._turn is self._bulk:
            self._tail_bytes = max(0, self._tail_bytes - TAIL_BYTES_PER_BULK_BYTE * cost)
        else:
            self._tail_bytes = self._tail_bytes + cost if self._bulk else 0
        progress.sent = upto
        self._list(sequence, now_ns, due=self._flushing or self._turn is self._bulk)

    def acked(self, seq: str, epoch: int, watermark: int) -> None:
        """The peer holds `watermark` tokens, verified. Never more than was sent: such an ack is capped."""
        progress = self.progress.get(seq)
        if progress is not None and progress.epoch == epoch:
            progress.acked = max(progress.acked, min(watermark, progress.sent))

    def rewind(self, sequence: Sequence, watermark: int, now_ns: int = 0) -> None:
        """Start again from `watermark` (a nack, or a new link to the same peer)."""
        progress = self.progress.get(sequence.seq)
        if progress is not None and progress.epoch == sequence.epoch:
            progress.sent = progress.acked = min(watermark, sequence.known)
            self.note(sequence, now_ns)

    def stop(self, seq: str, epoch: int, reason: str, watermark: int | None = None) -> None:
        """Do not send `seq` any more under this epoch. `watermark`: what the peer says that it holds; it may
        have given up what it had acknowledged."""
        progress = self.progress.get(seq)
        if progress is not None and progress.epoch == epoch:
            progress.stopped = reason
            if watermark is not None:
                progress.sent = progress.acked = min(progress.acked, watermark)
            for waiting in (self._tails, self._bulk):
                waiting.discard(seq)
            self._young.pop(seq, None)

    def forget(self, seq: str) -> Progress | None:
        """The sequence is over; what the peer had of it."""
        for waiting in (self._tails, self._bulk):
            waiting.forget(seq)
        self._young.pop(seq, None)
        return self.progress.pop(seq, None)

    def flush(self) -> None:
        """From now on every token is due at once. Whoever calls notes all sequences anew."""
        self._flushing = True

    @property
    def waiting(self) -> int:
        """Sequences with something to send that is due."""
        return len(self._tails) + len(self._bulk)

    def urgent(self, now_ns: int) -> bool:
        """Whether a decode tail is due."""
        self._ripen(now_ns)
        return bool(self._tails)

    def due_ns(self) -> int | None:
        """When the next tail that is not due yet will be; None if there is none."""
        return next(iter(self._young.values()), None)

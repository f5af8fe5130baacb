"""The planner: which sequence a peer gets next, and how much of it. Pure: no I/O, no clock.

One `Planner` a peer. Ordering rule: decode tails (at most one block behind) before prefill bulk, so
that an answer being written never waits behind somebody's long prompt; first come first served
within each. Nothing is queued: a plan is made when the link can take it, from what is true then, so
a slow link means larger deltas and never a backlog. Cost is proportional to sequences with something
to send, not to sequences that live.

Invariant: for each sequence, `sent` >= `acked`, and a plan starts where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from segue_daemon.ledger import Sequence


@dataclass
class Progress:
    """What one peer has of one sequence: tokens sent to it, tokens it acknowledged."""

    epoch: int
    sent: int = 0
    acked: int = 0
    stopped: str = ""
    """Why this sequence is not sent (fenced, malformed); empty while it is."""


@dataclass(frozen=True)
class Plan:
    """Send tokens [base, upto) of `seq`; `upto == base` never happens."""

    seq: str
    base: int
    upto: int


class Planner:
    """Decides for one peer."""

    def __init__(self, *, block_size: int, sync_every_tokens: int, delta_tokens: int) -> None:
        """`delta_tokens`: most tokens of one delta (rounded down to whole blocks, at least one)."""
        self._block_size = block_size
        self._sync_every = sync_every_tokens
        self._delta_blocks = max(1, delta_tokens // block_size)
        self._tails: dict[str, None] = {}
        self._bulk: dict[str, None] = {}
        self.progress: dict[str, Progress] = {}

    def note(self, sequence: Sequence) -> None:
        """`sequence` began or grew."""
        progress = self.progress.get(sequence.seq)
        if progress is None or progress.epoch != sequence.epoch:
            progress = self.progress[sequence.seq] = Progress(sequence.epoch)
        if progress.stopped or sequence.fenced:
            return
        behind = sequence.shippable - progress.sent
        if behind <= 0:
            return
        if progress.sent and behind <= self._block_size:
            self._bulk.pop(sequence.seq, None)
            if behind >= self._sync_every or sequence.shippable % self._block_size == 0:
                self._tails[sequence.seq] = None
        else:
            self._tails.pop(sequence.seq, None)
            self._bulk[sequence.seq] = None

    def next(self, find: Callable[[str], Sequence | None]) -> Plan | None:
        """The next thing to send, taken off the list; None if there is nothing. `find` gives the
        live sequence of that name."""
        for waiting in (self._tails, self._bulk):
            while waiting:
                seq = next(iter(waiting))
                del waiting[seq]
                plan = self._plan(find(seq), self.progress.get(seq))
                if plan is not None:
                    return plan
        return None

    def _plan(self, sequence: Sequence | None, progress: Progress | None) -> Plan | None:
        if sequence is None or progress is None or progress.stopped or sequence.fenced:
            return None
        base, have = progress.sent, sequence.shippable
        last_block = base // self._block_size + self._delta_blocks
        upto = min(have, last_block * self._block_size)
        return Plan(sequence.seq, base, upto) if upto > base else None

    def sent(self, sequence: Sequence, upto: int) -> None:
        """A delta up to `upto` tokens went out; what remains is listed again."""
        self.progress[sequence.seq].sent = upto
        self.note(sequence)

    def acked(self, seq: str, epoch: int, watermark: int) -> None:
        """The peer holds `watermark` tokens, verified. Never more than was sent: such an ack is capped."""
        progress = self.progress.get(seq)
        if progress is not None and progress.epoch == epoch:
            progress.acked = max(progress.acked, min(watermark, progress.sent))

    def rewind(self, sequence: Sequence, watermark: int) -> None:
        """Start again from `watermark` (a nack, or a new link to the same peer)."""
        progress = self.progress.get(sequence.seq)
        if progress is not None and progress.epoch == sequence.epoch:
            progress.sent = progress.acked = min(watermark, sequence.known)
            self.note(sequence)

    def stop(self, seq: str, epoch: int, reason: str) -> None:
        """Do not send `seq` any more under this epoch."""
        progress = self.progress.get(seq)
        if progress is not None and progress.epoch == epoch:
            progress.stopped = reason
            self._tails.pop(seq, None)
            self._bulk.pop(seq, None)

    def forget(self, seq: str) -> Progress | None:
        """The sequence is over; what the peer had of it."""
        self._tails.pop(seq, None)
        self._bulk.pop(seq, None)
        return self.progress.pop(seq, None)

    @property
    def waiting(self) -> int:
        """Sequences with something to send."""
        return len(self._tails) + len(self._bulk)

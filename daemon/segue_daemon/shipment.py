"""What one peer gets of one engine life: planner and differ together, and how answers move them.

No sockets: the link asks `next_delta` when it can send, and reports acks and nacks. Invariant: a delta
is handed out only if every block it was copied from still belonged to its sequence after the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from segue_core.messages.peer import Ack, Delta, Nack, NackReason
from segue_daemon.differ import Differ
from segue_daemon.engine import EngineSession
from segue_daemon.ledger import Changes, Sequence
from segue_daemon.planner import Planner
from segue_daemon.settings import ReplicationSettings


@dataclass(frozen=True)
class Ready:
    """A delta to send now; `payload` is valid until the next one is built."""

    delta: Delta
    payload: memoryview


class Shipment:
    """One engine session on its way to one peer life."""

    def __init__(
        self,
        session: EngineSession,
        settings: ReplicationSettings,
        delta_bytes: int,
        holds: Callable[[str], bool],
    ) -> None:
        """`holds(seq)`: whether this peer is to have a replica of `seq`. `delta_bytes`: most payload of one
        delta, unless a single block is larger."""
        geometry = session.pages.geometry
        per_token = max(1, geometry.block_bytes // geometry.block_size)
        self.session = session
        self.planner = Planner(
            block_size=geometry.block_size,
            sync_every_tokens=settings.sync_every_tokens,
            delta_tokens=delta_bytes // per_token,
        )
        self.differ = Differ(
            session.ledger,
            session.pages,
            incarnation=session.incarnation,
            delta_bytes=delta_bytes,
            shadow_bytes=settings.shadow_bytes,
        )
        self.torn = 0
        self._holds = holds
        self._last_sent: dict[str, int] = {}
        self._rewound_at: dict[str, int] = {}
        self._rewinds: dict[str, int] = {}
        for sequence in self._placed():
            self.planner.note(sequence)

    def _placed(self) -> list[Sequence]:
        return [s for s in self.session.ledger.sequences.values() if self._holds(s.seq)]

    def note(self, changes: Changes) -> None:
        """The ledger moved."""
        for seq in changes.grown:
            sequence = self.session.ledger.sequences.get(seq)
            if sequence is not None and self._holds(seq):
                self.planner.note(sequence)

    def next_delta(self, number: int, drain: Callable[[], None]) -> Ready | None:
        """Build the next delta. `drain` is called after the copy: it must apply the journal."""
        while True:
            plan = self.planner.next(self.session.ledger.sequences.get)
            if plan is None:
                return None
            sequence = self.session.ledger.sequences[plan.seq]
            built = self.differ.build(sequence, plan, number)
            if built is None:
                continue  # its blocks are gone: the journal will say what became of it
            drain()
            if not self.differ.still_good(sequence, built):
                self.torn += 1
                self.differ.discard(built)
                continue
            self.differ.accept(built)
            self._last_sent[plan.seq] = number
            self.planner.sent(sequence, built.upto)
            return Ready(built.delta, built.payload)

    def acked(self, ack: Ack) -> None:
        """The peer verified up to a watermark."""
        progress = self.planner.progress.get(ack.seq)
        if progress is None or progress.epoch != ack.epoch:
            return
        before = progress.acked
        self._rewinds.pop(ack.seq, None)
        self.planner.acked(ack.seq, ack.epoch, ack.watermark)
        sequence = self.session.ledger.sequences.get(ack.seq)
        if sequence is not None:
            size = self.session.pages.geometry.block_size
            self.differ.hold(sequence.keys[before // size : progress.acked // size])

    def nacked(self, nack: Nack) -> None:
        """The peer dropped a delta: start again from what it has, or stop."""
        progress = self.planner.progress.get(nack.seq)
        sequence = self.session.ledger.sequences.get(nack.seq)
        if progress is None or progress.epoch != nack.epoch or sequence is None:
            return
        if nack.reason in STOPPING:
            self.planner.stop(nack.seq, nack.epoch, nack.reason.name.lower())
            self.differ.forget(nack.seq)
            return
        if nack.number <= self._rewound_at.get(nack.seq, 0):
            return  # sent before the last rewind: answered already
        if nack.reason == NackReason.KEY_UNKNOWN:
            self.differ.drop_keys(sequence.keys)
        self._rewound_at[nack.seq] = self._last_sent.get(nack.seq, 0)
        self._rewinds[nack.seq] = self._rewinds.get(nack.seq, 0) + 1
        if self._rewinds[nack.seq] > MAX_REWINDS:
            self.planner.stop(nack.seq, nack.epoch, RETRY_LATER)
            return
        self.rewind(sequence, nack.watermark)

    def rewind(self, sequence: Sequence, watermark: int) -> None:
        """Send `sequence` again from `watermark`."""
        self.differ.rewind(sequence.seq)
        self.planner.rewind(sequence, watermark)

    def reconnected(self) -> None:
        """A new link to the same life of the peer: what was not acked may be lost, what was is there."""
        for sequence in self._placed():
            progress = self.planner.progress.get(sequence.seq)
            self.rewind(sequence, progress.acked if progress else 0)

    def retry_refused(self, free_bytes: int) -> None:
        """Called at each sign of life with the peer's room: try again what it refused for now."""
        retried = 0
        for seq, progress in list(self.planner.progress.items()):
            sequence = self.session.ledger.sequences.get(seq)
            if sequence is None or progress.stopped not in (NO_ROOM, RETRY_LATER):
                continue
            if progress.stopped == NO_ROOM and free_bytes < self.differ.block_bytes:
                continue
            progress.stopped = ""
            self.rewind(sequence, progress.acked)
            retried += 1
            if retried == MAX_RETRIES_AT_ONCE:
                return

    def forget(self, seq: str) -> bool:
        """The sequence is over; whether the peer has something of it."""
        self.differ.forget(seq)
        self._last_sent.pop(seq, None)
        self._rewound_at.pop(seq, None)
        self._rewinds.pop(seq, None)
        progress = self.planner.forget(seq)
        return progress is not None and progress.sent > 0

    def watermark(self, seq: str) -> int:
        """Tokens of `seq` that the peer verified."""
        progress = self.planner.progress.get(seq)
        return progress.acked if progress else 0

    def lag_tokens(self) -> int:
        """Tokens computed here and not acked there, over all sequences that are sent."""
        total = 0
        for sequence in self._placed():
            progress = self.planner.progress.get(sequence.seq)
            if not sequence.fenced and not (progress and progress.stopped):
                total += max(0, sequence.shippable - (progress.acked if progress else 0))
        return total


STOPPING = (NackReason.FENCED, NackReason.NO_ROOM, NackReason.MALFORMED, NackReason.CORRUPT)
NO_ROOM = NackReason.NO_ROOM.name.lower()
RETRY_LATER = NackReason.CORRUPT.name.lower()
MAX_REWINDS = 8
"""Rewinds of one sequence without an ack in between; after that it waits for the next sign of life."""
MAX_RETRIES_AT_ONCE = 16

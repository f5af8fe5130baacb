"""What one peer gets of an engine that gives no notice: copies that the engine has confirmed, and no others.

A `Shipment` whose order is: copy, hold back, hear the engine once more, send. Such an engine says between two
steps what holds then, and nothing before it overwrites, so a copy is never known to be whole when it is made.
What the scan of its sealed blocks proves needs no word of the engine, and goes at once.

Invariant: a delta is handed out only if a commit was written after its copy was complete and its blocks still
belonged to the sequence then, or if each of its bytes is proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from segue_core.messages.peer import Nack
from segue_daemon.engine import EngineSession
from segue_daemon.hold import Held, HoldBack
from segue_daemon.lag import LagMeter
from segue_daemon.ledger import Changes, Sequence
from segue_daemon.planner import Plan
from segue_daemon.scan import BlockScan
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Ready, Shipment


def shipment_of(
    session: EngineSession,
    settings: ReplicationSettings,
    delta_bytes: int,
    holds: Callable[[str], bool],
    lag: LagMeter | None = None,
    now_ns: int = 0,
) -> Shipment:
    """The shipment that goes with the notice that `session` gives. Arguments: see `Shipment`."""
    if session.scan is None:
        return Shipment(session, settings, delta_bytes, holds, lag, now_ns)
    return ConfirmedShipment(session, settings, delta_bytes, holds, lag, now_ns, scan=session.scan)


class ConfirmedShipment(Shipment):
    """One engine session without notice on its way to one peer life."""

    def __init__(
        self,
        session: EngineSession,
        settings: ReplicationSettings,
        delta_bytes: int,
        holds: Callable[[str], bool],
        lag: LagMeter | None = None,
        now_ns: int = 0,
        *,
        scan: BlockScan,
    ) -> None:
        super().__init__(session, settings, delta_bytes, holds, lag, now_ns)
        self._hold = HoldBack(settings.hold_bytes)
        self._scan = scan

    @property
    def held_bytes(self) -> int:
        return self._hold.nbytes

    @property
    def waiting(self) -> bool:
        if self._hold.settled(self.session.committed_at) is not None:
            return True
        return self.planner.waiting > 0 and not self._hold.full

    def urgent(self, now_ns: int) -> bool:
        held = self._hold.settled(self.session.committed_at)
        return self.planner.urgent(now_ns) or (held is not None and held.tail)

    def next_deltas(
        self, number: int, drain: Callable[[], None], now_ns: int = 0, tail_bytes: int = 0
    ) -> list[Ready]:
        """One at a time: what is held back has memory of its own."""
        ready = self.next_delta(number, drain, now_ns)
        return [ready] if ready is not None else []

    def next_delta(self, number: int, drain: Callable[[], None], now_ns: int = 0) -> Ready | None:
        """The next delta that is sure. None: there is none for now; at most one more copy was made."""
        drain()
        if self.session.ledger.stale:
            return None  # what settles now could not be checked
        while (held := self._hold.settled(self.session.committed_at)) is not None:
            self._hold.drop(held.sequence.seq)
            if self._confirmed(held):
                delta = msgspec.structs.replace(held.built.delta, number=number)
                self.planner.tail_turn = held.tail
                return self._hand_out(held.sequence, replace(held.built, delta=delta), now_ns)
            self.differ.discard(held.built)
            now = self.session.ledger.sequences.get(held.sequence.seq)
            if self._may_send(now):
                self._note(now, now_ns)
        return None if self._hold.full else self._copy(number, now_ns)

    def _confirmed(self, held: Held) -> bool:
        """Whether the engine's later word is that the copy was good, and the peer may still get it."""
        built = held.built
        if not self.differ.still_good(held.sequence, built):
            self.torn += 1
            return False
        self._scan.learn(built.delta, built.payload)
        progress = self.planner.progress.get(built.delta.seq)
        return (
            progress is not None
            and (progress.epoch, progress.sent) == (built.delta.epoch, built.delta.base)
            and not progress.stopped
            and not held.sequence.fenced
        )

    def _copy(self, number: int, now_ns: int) -> Ready | None:
        """Copy what is due next, and hold it back; or hand it out at once if it is proved."""
        while (plan := self.planner.next(self.session.ledger.sequences.get, now_ns)) is not None:
            if plan.seq in self._hold:
                continue  # it is listed again when what is held is settled
            sequence = self.session.ledger.sequences[plan.seq]
            if self.session.dead:
                plan = self._whole_blocks(plan)
            built = self.differ.build(sequence, plan, number) if plan.upto > plan.base else None
            if built is None:
                continue
            if self._scan.proves_all(built.delta, built.payload):
                return self._hand_out(sequence, built, now_ns)
            if self.session.dead:
                self.differ.discard(built)
                continue  # nobody will ever say that it is whole
            own = replace(built, payload=memoryview(bytes(built.payload)))
            self._hold.add(Held(sequence, own, self.session.written, self.planner.tail_turn))
            return None
        return None

    def _whole_blocks(self, plan: Plan) -> Plan:
        """What of `plan` can be proved without the engine: tails cannot."""
        return plan._replace(upto=plan.upto - plan.upto % self.session.pages.geometry.block_size)

    def unflushed(self) -> int:
        """Of a dead engine only what is under way or can be proved: the rest is never confirmed."""
        if not self.session.dead:
            return super().unflushed()
        under_way = [p.sent - p.acked for p in self.planner.progress.values() if not p.stopped]
        return sum(under_way) + self.waiting

    def note(self, changes: Changes, now_ns: int = 0) -> None:
        for seq, _ in changes.forgotten:
            self._void(seq)
        super().note(changes, now_ns)

    def flush(self, now_ns: int) -> None:
        if self.session.dead:
            for seq in self._hold.waiting(self.session.committed_at):
                self._void(seq)  # nobody will confirm it, and it is in the way of what can be proved
        super().flush(now_ns)

    def rewind(self, sequence: Sequence, watermark: int, now_ns: int = 0) -> None:
        self._void(sequence.seq)
        super().rewind(sequence, watermark, now_ns)

    def forget(self, seq: str) -> int:
        self._void(seq)
        return super().forget(seq)

    def _stop(self, nack: Nack, reason: str) -> None:
        self._void(nack.seq)
        super()._stop(nack, reason)

    def _void(self, seq: str) -> None:
        """What is held of `seq` does not continue what the peer has any more."""
        held = self._hold.drop(seq)
        if held is not None:
            self.differ.discard(held.built)

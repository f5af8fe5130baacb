"""What one peer gets of one engine life: planner and differ together, and how answers move them.

No sockets, no clock: the link asks `next_deltas` when it can send, reports acks and nacks, and says what time
it is. Invariants: a delta is handed out only if every block it was copied from still belonged to its sequence
after the copy; only answers to what was sent since the sequence began here count; a delta of changed items is
built only where it is sure what the peer has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from segue_core.messages.peer import Ack, Delta, Nack, NackReason
from segue_daemon.differ import Built, Differ, Draft
from segue_daemon.engine import EngineSession
from segue_daemon.lag import LagMarks, LagMeter
from segue_daemon.ledger import Changes, Sequence
from segue_daemon.planner import Planner
from segue_daemon.settings import ReplicationSettings


class Ready(NamedTuple):
    """A delta to send now; `payload` is valid until the next ones are built."""

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
        lag: LagMeter | None = None,
        now_ns: int = 0,
    ) -> None:
        """`holds(seq)`: whether this peer is to have a replica of `seq` (placement says). `delta_bytes`: most
        payload of one delta, unless a single block is larger. `lag`: where the peer's lag is counted."""
        geometry = session.pages.geometry
        per_token = max(1, geometry.block_bytes // geometry.block_size)
        self.session = session
        self.planner = Planner(
            block_size=geometry.block_size,
            sync_every_tokens=settings.sync_every_tokens,
            delta_tokens=delta_bytes // per_token,
            sync_every_ms=settings.sync_every_ms,
            token_bytes=per_token,
        )
        self.differ = Differ(
            session.ledger,
            session.pages,
            incarnation=session.incarnation,
            delta_bytes=delta_bytes,
            shadow_bytes=settings.shadow_bytes,
        )
        self.torn = 0
        self.lag = LagMarks(lag or LagMeter())
        self._holds = holds
        self._behind: dict[str, None] = {}
        """Sequences that may have tokens that are not acked: each that grew or was rewound since it was last
        looked at. So nobody has to look through all that live."""
        self._refused: dict[str, None] = {}
        """Sequences that the peer refused for now, those that were tried longest ago first."""
        self._newest = 0
        self._first_sent: dict[str, int] = {}
        self._unsure: dict[str, int] = {}
        """Rewound sequences: the peer may take any delta up to this number, on top of what is sent now."""
        self._last_sent: dict[str, int] = {}
        self._rewound_at: dict[str, int] = {}
        self._rewinds: dict[str, int] = {}
        for sequence in self._placed():
            self._note(sequence, now_ns)

    def _placed(self) -> list[Sequence]:
        return [s for s in self.session.ledger.sequences.values() if self._may_send(s)]

    def _may_send(self, sequence: Sequence | None) -> TypeGuard[Sequence]:
        """Whether this peer is to have it. One that peers must not have is not even placed."""
        return sequence is not None and sequence.replicated and self._holds(sequence.seq)

    def note(self, changes: Changes, now_ns: int = 0) -> None:
        """The ledger moved."""
        for seq in changes.grown:
            sequence = self.session.ledger.sequences.get(seq)
            if self._may_send(sequence):
                self._note(sequence, now_ns)

    def _note(self, sequence: Sequence, now_ns: int) -> None:
        before = self.planner.progress.get(sequence.seq)
        self._behind[sequence.seq] = None
        self.planner.note(sequence, now_ns)
        progress = self.planner.progress[sequence.seq]
        if progress is not before:
            self.lag.forget(sequence.seq)
        if not progress.stopped and not sequence.fenced:
            self.lag.grew(sequence.seq, progress.acked, sequence.shippable, now_ns)

    def begin(self, seq: str, now_ns: int) -> None:
        """This peer is to hold `seq` from now on: send it from its start."""
        sequence = self.session.ledger.sequences.get(seq)
        if sequence is not None:
            self._note(sequence, now_ns)

    def speaks_for(self, seq: str) -> bool:
        """Whether the engine lives and has `seq`."""
        return not self.session.dead and seq in self.session.ledger.sequences

    def need_bytes(self, seq: str) -> int:
        """What a copy of `seq` takes at a peer."""
        sequence = self.session.ledger.sequences.get(seq)
        return len(sequence.blocks) * self.differ.block_bytes if sequence is not None else 0

    def flush(self, now_ns: int) -> None:
        """From now on everything is sent at once, whatever the sync rules say."""
        self.planner.flush()
        for sequence in self._placed():
            self._note(sequence, now_ns)

    @property
    def held_bytes(self) -> int:
        """Memory of copies that the engine has yet to confirm; none where it gives notice."""
        return 0

    @property
    def waiting(self) -> bool:
        """Whether `next_deltas` has something to do now."""
        return self.planner.waiting > 0

    def urgent(self, now_ns: int) -> bool:
        """Whether a decode tail is due."""
        return self.planner.urgent(now_ns)

    def next_delta(self, number: int, drain: Callable[[], None], now_ns: int = 0) -> Ready | None:
        """The next delta alone."""
        ready = self.next_deltas(number, drain, now_ns)
        return ready[0] if ready else None

    def next_deltas(
        self, number: int, drain: Callable[[], None], now_ns: int = 0, tail_bytes: int = 0
    ) -> list[Ready]:
        """Build the next delta, numbered `number`; behind a decode tail also those that come next, up to
        `tail_bytes` (at most the differ's `batch_bytes`) and one. `drain` is called after the copies: it must
        apply the journal. Empty: there is nothing for now."""
        while True:
            if self.session.ledger.stale:
                drain()
            if self.session.ledger.stale:
                return []  # what is planned now could not be checked
            copies = self._copies(number, now_ns, tail_bytes)
            if not copies:
                return []
            drain()
            ready = []
            for sequence, built, tail in copies:
                if self.differ.still_good(sequence, built):
                    self.planner.tail_turn = tail
                    ready.append(self._hand_out(sequence, built, now_ns))
                else:
                    self._throw_away(built, now_ns)
            if ready:
                return ready

    def _copies(self, number: int, now_ns: int, tail_bytes: int) -> list[tuple[Sequence, Built, bool]]:
        """What is copied together, and is to be checked together: each with its sequence, and whether it is a
        decode tail."""
        chosen: list[tuple[Draft, bool]] = []
        at = 0
        while not chosen or (
            at < tail_bytes
            and len(chosen) < MAX_TAILS_AT_ONCE
            and self.planner.tail_turn
            and self.planner.tail_next
        ):
            plan = self.planner.next(self.session.ledger.sequences.get, now_ns)
            if plan is None:
                break
            sequence = self.session.ledger.sequences[plan.seq]
            draft = self.differ.draft(sequence, plan, number + len(chosen), at)
            if draft is None:
                continue  # its blocks are gone: the journal will say what became of it
            chosen.append((draft, self.planner.tail_turn))
            at += draft.nbytes
        built, left = self.differ.build_together([draft for draft, _ in chosen], tail_bytes)
        for draft, tail in chosen[len(chosen) - left :]:
            self.planner.put_back(draft.plan, tail=tail)
        return [(draft.sequence, made, tail) for (draft, tail), made in zip(chosen, built, strict=False)]

    def _throw_away(self, built: Built, now_ns: int) -> None:
        """`built` is torn; what there is of its sequence now is to be sent."""
        self.torn += 1
        self.differ.discard(built)
        now = self.session.ledger.sequences.get(built.delta.seq)
        if self._may_send(now):
            self._note(now, now_ns)

    def _hand_out(self, sequence: Sequence, built: Built, now_ns: int) -> Ready:
        """`built` is good, and goes out now."""
        seq, number = sequence.seq, built.delta.number
        self.differ.accept(built)
        if seq in self._unsure:
            self.differ.rewind(seq)
        self._newest = self._last_sent[seq] = number
        self._first_sent.setdefault(seq, number)
        self.planner.sent(sequence, built.upto, now_ns, len(built.payload))
        return Ready(built.delta, built.payload)

    def acked(self, ack: Ack, now_ns: int = 0) -> None:
        """The peer verified up to a watermark."""
        progress = self.planner.progress.get(ack.seq)
        if progress is None or progress.epoch != ack.epoch or not self._is_answer(ack):
            return
        if ack.number > self._unsure.get(ack.seq, ack.number):
            del self._unsure[ack.seq]
        before = progress.acked
        self._rewinds.pop(ack.seq, None)
        self.planner.acked(ack.seq, ack.epoch, ack.watermark)
        self.lag.acked(ack.seq, progress.acked, now_ns)
        sequence = self.session.ledger.sequences.get(ack.seq)
        if sequence is not None:
            size = self.session.pages.geometry.block_size
            self.differ.hold(sequence.keys[before // size : progress.acked // size])

    def _is_answer(self, message: Ack | Nack) -> bool:
        """Whether `message` answers what was sent since the sequence began here (0: it answers nothing)."""
        return message.number == 0 or message.number >= self._first_sent.get(message.seq, message.number + 1)

    def nacked(self, nack: Nack, now_ns: int = 0) -> None:
        """The peer dropped a delta: start again from what it has, or stop."""
        progress = self.planner.progress.get(nack.seq)
        sequence = self.session.ledger.sequences.get(nack.seq)
        if progress is None or progress.epoch != nack.epoch or sequence is None:
            return
        if not self._is_answer(nack):
            return
        if nack.reason in STOPPING:
            self._stop(nack, nack.reason.name.lower())
            self.differ.forget(nack.seq)
            return
        if nack.number <= self._rewound_at.get(nack.seq, 0):
            return  # sent before the last rewind: answered already
        if nack.reason == NackReason.KEY_UNKNOWN:
            self.differ.drop_keys(sequence.keys)
        self._rewound_at[nack.seq] = self._last_sent.get(nack.seq, 0)
        self._rewinds[nack.seq] = self._rewinds.get(nack.seq, 0) + 1
        if self._rewinds[nack.seq] > MAX_REWINDS:
            self._stop(nack, RETRY_LATER)
            return
        self.rewind(sequence, nack.watermark, now_ns)

    def _stop(self, nack: Nack, reason: str) -> None:
        self.planner.stop(nack.seq, nack.epoch, reason, nack.watermark)
        if reason in (NO_ROOM, RETRY_LATER):
            self._refused[nack.seq] = None
        self.lag.forget(nack.seq)

    def rewind(self, sequence: Sequence, watermark: int, now_ns: int = 0) -> None:
        """Send `sequence` again from `watermark`."""
        self._unsure[sequence.seq] = self._newest
        self._behind[sequence.seq] = None
        self.differ.rewind(sequence.seq)
        self.planner.rewind(sequence, watermark, now_ns)

    def reconnected(self, now_ns: int = 0) -> None:
        """A new link to the same life of the peer: what was not acked may be lost, what was is there."""
        for sequence in self._placed():
            progress = self.planner.progress.get(sequence.seq)
            self.rewind(sequence, progress.acked if progress else 0, now_ns)

    def retry_refused(self, free_bytes: int, now_ns: int = 0) -> None:
        """Called at each sign of life with the peer's room: try again what it refused for now. Of what it had
        no room for as much as there is room now, and at least one: what it refuses again was sent in vain."""
        retried = 0
        for seq in list(self._refused):
            sequence, progress = self.session.ledger.sequences.get(seq), self.planner.progress.get(seq)
            if progress is None or progress.stopped not in (NO_ROOM, RETRY_LATER):
                del self._refused[seq]
                continue
            if sequence is None:
                continue  # the engine may announce it anew
            if progress.stopped == NO_ROOM:
                if free_bytes < self.differ.block_bytes:
                    continue
                free_bytes -= min(self.need_bytes(seq), self.differ.delta_bytes)
            progress.stopped = ""
            del self._refused[seq]  # refused again, it comes after the others
            self.rewind(sequence, progress.acked, now_ns)
            self._note(sequence, now_ns)
            retried += 1
            if retried == MAX_RETRIES_AT_ONCE:
                return

    def end(self, seq: str, epoch: int) -> None:
        """The sequence is over as `epoch` wrote it; under a later one it has come back, and goes on."""
        progress = self.planner.progress.get(seq)
        if progress is None or progress.epoch <= epoch:
            self.forget(seq)

    def forget(self, seq: str) -> int:
        """The sequence is over, or is held elsewhere; the epoch of what the peer has of it, 0 if nothing."""
        self.differ.forget(seq)
        self.lag.forget(seq)
        self._behind.pop(seq, None)
        self._refused.pop(seq, None)
        self._first_sent.pop(seq, None)
        self._unsure.pop(seq, None)
        self._last_sent.pop(seq, None)
        self._rewound_at.pop(seq, None)
        self._rewinds.pop(seq, None)
        progress = self.planner.forget(seq)
        return progress.epoch if progress is not None and (progress.sent or progress.stopped) else 0

    def watermark(self, seq: str) -> int:
        """Tokens of `seq` that the peer verified."""
        progress = self.planner.progress.get(seq)
        return progress.acked if progress else 0

    def lag_ms(self, now_ns: int) -> float:
        """Age of the oldest token that is sent and not acked."""
        for seq in self.lag.lagging():
            sequence = self.session.ledger.sequences.get(seq)
            if sequence is None or sequence.fenced:
                self.lag.forget(seq)
        return self.lag.oldest_ms(now_ns)

    def unflushed(self) -> int:
        """Not 0 while tokens are still to be sent or to be acked: what `flush` waits for."""
        while self._behind:
            seq = next(iter(self._behind))
            if lag := self._lag(seq):
                return lag
            del self._behind[seq]
        return 0

    def lag_tokens(self) -> int:
        """Tokens computed here and not acked there, over all sequences that are sent."""
        lags = {seq: lag for seq in self._behind if (lag := self._lag(seq))}
        self._behind = dict.fromkeys(lags)
        return sum(lags.values())

    def _lag(self, seq: str) -> int:
        sequence, progress = self.session.ledger.sequences.get(seq), self.planner.progress.get(seq)
        if sequence is None or progress is None or progress.stopped or sequence.fenced:
            return 0
        return max(0, sequence.shippable - progress.acked)

    def copies(self) -> tuple[int, int]:
        """(sequences that the engine writes and the peer is to hold, those of which it holds something)."""
        sequences, progress = self.session.ledger.sequences, self.planner.progress
        ours = [p for seq, p in progress.items() if seq in sequences and not sequences[seq].fenced]
        return len(ours), sum(p.acked > 0 for p in ours)


STOPPING = (NackReason.FENCED, NackReason.NO_ROOM, NackReason.MALFORMED, NackReason.CORRUPT)
NO_ROOM = NackReason.NO_ROOM.name.lower()
RETRY_LATER = NackReason.CORRUPT.name.lower()
MAX_REWINDS = 8
"""Rewinds of one sequence without an ack in between; after that it waits for the next sign of life."""
MAX_RETRIES_AT_ONCE = 16
MAX_TAILS_AT_ONCE = 32
"""However small they are: each takes time in which nobody else is served, and has a header of its own."""

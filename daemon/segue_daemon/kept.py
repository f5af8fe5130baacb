"""What a dead engine left, kept in this daemon's own replica store for the engine that comes in its place.

Copies sequences from the mapping that outlived the engine into the store, as if they were deltas from a peer:
the same `reserve` and `commit`, the same checks, under the epoch and incarnation of the dead engine. Holds no
clock and does no I/O: `slices` does one bounded piece of work at each step, and whoever iterates decides when
time is up. Invariants: nothing is kept that a connected peer has whole, that goes on elsewhere, or that peers
must not have either; nothing but cache gives way to it; what is kept is over `ttl_ns` later, or once its
sequence is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing

from segue_core.content_key import TOKEN_BYTES
from segue_core.messages.peer import Delta, End, NackReason, Part, PartKind
from segue_daemon.engine import EngineSession
from segue_daemon.ledger import Ledger, Sequence
from segue_daemon.pages import PagesError, Piece
from segue_daemon.replicas import OWN_WRITER, Refusal, Reservation
from segue_daemon.store import ReplicaStore

MAX_EXPIRED_AT_ONCE = 64
SLICE_BYTES = 4 << 20
"""Copied in one piece (a block is never divided): about a millisecond."""


class OwnKeep:
    """Keeps what engines of this host left. `ttl_ns` 0: nothing."""

    def __init__(
        self,
        store: ReplicaStore,
        *,
        ttl_ns: int,
        changed: Callable[[str], None] = lambda _: None,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """`changed` is called with the name of each sequence of which more is held."""
        self.enabled = ttl_ns > 0
        self._store = store
        self._ttl_ns = ttl_ns
        self._changed = changed
        self._slice_bytes = slice_bytes
        self._until_ns: OrderedDict[End, int] = OrderedDict()

    def slices(
        self, session: EngineSession, protected: Callable[[Sequence], bool], now_ns: Callable[[], int]
    ) -> Iterator[None]:
        """Keep what `session` left, the longest first: most would have to be computed again. Every step is
        short; it may be given up after any of them. `protected(sequence)`: a connected peer has all of it."""
        if not self.enabled:
            return
        for sequence in worth_keeping(session.ledger):
            more = True
            while more and not session.closed and not protected(sequence):
                more = self._take(session, sequence, now_ns())
                yield

    def _take(self, session: EngineSession, sequence: Sequence, now_ns: int) -> bool:
        """Keep the next piece of `sequence`; whether to go on with it."""
        base = self._held(session, sequence)
        if base is None:
            return False
        delta = self._next_delta(session, sequence, base)
        if delta is None:
            return False
        reservation = self._store.reserve(delta, OWN_WRITER, now_ns)
        if isinstance(reservation, Refusal):
            return reservation.reason == NackReason.KEY_UNKNOWN  # found changed just now: copied next time
        try:
            copied = self._copy(session, sequence, reservation)
        except BaseException:
            self._store.cancel(reservation)
            raise
        if not copied:
            self._store.cancel(reservation)
            return False
        if isinstance(self._store.commit(reservation, {}, now_ns), Refusal):
            return False
        ended_by = End(sequence.seq, sequence.epoch, session.incarnation)
        self._until_ns[ended_by] = now_ns + self._ttl_ns
        self._until_ns.move_to_end(ended_by)
        self._changed(sequence.seq)
        return True

    def _copy(self, session: EngineSession, sequence: Sequence, reservation: Reservation) -> bool:
        """Copy what is not here yet to its places, all of it together. False: it cannot be read, or it is not
        known who wrote it last (an engine that is scanned gives no notice)."""
        places = [(p, self._store.room_for(reservation, i)) for i, p in enumerate(reservation.delta.parts)]
        lacking = [(part, room) for part, room in places if room is not None]
        pieces = [Piece(sequence.blocks[part.position], room) for part, room in lacking]
        scan, done = session.scan, 0
        try:
            with closing(session.pages.copy_pieces(pieces)) as copied:
                for complete in copied:
                    for part, room in lacking[done:complete]:
                        if scan is not None and not scan.proves(part.key, room.data):
                            return False
                    done = complete
        except PagesError:
            return False
        return True

    def _held(self, session: EngineSession, sequence: Sequence) -> int | None:
        """Tokens that are kept of this life of `sequence`; None: somebody else's replica of it is as new."""
        replica = self._store.replicas.get(sequence.seq)
        if replica is None:
            return 0
        if not replica.own:
            return None if replica.epoch >= sequence.epoch else 0
        same = (replica.epoch, replica.incarnation) == (sequence.epoch, session.incarnation)
        return replica.watermark if same else 0

    def _next_delta(self, session: EngineSession, sequence: Sequence, base: int) -> Delta | None:
        """Whole blocks from `base` on, and in the end the tail. None: there is nothing more."""
        geometry, ledger = session.pages.geometry, session.ledger
        size, block_bytes = geometry.block_size, geometry.block_bytes
        first = base // size
        last = first + max(1, self._slice_bytes // block_bytes)
        upto = min(sequence.shippable, last * size)
        if session.scan is not None:
            upto -= upto % size  # only sealed blocks can be proved
        last = -(-upto // size)
        if base % size or upto <= base or not ledger.intact(sequence, first, last):
            return None
        parts = []
        for position in range(first, last):
            key = ledger.key(sequence, position) if (position + 1) * size <= upto else b""
            if key and self._store.holds(key, block_bytes):
                parts.append(Part(position, PartKind.KEY, key, 0))
            else:
                parts.append(Part(position, PartKind.WHOLE, key, block_bytes))
        return Delta(
            number=0,
            seq=sequence.seq,
            epoch=sequence.epoch,
            incarnation=session.incarnation,
            fingerprint=ledger.fingerprint,
            salt=sequence.salt,
            block_size=size,
            block_bytes=block_bytes,
            base=base,
            token_ids=bytes(sequence.token_ids[base * TOKEN_BYTES : upto * TOKEN_BYTES]),
            parts=tuple(parts),
            checksum=0,  # nothing travels: there is no payload that could be damaged
        )

    def over(self, incarnation: int, seq: str, epoch: int) -> None:
        """The engine here says that `seq` is over: what an earlier life left of it may go too."""
        if self.enabled:
            self._store.end(End(seq, epoch, incarnation))

    def expire(self, now_ns: int) -> None:
        """Let go of what nobody came back for, a bounded part of it in one call."""
        for _ in range(min(len(self._until_ns), MAX_EXPIRED_AT_ONCE)):
            ended_by, until_ns = next(iter(self._until_ns.items()))
            if until_ns > now_ns:
                return
            del self._until_ns[ended_by]
            self._store.end(ended_by)


def worth_keeping(ledger: Ledger) -> list[Sequence]:
    """What of a dead engine's sequences could be restored, the longest first."""
    sequences = [s for s in ledger.sequences.values() if s.shippable and s.replicated and not s.fenced]
    return sorted(sequences, key=lambda sequence: sequence.shippable, reverse=True)

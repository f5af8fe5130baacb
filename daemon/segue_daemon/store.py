"""The replica store: what peers' engines have, kept here. Decisions and bookkeeping; the bytes lie in
the arena.

A delta is taken over in three steps: `reserve` checks everything that can be checked before the bytes
are here and says where they go, the caller receives them and verifies the checksum, `commit` makes them
count. Sealed blocks are shared by content key between sequences and stay as cache when nobody uses them, so
that the next turn of a conversation finds them. `eviction.py` says what goes when room is short.

Invariants:
* `watermark` tokens of a replica are verified and complete: a delta counts as a whole or not at all, a
  replica is dropped whole or cut to a lower watermark, and its writer is told;
* an epoch lower than the fence of its sequence, or than what the engine here writes, changes nothing;
* a pinned block (lease) does not change its bytes before the lease is over;
* token ids decide: keys are computed here from the ids, never taken on trust;
* a sealed block that was found changed is not given out any more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from segue_core.content_key import TOKEN_BYTES, chain, root_key
from segue_core.messages.peer import Delta, End, NackReason
from segue_core.messages.request import MAX_SEQ_CHARS
from segue_daemon.arena import Bytes
from segue_daemon.blocks import Block, BlockPool, BlockWatch
from segue_daemon.deltas import malformed, patch_fits
from segue_daemon.ended import EndedSequences, Remains
from segue_daemon.eviction import Budget, Evictor
from segue_daemon.fences import Fences
from segue_daemon.intake import Intake, still_there
from segue_daemon.integrity import Integrity, Verify
from segue_daemon.leases import MAX_LEASES, Leases
from segue_daemon.replicas import (
    Loss,
    MatchResult,
    Refusal,
    Replica,
    Reservation,
    Wanted,
    common_prefix,
    holds_kv_of,
    keys_fit,
    new_replica,
    same_writer,
)


class ReplicaStore:
    """All replicas on this host, within the arena."""

    def __init__(
        self,
        memory: Bytes,
        *,
        lease_ns: int,
        high_watermark: float = 1.0,
        low_watermark: float = 1.0,
        session_ttl_ns: int = 0,
        verify: Verify = "load",
        on_loss: Callable[[Loss], None] | None = None,
    ) -> None:
        """`memory` is the arena, (capacity,) uint8. `on_loss` hears of each replica that was dropped or cut
        without its writer's doing. Watermarks are fractions; for the rest see `StoreSettings`."""
        self._pool = BlockPool(memory, checksums=verify != "off")
        self._leases = Leases(self._pool, lease_ns=lease_ns)
        self.integrity = Integrity(self._pool, verify, self._cut_before)
        self.fences = Fences()
        self.written_here: Callable[[str], int] = lambda _: 0
        """The epoch under which the engine here writes a sequence; 0: it does not."""
        self.place: Callable[[Block, int], int] = lambda block, _: block.offset
        """The extent from which a block is loaded until a point in time (`segue_core.extents`)."""
        self.replicas: dict[str, Replica] = {}
        self._ended = EndedSequences()
        self.on_loss = on_loss
        capacity = len(memory)
        self.budget = Budget(capacity, high_watermark=high_watermark, low_watermark=low_watermark)
        self.evictor = Evictor(
            self._pool,
            self.budget,
            session_ttl_ns=session_ttl_ns,
            loading=self._leases.covers,
            drop=self._evicted,
        )
        sound = self.integrity.sound_for_one_more
        self._intake = Intake(self._pool, self.evictor, sound=sound, supersede=self._supersede)
        self.refused = 0
        self.loaded_bytes = 0
        self.hits = 0
        """Full blocks that `match` was asked for and found; `misses`: those that it did not."""
        self.misses = 0

    # -- taking deltas ------------------------------------------------------------------------

    def reserve(self, delta: Delta, writer: str, now_ns: int = 0) -> Reservation | Refusal:
        """Check `delta` and find room for it. A reservation must be committed or cancelled."""
        replica = self.replicas.get(delta.seq)
        held = replica.watermark if replica else 0
        detail = malformed(delta)
        if detail:
            return self._refuse(NackReason.MALFORMED, held, detail)
        newest = self.newest(delta.seq)
        if delta.epoch < newest:
            return self._refuse(NackReason.FENCED, held, f"epoch {delta.epoch} is below {newest}", newest)
        fresh = replica is None or not same_writer(replica, delta)
        if replica is None or fresh:
            if delta.base:
                return self._refuse(NackReason.GAP, 0)
            replica = new_replica(delta, writer)
        elif delta.base != replica.watermark:
            replica.written_ns = now_ns
            self._touch(replica, now_ns)
            return self._refuse(NackReason.GAP, held)
        if not keys_fit(replica, delta):
            return self._refuse(NackReason.MALFORMED, held, "content keys do not fit the token ids")
        reservation = Reservation(delta, replica, [], fresh)
        problem = self._intake.take(reservation, now_ns)
        if problem is not None:
            self.cancel(reservation)
            return self._refuse(problem, replica.watermark)
        return reservation

    def room_for(self, reservation: Reservation, index: int) -> Bytes | None:
        """Where the payload of part `index` may be received straight into; None: use a buffer."""
        return self._intake.room_for(reservation, index)

    def commit(self, reservation: Reservation, buffered: dict[int, Bytes], now_ns: int = 0) -> int | Refusal:
        """Make a verified delta count; returns the new watermark.

        `buffered[i]` holds the payload of part i where `room_for` gave no place. The world may have
        changed while the payload was on its way: everything that matters is checked again.
        """
        delta, replica = reservation.delta, reservation.replica
        current = self.replicas.get(delta.seq)
        held = replica.watermark if current is replica else 0  # of another writer's this one knows nothing
        problem: NackReason | None = None
        newest = self.newest(delta.seq)
        if newest > delta.epoch:
            problem = NackReason.FENCED
        elif replica.watermark != delta.base or not (reservation.fresh or current is replica):
            problem = NackReason.GAP
        elif not all(map(still_there, reservation.targets)):
            problem = NackReason.KEY_UNKNOWN
        elif not all(patch_fits(delta.parts[i], b, delta.block_bytes) for i, b in buffered.items()):
            problem = NackReason.MALFORMED
        patched = self._intake.patch_targets(reservation, now_ns) if problem is None else None
        if problem is not None or patched is None:
            self.cancel(reservation)
            return self._refuse(problem or NackReason.NO_ROOM, held, fence=newest)
        if reservation.fresh:
            if current is not None:
                self._drop(current)
            self.replicas[delta.seq] = replica
            self._ended.forget(delta.seq)
        self._intake.place(reservation, patched, buffered, now_ns)
        replica.token_ids += delta.token_ids
        replica.written_ns = now_ns
        self._touch(replica, now_ns)
        return replica.watermark

    def cancel(self, reservation: Reservation) -> None:
        """Give the room of an uncommitted delta back; safe to call twice."""
        self._intake.cancel(reservation)

    def end(self, end: End) -> None:
        """The writer says that the sequence is over, also as it wrote it under earlier epochs: an engine that
        took a sequence back may end it before anything was shipped. Ignored from any other writer, but for
        what is kept for the engine here: it is over once whoever went on with it says so. Older writers are
        refused from now on, whoever says it."""
        if 1 < end.epoch < 1 << 63 and len(end.seq) <= MAX_SEQ_CHARS:
            self.fences.lift(end.seq, end.epoch)
        replica = self.replicas.get(end.seq)
        if replica is None:
            return
        same = replica.incarnation == end.incarnation and replica.epoch <= end.epoch
        if same or (replica.own and replica.epoch < end.epoch):
            self._retire(replica)

    def holds(self, key: bytes, nbytes: int) -> bool:
        """Whether a sealed block of this content and size is here."""
        return self._pool.find(key, nbytes) is not None

    def remains(self, seq: str) -> Remains | None:
        """What is still here of a sequence that is over. Its bytes are compared with their checksums when an
        engine asks for them, not now."""
        if seq in self.replicas:
            return None
        return self._ended.remains(seq, lambda key, nbytes: self._pool.find(key, nbytes) is not None)

    # -- giving them out ----------------------------------------------------------------------

    def match(
        self,
        wanted: Wanted,
        *,
        seq: str,
        computed: int,
        limit: int,
        now_ns: int,
    ) -> MatchResult:
        """How much KV of `wanted` is held beyond `computed` tokens; what is found is pinned.

        Sealed blocks are found by content key, whoever wrote them; the partial tail only in the
        replica named `seq`, as far as its ids agree token for token.
        """
        ids, size = wanted.token_ids, wanted.block_size
        limit = min(limit, len(ids) // TOKEN_BYTES)
        blocks: list[Block] = []
        for key in chain(root_key(wanted.fingerprint, wanted.salt), ids[: limit * TOKEN_BYTES], size):
            block = self._pool.find(key, wanted.block_bytes)
            if block is None or not self.integrity.sound(block, now_ns):
                break
            blocks.append(block)
        self.hits += len(blocks)
        self.misses += limit // size - len(blocks)
        tokens = len(blocks) * size
        replica = self.replicas.get(seq)
        if replica and holds_kv_of(replica, wanted):
            agreed = min(common_prefix(replica.token_ids, ids), limit)
            more = replica.blocks[len(blocks) : -(-agreed // size)]
            if agreed > tokens and all(not b.key or self.integrity.sound(b, now_ns) for b in more):
                tokens = agreed
                blocks += more
                self._touch(replica, now_ns)
        if tokens <= computed or len(self._leases) >= MAX_LEASES:
            for block in reversed(blocks):
                self._pool.touch(block)
            return MatchResult()
        first = computed // size
        lease = self._leases.take(seq, blocks[first:], now_ns, before=blocks[:first])
        extents = tuple(self.place(block, lease.deadline_ns) for block in lease.blocks)
        return MatchResult(tokens, first, extents, lease.number, lease.deadline_ns)

    def release(self, number: int, *, loaded: bool = False) -> None:
        """The lease is over. If its blocks were `loaded` and the sequence was promoted, the engine here
        is its writer now: the replica has done its work."""
        lease = self._leases.end(number)
        if lease is None:
            return
        if loaded:
            self.loaded_bytes += sum(block.nbytes for block in lease.blocks)
        replica = self.replicas.get(lease.seq)
        if loaded and replica is not None and self.fences.of(lease.seq) > replica.epoch:
            self._retire(replica)

    def expire(self, now_ns: int) -> None:
        """End leases that are past their deadline."""
        for number in self._leases.expired(now_ns):
            self.release(number)

    def promote(self, seq: str, epoch: int, now_ns: int = 0) -> int | None:
        """From now on only writers with `epoch` or higher. Returns the watermark held, None if a fence
        as high stands already (somebody else was promoted, or writes)."""
        replica = self.replicas.get(seq)
        if self.newest(seq) >= epoch:
            return None
        self.fences.lift(seq, epoch)
        if replica is None:
            return 0
        self._touch(replica, max(now_ns, replica.touched_ns))
        return replica.watermark

    def fence(self, seq: str) -> int:
        """The epoch below which nobody writes `seq` here (0: none)."""
        return self.fences.of(seq)

    def newest(self, seq: str) -> int:
        """The newest epoch that is known of `seq`: promoted, held, or written by the engine here."""
        replica = self.replicas.get(seq)
        return max(self.fences.of(seq), replica.epoch if replica else 0, self.written_here(seq))

    def drop_writer(self, writer: str, before_ns: int) -> int:
        """Drop the replicas that `writer` has not written since `before_ns`; how many."""
        gone = [r for r in self.replicas.values() if r.writer == writer and r.written_ns < before_ns]
        for replica in gone:
            self._evicted(replica)
        return len(gone)

    # -- copies elsewhere ---------------------------------------------------------------------

    def watch(self, watch: BlockWatch | None) -> None:
        """`watch` hears of sealed blocks from now on; None: nobody does."""
        self._pool.watch = watch

    def bytes_of(self, block: Block) -> Bytes:
        """What is in it, (nbytes,) uint8: to be read at once."""
        return self._pool.memory(block)

    # -- figures ------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena taken, cache included."""
        return self._pool.used_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of sealed blocks that no replica uses."""
        return self._pool.cached_bytes

    @property
    def sealed_blocks(self) -> int:
        """Blocks that have a content key."""
        return self._pool.sealed

    @property
    def leases(self) -> int:
        """Leases that are out."""
        return len(self._leases)

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of everything in the arena that is free, in order."""
        return self._pool.free_extents()

    # -- giving up ----------------------------------------------------------------------------

    def _touch(self, replica: Replica, now_ns: int) -> None:
        replica.touched_ns = now_ns
        self.evictor.touched(replica)

    def _drop(self, replica: Replica) -> None:
        """Its sealed blocks become cache, the end of the prefix first to go: without its start the rest of
        a prefix cannot be found. Its epoch is remembered: an older writer that wakes up late does not begin
        it anew."""
        del self.replicas[replica.seq]
        if replica.epoch > 1:  # nobody is below 1: only sequences that have moved take room
            self.fences.lift(replica.seq, replica.epoch)
        self.evictor.gone(replica)
        for block in reversed(replica.blocks):
            self._pool.let_go(block)

    def _retire(self, replica: Replica) -> None:
        """It has done its work; what is full of it may serve the next turn of its conversation."""
        keys = [block.key for block in takewhile(lambda block: block.key, replica.blocks)]
        self._drop(replica)
        self._ended.note(
            replica.seq,
            keys,
            epoch=replica.epoch,
            block_size=replica.block_size,
            block_bytes=replica.block_bytes,
        )

    def _supersede(self, newcomer: Replica) -> bool:
        """A writer begins anew and there is no room: what was here of its sequence goes at once."""
        older = self.replicas.get(newcomer.seq)
        if older is None or older.busy or self._leases.covers(older.seq):
            return False
        self._drop(older)
        return True

    def _evicted(self, replica: Replica) -> None:
        self._drop(replica)
        self._tell(replica, 0, NackReason.NO_ROOM)

    def _cut_before(self, block: Block) -> None:
        """`block` has changed: of every replica what lies before it is kept. Looks through all of them:
        memory does not fail often."""
        for replica in [r for r in self.replicas.values() if block in r.blocks]:
            self._cut(replica, replica.blocks.index(block))

    def _cut(self, replica: Replica, position: int) -> None:
        """Keep what lies before block `position`."""
        tokens = position * replica.block_size
        if tokens == 0:
            self._drop(replica)
        else:
            for block in reversed(replica.blocks[position:]):
                self._pool.let_go(block)
            del replica.blocks[position:], replica.keys[position:]
            del replica.token_ids[tokens * TOKEN_BYTES :]
        self._tell(replica, tokens, NackReason.CORRUPT)

    def _tell(self, replica: Replica, watermark: int, reason: NackReason) -> None:
        if self.on_loss is not None and not replica.own:
            self.on_loss(Loss(replica.writer, replica.seq, replica.epoch, watermark, reason))

    def _refuse(self, reason: NackReason, watermark: int, detail: str = "", fence: int = 0) -> Refusal:
        self.refused += 1
        return Refusal(reason, watermark, detail, fence if reason == NackReason.FENCED else 0)

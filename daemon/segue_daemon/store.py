"""The replica store: what peers' engines have, kept here. Decisions and bookkeeping; the bytes lie in
the arena.

A delta is taken over in three steps: `reserve` checks everything that can be checked before the bytes
are here and says where they go, the caller receives them and verifies the checksum, `commit` makes them
count. Sealed blocks are shared by content key between sequences and stay as cache when nobody uses
them; the least recently used go first when room is needed.

Invariants:
* `watermark` tokens of a replica are verified and complete: a delta counts as a whole or not at all;
* an epoch lower than the fence of its sequence changes nothing;
* a pinned block (lease) does not change its bytes before the lease is over;
* token ids decide: keys are computed here from the ids, never taken on trust.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from segue_core.content_key import TOKEN_BYTES, block_key, chain, root_key
from segue_core.messages.peer import Delta, End, NackReason, Part, PartKind
from segue_daemon.arena import Bytes
from segue_daemon.blocks import Block, BlockPool
from segue_daemon.deltas import apply_patch, malformed, patch_fits
from segue_daemon.replicas import (
    Lease,
    MatchResult,
    Refusal,
    Replica,
    Reservation,
    Wanted,
    holds_kv_of,
    new_replica,
    same_writer,
)

MAX_FENCES = 100_000


class ReplicaStore:
    """All replicas on this host, within the arena."""

    def __init__(self, memory: Bytes, *, lease_ns: int) -> None:
        """`memory` is the arena, (capacity,) uint8."""
        self._pool = BlockPool(memory)
        self._lease_ns = lease_ns
        self._fences: OrderedDict[str, int] = OrderedDict()
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        self._next_lease = 1
        self.replicas: dict[str, Replica] = {}
        self.refused = 0
        self.loaded_bytes = 0

    # -- taking deltas ------------------------------------------------------------------------

    def reserve(self, delta: Delta, writer: str, now_ns: int = 0) -> Reservation | Refusal:
        """Check `delta` and find room for it. A reservation must be committed or cancelled."""
        replica = self.replicas.get(delta.seq)
        held = replica.watermark if replica else 0
        detail = malformed(delta)
        if detail:
            return self._refuse(NackReason.MALFORMED, held, detail)
        newest = max(self._fences.get(delta.seq, 0), replica.epoch if replica else 0)
        if delta.epoch < newest:
            return self._refuse(NackReason.FENCED, held, f"epoch {delta.epoch} is below {newest}")
        fresh = replica is None or not same_writer(replica, delta)
        if replica is None or fresh:
            if delta.base:
                return self._refuse(NackReason.GAP, 0)
            replica = new_replica(delta, writer)
        elif delta.base != replica.watermark:
            replica.touched_ns = now_ns
            return self._refuse(NackReason.GAP, held)
        if not self._keys_fit(replica, delta):
            return self._refuse(NackReason.MALFORMED, held, "content keys do not fit the token ids")
        return self._find_room(delta, replica, fresh)

    def _find_room(self, delta: Delta, replica: Replica, fresh: bool) -> Reservation | Refusal:
        reservation = Reservation(delta, replica, [], fresh)
        for part in delta.parts:
            block: Block | None = None
            problem: NackReason | None = None
            if part.kind == PartKind.KEY:
                block = self._pool.find(part.key, delta.block_bytes)
                if block is None:
                    problem = NackReason.KEY_UNKNOWN
                else:
                    self._pool.hold(block)
            elif part.kind == PartKind.WHOLE:
                block = self._pool.allocate(delta.block_bytes)
                problem = None if block else NackReason.NO_ROOM
            elif part.position >= len(replica.blocks):
                problem = NackReason.GAP
            if problem is not None:
                self.cancel(reservation)
                return self._refuse(problem, replica.watermark)
            reservation.targets.append((part, block))
        return reservation

    def room_for(self, reservation: Reservation, index: int) -> Bytes | None:
        """Where the payload of part `index` may be received straight into; None: use a buffer."""
        part, block = reservation.targets[index]
        if part.kind != PartKind.WHOLE or block is None:
            return None
        return self._pool.memory(block)

    def commit(self, reservation: Reservation, buffered: dict[int, Bytes], now_ns: int = 0) -> int | Refusal:
        """Make a verified delta count; returns the new watermark.

        `buffered[i]` holds the payload of part i where `room_for` gave no place. The world may have
        changed while the payload was on its way: everything that matters is checked again.
        """
        delta, replica = reservation.delta, reservation.replica
        current = self.replicas.get(delta.seq)
        held = current.watermark if current else 0
        problem: NackReason | None = None
        if max(self._fences.get(delta.seq, 0), current.epoch if current else 0) > delta.epoch:
            problem = NackReason.FENCED
        elif replica.watermark != delta.base or not (reservation.fresh or current is replica):
            problem = NackReason.GAP
        elif not all(patch_fits(delta.parts[i], b, delta.block_bytes) for i, b in buffered.items()):
            problem = NackReason.MALFORMED
        patched = self._patch_targets(reservation) if problem is None else None
        if problem is None and patched is None:
            problem = NackReason.NO_ROOM
        if problem is not None or patched is None:
            self.cancel(reservation)
            return self._refuse(problem or NackReason.NO_ROOM, held)
        if reservation.fresh:
            if current is not None:
                self._drop(current)
            self.replicas[delta.seq] = replica
        for index, (part, block) in enumerate(reservation.targets):
            if block is None:
                block = patched[index]
                apply_patch(self._pool.memory(block), part, buffered[index])
            self._place(replica, part, block)
        reservation.targets = []
        replica.token_ids += delta.token_ids
        replica.touched_ns = now_ns
        return replica.watermark

    def _patch_targets(self, reservation: Reservation) -> dict[int, Block] | None:
        """The block that each patch changes, held once more for its placing. One that is pinned or
        shared is copied first: who loads or shares it must not see it change. None: no room."""
        patched: dict[int, Block] = {}
        for index, (part, block) in enumerate(reservation.targets):
            if block is not None:
                continue
            old = reservation.replica.blocks[part.position]
            if not (old.pins or old.key or old.users > 1):
                self._pool.hold(old)
                patched[index] = old
                continue
            copy = self._pool.allocate(old.nbytes)
            if copy is None:
                for held in patched.values():
                    self._pool.let_go(held)
                return None
            self._pool.memory(copy)[:] = self._pool.memory(old)
            patched[index] = copy
        return patched

    def _place(self, replica: Replica, part: Part, block: Block) -> None:
        """Hand one hold on `block` to the replica; a sealed block that exists already is shared."""
        if part.key:
            block = self._pool.seal(block, part.key)
        if part.position < len(replica.blocks):
            before, replica.blocks[part.position] = replica.blocks[part.position], block
            self._pool.let_go(before)
        else:
            replica.blocks.append(block)

    def cancel(self, reservation: Reservation) -> None:
        """Give the room of an uncommitted delta back; safe to call twice."""
        for _, block in reservation.targets:
            if block is not None:
                self._pool.let_go(block)
        reservation.targets = []

    def end(self, end: End) -> None:
        """The writer says that the sequence is over. Ignored from a writer that is not the last one."""
        replica = self.replicas.get(end.seq)
        if replica and (replica.epoch, replica.incarnation) == (end.epoch, end.incarnation):
            self._drop(replica)

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
            if block is None:
                break
            blocks.append(block)
        tokens = len(blocks) * size
        replica = self.replicas.get(seq)
        if replica and holds_kv_of(replica, wanted):
            agreed = min(_common_prefix(replica.token_ids, ids), limit)
            if agreed > tokens:
                tokens = agreed
                blocks += replica.blocks[len(blocks) : -(-agreed // size)]
        if tokens <= computed:
            return MatchResult()
        first = computed // size
        lease = self._lease(seq, blocks[first:], now_ns)
        offsets = tuple(block.offset for block in lease.blocks)
        return MatchResult(tokens, first, offsets, lease.number, lease.deadline_ns)

    def _lease(self, seq: str, blocks: list[Block], now_ns: int) -> Lease:
        for block in blocks:
            self._pool.pin(block)
        lease = Lease(self._next_lease, seq, blocks, now_ns + self._lease_ns)
        self._next_lease += 1
        self._leases[lease.number] = lease
        return lease

    def release(self, number: int, *, loaded: bool = False) -> None:
        """The lease is over. If its blocks were `loaded` and the sequence was promoted, the engine here
        is its writer now: the replica has done its work."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        for block in lease.blocks:
            self._pool.unpin(block)
        if loaded:
            self.loaded_bytes += sum(block.nbytes for block in lease.blocks)
        replica = self.replicas.get(lease.seq)
        if loaded and replica is not None and self._fences.get(lease.seq, 0) > replica.epoch:
            self._drop(replica)

    def expire(self, now_ns: int) -> None:
        """End leases that are past their deadline."""
        for lease in list(self._leases.values()):
            if lease.deadline_ns < now_ns:
                self.release(lease.number)

    def promote(self, seq: str, epoch: int) -> int | None:
        """From now on only writers with `epoch` or higher. Returns the watermark held, None if a fence
        as high stands already (somebody else was promoted, or writes)."""
        replica = self.replicas.get(seq)
        if max(self._fences.get(seq, 0), replica.epoch if replica else 0) >= epoch:
            return None
        self._fences[seq] = epoch
        self._fences.move_to_end(seq)
        while len(self._fences) > MAX_FENCES:
            self._fences.popitem(last=False)
        return replica.watermark if replica else 0

    def fence(self, seq: str) -> int:
        """The epoch below which nobody writes `seq` here (0: none)."""
        return self._fences.get(seq, 0)

    def drop_writer(self, writer: str, before_ns: int) -> int:
        """Drop the replicas of `writer` that were not touched since `before_ns`; how many."""
        gone = [r for r in self.replicas.values() if r.writer == writer and r.touched_ns < before_ns]
        for replica in gone:
            self._drop(replica)
        return len(gone)

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
    def leases(self) -> int:
        """Leases that are out."""
        return len(self._leases)

    def _drop(self, replica: Replica) -> None:
        del self.replicas[replica.seq]
        for block in replica.blocks:
            self._pool.let_go(block)

    def _refuse(self, reason: NackReason, watermark: int, detail: str = "") -> Refusal:
        self.refused += 1
        return Refusal(reason, watermark, detail)

    def _keys_fit(self, replica: Replica, delta: Delta) -> bool:
        """Whether the keys of sealed parts follow from the ids; notes them in the replica's chain."""
        size = delta.block_size * TOKEN_BYTES
        ids = bytes(replica.token_ids[delta.base // delta.block_size * size :]) + delta.token_ids
        position = delta.base // delta.block_size
        del replica.keys[position:]
        parent = replica.keys[-1] if replica.keys else root_key(replica.fingerprint, replica.salt)
        for number, part in enumerate(delta.parts):
            if not part.key:
                continue
            parent = block_key(parent, ids[number * size : (number + 1) * size])
            if parent != part.key:
                return False
            replica.keys.append(parent)
        return True


def _common_prefix(ours: bytearray, theirs: bytes) -> int:
    """Tokens on which two packed id lists agree from the start."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length // TOKEN_BYTES
    left = np.frombuffer(bytes(ours[:length]), "<u4")
    right = np.frombuffer(theirs[:length], "<u4")
    return int(np.argmax(left != right))

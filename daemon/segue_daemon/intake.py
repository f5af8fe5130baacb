"""Where the parts of a delta go: blocks held by key, room for whole ones, copies of what must not change.

The store decides whether a delta may count; this is how its blocks come and go. Invariants: every block that
is taken for a delta is given back by `cancel` or handed to its replica by `place`, exactly once; a block that
somebody loads or shares is never patched in place.
"""

from __future__ import annotations

from collections.abc import Callable

from segue_core.messages.peer import Delta, NackReason, Part, PartKind
from segue_daemon.arena import Bytes, rounded
from segue_daemon.blocks import Block, BlockPool
from segue_daemon.deltas import apply_patch
from segue_daemon.eviction import Evictor
from segue_daemon.replicas import Replica, Reservation


class Intake:
    """Finds and gives back room for deltas."""

    def __init__(
        self,
        pool: BlockPool,
        evictor: Evictor,
        *,
        sound: Callable[[Block, int], bool],
        supersede: Callable[[Replica], bool],
    ) -> None:
        """`sound(block, now_ns)`: whether a held block may count for one more replica. `supersede` drops what
        an older writer left of the same sequence; False if there is nothing to drop."""
        self._pool = pool
        self._evictor = evictor
        self._sound = sound
        self._supersede = supersede

    def take(self, reservation: Reservation, now_ns: int) -> NackReason | None:
        """Find a place for every part; None if all have one. What was found so far is in the reservation."""
        reservation.replica.busy += 1
        problem = self._find_targets(reservation, now_ns) or self._find_room(reservation, now_ns)
        if problem is None:
            self._evictor.relieve(now_ns, reservation.replica)
        return problem

    def _find_targets(self, reservation: Reservation, now_ns: int) -> NackReason | None:
        """Hold the blocks that are named by key; the others still lack a place."""
        for part in reservation.delta.parts:
            block: Block | None = None
            if part.kind == PartKind.KEY:
                block = self._pool.find(part.key, reservation.delta.block_bytes)
                if block is None or not self._sound(block, now_ns):
                    return NackReason.KEY_UNKNOWN
                self._pool.hold(block)
            elif _begins(reservation, part) and _begun(reservation.delta, part):
                return NackReason.GAP
            reservation.targets.append((part, block))
        return None

    def _find_room(self, reservation: Reservation, now_ns: int) -> NackReason | None:
        parts = reservation.delta.parts
        new = sum(part.kind == PartKind.WHOLE or _begins(reservation, part) for part in parts)
        need = new * rounded(reservation.delta.block_bytes)
        to_admit = reservation.fresh or reservation.replica.own
        if to_admit and not self._admit(reservation.replica, need, now_ns):
            return NackReason.NO_ROOM
        if need and not self._evictor.make_room(need, now_ns, _beneficiary(reservation)):
            return NackReason.NO_ROOM
        for index, (part, _) in enumerate(reservation.targets):
            if part.kind == PartKind.WHOLE:
                block = self._allocate(part.nbytes, now_ns, reservation)
                if block is None:
                    return NackReason.NO_ROOM
                reservation.targets[index] = (part, block)
        return None

    def _admit(self, replica: Replica, need: int, now_ns: int) -> bool:
        def admitted() -> bool:
            if replica.own:
                return self._evictor.admit_own(need)
            return self._evictor.admit(need, now_ns)

        return admitted() or (self._supersede(replica) and admitted())

    def _allocate(self, nbytes: int, now_ns: int, reservation: Reservation) -> Block | None:
        beneficiary = _beneficiary(reservation)
        if not self._evictor.make_room(rounded(nbytes), now_ns, beneficiary):
            return None
        while (block := self._pool.allocate(nbytes)) is None:
            if not self._evictor.evict_for_extent(now_ns, beneficiary):
                return None
        reservation.replica.placed_bytes += rounded(nbytes)
        return block

    def room_for(self, reservation: Reservation, index: int) -> Bytes | None:
        """Where the payload of part `index` may be received straight into; None: use a buffer."""
        part, block = reservation.targets[index]
        if part.kind != PartKind.WHOLE or block is None:
            return None
        return self._pool.memory(block)

    def patch_targets(self, reservation: Reservation, now_ns: int) -> dict[int, Block] | None:
        """The block that each patch changes, held once more for its placing. One that is pinned or
        shared is copied first: who loads or shares it must not see it change. None: no room."""
        patched: dict[int, Block] = {}
        for index, (part, block) in enumerate(reservation.targets):
            if block is not None:
                continue
            old = None if _begins(reservation, part) else reservation.replica.blocks[part.position]
            if old is not None and not (old.pins or old.key or old.users > 1):
                self._pool.hold(old)
                patched[index] = old
                continue
            new = self._allocate(reservation.delta.block_bytes, now_ns, reservation)
            if new is None:
                for held in patched.values():
                    self._pool.let_go(held)
                return None
            self._pool.memory(new)[:] = 0 if old is None else self._pool.memory(old)
            patched[index] = new
        return patched

    def place(
        self, reservation: Reservation, patched: dict[int, Block], buffered: dict[int, Bytes], now_ns: int
    ) -> None:
        """Apply the patches and hand every block to the replica; a sealed block that exists is shared."""
        blocks = reservation.replica.blocks
        for index, (part, block) in enumerate(reservation.targets):
            if block is None:
                block = patched[index]
                apply_patch(self._pool.memory(block), part, buffered[index])
            if part.key:
                known = reservation.digests.get(index) if part.kind == PartKind.WHOLE else None
                block = self._pool.seal(block, part.key, now_ns, known)
            if part.position < len(blocks):
                before, blocks[part.position] = blocks[part.position], block
                self._pool.let_go(before)
            else:
                blocks.append(block)
        reservation.targets = []
        self.cancel(reservation)

    def cancel(self, reservation: Reservation) -> None:
        """Give back what is left of a reservation; safe to call twice."""
        for _, block in reservation.targets:
            if block is not None:
                self._pool.let_go(block)
        reservation.targets = []
        if reservation.open:
            reservation.open = False
            reservation.replica.busy -= 1


def _begins(reservation: Reservation, part: Part) -> bool:
    """Whether this is the first change to a block: to one of zeros."""
    changes = part.kind in (PartKind.ITEMS, PartKind.RUNS)
    return changes and part.position >= len(reservation.replica.blocks)


def _begun(delta: Delta, part: Part) -> bool:
    """Whether the writer believes that this block is here already."""
    return part.position * delta.block_size < delta.base


def still_there(target: tuple[Part, Block | None]) -> bool:
    """Whether a block that was held by key still has that key (it was not found changed meanwhile)."""
    part, block = target
    return part.kind != PartKind.KEY or (block is not None and block.key == part.key)


def _beneficiary(reservation: Reservation) -> Replica | None:
    """Whose growth live replicas give way to: one that begins does not push others out. (To what is kept for
    the engine here nothing gives way but cache, which the evictor sees to.)"""
    return reservation.replica if reservation.replica.own or not reservation.fresh else None

"""Which sealed blocks have a copy in a tier of GPU memory, and which one is copied next. Pure.

A tier is a cache of the store: what is in it is in the arena too, so room is made by forgetting the copy that
was wanted longest ago. Slots are of one block each. Invariants: a slot that an engine may be loading from is
not written before its lease's deadline; a copy is found only by the content key of the block it was made of,
and only while the store has that block; at most as many blocks wait as there are slots.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from segue_daemon.blocks import Block

ALIGNMENT = 512
"""Of a slot, in bytes: what GPUs copy best."""


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one block at `offset` of the tier. Engines may load from it until `until_ns`."""

    offset: int
    until_ns: int = 0


class TierIndex:
    """Of one tier of `nbytes` bytes, for blocks of `block_bytes`. Implements `BlockWatch`."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self.slots = nbytes // self.slot_bytes
        self.hits = 0
        self._unused = self.slots
        self._copies: OrderedDict[bytes, Slot] = OrderedDict()
        """The one that was wanted longest ago first."""
        self._left: deque[Slot] = deque()
        """Of copies that were given up; those for which a lease may be out lie between the others."""
        self._waiting: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def waits(self) -> bool:
        """Whether a block has no copy yet."""
        return bool(self._waiting)

    def wanted(self, block: Block) -> None:
        """A copy of it is of use: make one, or keep the one that there is."""
        if block.key in self._copies:
            self._copies.move_to_end(block.key)
        elif block.nbytes == self.block_bytes and self.slots:
            self._waiting[block.key] = block
            self._waiting.move_to_end(block.key)
            if len(self._waiting) > self.slots:
                self._waiting.popitem(last=False)

    def gone(self, key: bytes) -> None:
        """The store has no such block any more."""
        self._waiting.pop(key, None)
        slot = self._copies.pop(key, None)
        if slot is not None:
            self._left.append(slot)

    def next(self, now_ns: int) -> tuple[bytes, Block, Slot] | None:
        """What to copy now, and where; then comes `made` or `failed`. None: nothing waits, or no slot is free
        before a lease is over."""
        while self._waiting and next(iter(self._waiting)) in self._copies:
            self._waiting.popitem(last=False)
        slot = self._free_slot(now_ns) if self._waiting else None
        if slot is None:
            return None
        key, block = self._waiting.popitem(last=False)
        return key, block, slot

    def _free_slot(self, now_ns: int) -> Slot | None:
        for _ in range(len(self._left)):
            slot = self._left.popleft()
            if slot.until_ns <= now_ns:
                return slot
            self._left.append(slot)
        if self._unused:
            self._unused -= 1
            return Slot(self._unused * self.slot_bytes)
        if self._copies and next(iter(self._copies.values())).until_ns <= now_ns:
            return self._copies.popitem(last=False)[1]
        return None

    def made(self, key: bytes, block: Block, slot: Slot) -> None:
        """The copy is complete. It counts if the block is what it was when it began."""
        if block.key == key and key not in self._copies:
            self._copies[key] = slot
        else:
            self._left.append(slot)

    def failed(self, slot: Slot) -> None:
        """No copy was made."""
        self._left.append(slot)

    def find(self, block: Block, until_ns: int) -> int | None:
        """Where an engine may load a copy of `block` from until `until_ns`: an offset into the tier."""
        slot = self._copies.get(block.key) if block.key else None
        if slot is None:
            return None
        self._copies.move_to_end(block.key)
        slot.until_ns = max(slot.until_ns, until_ns)
        self.hits += 1
        return slot.offset

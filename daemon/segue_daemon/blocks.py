"""Blocks of the arena: shared by content key, pinned by leases, kept as cache while there is room.

A block is *used* by replicas (and by deltas on their way), *pinned* by engines that load it, and
*cached* when it is sealed and nobody uses it. Invariants: a used or pinned block is never given away;
one content key names one block; a block that is neither used, pinned nor sealed is free at once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from segue_daemon.arena import Bytes, ExtentAllocator


@dataclass(eq=False)
class Block:
    """One block in the arena. `key` is empty while it is a tail. `users`: replicas that contain it."""

    offset: int
    nbytes: int
    key: bytes = b""
    users: int = 0
    pins: int = 0


class BlockPool:
    """All blocks within `memory`, the arena as (capacity,) uint8."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._extents = ExtentAllocator(len(memory))
        self._by_key: dict[bytes, Block] = {}
        self._cached: OrderedDict[bytes, Block] = OrderedDict()
        self.cached_bytes = 0
        """Bytes of blocks that nobody uses: given up when room is needed."""

    def memory(self, block: Block) -> Bytes:
        """The block's memory, writable."""
        return self._memory[block.offset : block.offset + block.nbytes]

    def find(self, key: bytes, nbytes: int) -> Block | None:
        """The sealed block with this content key and size."""
        block = self._by_key.get(key)
        return block if block is not None and block.nbytes == nbytes else None

    def allocate(self, nbytes: int) -> Block | None:
        """A new block, held once; cached blocks make room, least recently used first. None: no room."""
        offset = self._extents.allocate(nbytes)
        if offset is None and self._extents.free_bytes + self.cached_bytes < nbytes:
            return None
        while offset is None:
            victim = next((b for b in self._cached.values() if not b.pins), None)
            if victim is None:
                return None
            self._uncache(victim)
            del self._by_key[victim.key]
            self._extents.free(victim.offset, victim.nbytes)
            offset = self._extents.allocate(nbytes)
        return Block(offset, nbytes, users=1)

    def seal(self, block: Block, key: bytes) -> Block:
        """Name a block by its content. If that content is held already, the caller's hold moves to
        the block that holds it; returns the block to go on with."""
        if block.key == key:
            return block
        twin = self._by_key.get(key)
        if twin is not None and twin.nbytes == block.nbytes:
            self.hold(twin)
            self.let_go(block)
            return twin
        if twin is None:
            block.key = key
            self._by_key[key] = block
        return block

    def hold(self, block: Block) -> None:
        """One more user."""
        block.users += 1
        self._uncache(block)

    def let_go(self, block: Block) -> None:
        """One user less; the last one leaves a sealed block as cache and frees any other."""
        assert block.users > 0, "let go more often than held"
        block.users -= 1
        self._settle(block)

    def pin(self, block: Block) -> None:
        """Its bytes must not change or go until `unpin`."""
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Undo one `pin`."""
        assert block.pins > 0, "unpinned more often than pinned"
        block.pins -= 1
        self._settle(block)

    def _settle(self, block: Block) -> None:
        if block.users or block.pins:
            return
        if not block.key:
            self._extents.free(block.offset, block.nbytes)
        elif block.key not in self._cached:
            self._cached[block.key] = block
            self.cached_bytes += block.nbytes

    def _uncache(self, block: Block) -> None:
        if self._cached.pop(block.key, None) is not None:
            self.cached_bytes -= block.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes taken, cache included."""
        return self._extents.used

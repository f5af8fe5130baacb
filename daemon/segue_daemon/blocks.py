"""Blocks of the arena: shared by content key, pinned by leases, kept as cache while there is room.

A block is *used* by replicas (and by deltas on their way), *pinned* by engines that load it, and
*cached* when it is sealed and neither. Who has to go when room is short is not decided here.

Invariants: a used or pinned block is never given away; one content key names one block; a block that is
neither used, pinned nor sealed is free at once; a sealed block does not change, and where checksums are
kept it can be told whether it did.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import xxhash

from segue_daemon.arena import Bytes, ExtentAllocator, rounded


class BlockWatch(Protocol):
    """Who hears of sealed blocks, to keep copies of them. Both are called often and must be short."""

    def wanted(self, block: Block) -> None:
        """It was sealed, or one more has a use for it."""
        ...

    def gone(self, key: bytes) -> None:
        """Nobody finds it by this key any more."""
        ...


@dataclass(eq=False)
class Block:
    """One block in the arena. `key` is empty while it is a tail. `users`: replicas that contain it.
    `checksum` (XXH3-64) is of the sealed bytes, None where none is kept; it agreed at `checked_ns`."""

    offset: int
    nbytes: int
    key: bytes = b""
    users: int = 0
    pins: int = 0
    checksum: int | None = None
    checked_ns: int = 0


class BlockPool:
    """All blocks within `memory`, the arena as (capacity,) uint8."""

    def __init__(self, memory: Bytes, *, checksums: bool = False) -> None:
        """`checksums`: keep one of every sealed block."""
        self._memory = memory
        self._checksums = checksums
        self._extents = ExtentAllocator(len(memory))
        self._by_key: OrderedDict[bytes, Block] = OrderedDict()
        self._cached: OrderedDict[bytes, Block] = OrderedDict()
        self.cached_bytes = 0
        """Bytes of blocks that nobody uses or loads: given up first when room is needed."""
        self.watch: BlockWatch | None = None

    def memory(self, block: Block) -> Bytes:
        """The block's memory, writable."""
        return self._memory[block.offset : block.offset + block.nbytes]

    def find(self, key: bytes, nbytes: int) -> Block | None:
        """The sealed block with this content key and size."""
        block = self._by_key.get(key)
        return block if block is not None and block.nbytes == nbytes else None

    def touch(self, block: Block) -> None:
        """It was asked for: of what is cached it goes last."""
        if self._cached.get(block.key) is block:
            self._cached.move_to_end(block.key)

    def allocate(self, nbytes: int) -> Block | None:
        """A new block, held once. None: no free extent is large enough."""
        offset = self._extents.allocate(nbytes)
        return None if offset is None else Block(offset, nbytes, users=1)

    def evict(self) -> bool:
        """Free the least recently used cached block; False if nothing is cached."""
        if not self._cached:
            return False
        self._unname(next(iter(self._cached.values())))
        return True

    def seal(self, block: Block, key: bytes, now_ns: int = 0, checksum: int | None = None) -> Block:
        """Name a block by its content. If that content is held already, the caller's hold moves to
        the block that holds it; returns the block to go on with. `checksum`: if it is known already."""
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
            if self._checksums:
                block.checksum = self._digest(block) if checksum is None else checksum
                block.checked_ns = now_ns
            if self.watch is not None:
                self.watch.wanted(block)
        return block

    def intact(self, block: Block, now_ns: int) -> bool:
        """Whether a sealed block still is what it was when it was sealed; True where that is not known."""
        if block.checksum is not None and self._digest(block) != block.checksum:
            return False
        block.checked_ns = now_ns
        return True

    def next_sealed(self) -> Block | None:
        """Each sealed block in turn, for ever; None if there is none."""
        if not self._by_key:
            return None
        key = next(iter(self._by_key))
        self._by_key.move_to_end(key)
        return self._by_key[key]

    def condemn(self, block: Block) -> None:
        """Its bytes are wrong: nobody finds it any more, and it is freed once nobody uses or loads it."""
        self._unname(block)

    def hold(self, block: Block) -> None:
        """One more user."""
        block.users += 1
        self._uncache(block)
        if block.key and self.watch is not None:
            self.watch.wanted(block)

    def let_go(self, block: Block) -> None:
        """One user less; the last one leaves a sealed block as cache and frees any other."""
        assert block.users > 0, "let go more often than held"
        block.users -= 1
        self._settle(block)

    def pin(self, block: Block) -> None:
        """Its bytes must not change or go until `unpin`."""
        block.pins += 1
        self._uncache(block)

    def unpin(self, block: Block) -> None:
        """Undo one `pin`."""
        assert block.pins > 0, "unpinned more often than pinned"
        block.pins -= 1
        self._settle(block)

    def _settle(self, block: Block) -> None:
        if block.users or block.pins:
            return
        if block.key:
            self._cached[block.key] = block
            self.cached_bytes += rounded(block.nbytes)
        else:
            self._extents.free(block.offset, block.nbytes)

    def _uncache(self, block: Block) -> None:
        if self._cached.get(block.key) is block:
            del self._cached[block.key]
            self.cached_bytes -= rounded(block.nbytes)

    def _unname(self, block: Block) -> None:
        assert self._by_key.get(block.key) is block, "not a sealed block"
        self._uncache(block)
        del self._by_key[block.key]
        if self.watch is not None:
            self.watch.gone(block.key)
        block.key, block.checksum = b"", None
        self._settle(block)

    def _digest(self, block: Block) -> int:
        return xxhash.xxh3_64_intdigest(self.memory(block).data)

    @property
    def used_bytes(self) -> int:
        """Bytes taken, cache included."""
        return self._extents.used

    @property
    def sealed(self) -> int:
        """Blocks that have a content key."""
        return len(self._by_key)

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of everything that is free, in order."""
        return self._extents.extents()

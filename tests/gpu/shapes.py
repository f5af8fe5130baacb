"""KV memory of known shapes and known content. Pure.

A block has a fragment in each region (K and V of each layer); a fragment has the block's slots side by side.
Every slot begins with a number of its own, so that no place can be taken for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from segue_core.geometry import Region

Bytes = npt.NDArray[np.uint8]
AXES = ("block", "slot", "dim")
REGIONS = 64
"""K and V of 32 layers."""
AT_ONCE = 4
"""Blocks that are copied at once: of 2 MiB, what `replication.delta_bytes` lets into one delta."""
TAILS_AT_ONCE = 32
"""Decode tails that are copied together, as a daemon does."""
SEED, LOADED_SEED = 11, 12
"""Of what an engine computed, and of what it loads."""


@dataclass(frozen=True)
class Shape:
    """`slots` a block, `slot_bytes` of each slot in each region."""

    slots: int
    slot_bytes: int
    blocks: int

    @property
    def fragment_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def block_bytes(self) -> int:
        return REGIONS * self.fragment_bytes

    @property
    def region_bytes(self) -> int:
        return self.blocks * self.fragment_bytes

    @property
    def nbytes(self) -> int:
        return REGIONS * self.region_bytes

    @property
    def tensor(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shape and strides in bytes of one region."""
        return (self.blocks, self.slots, self.slot_bytes), (self.fragment_bytes, self.slot_bytes, 1)

    def regions(self) -> tuple[Region, ...]:
        """All of them, one behind the other, as host memory would have them."""
        shape, strides = self.tensor
        return tuple(Region(0, n * self.region_bytes, shape, strides, 1, AXES) for n in range(REGIONS))

    def numbers(self, seed: int) -> npt.NDArray[np.uint32]:
        """What each slot begins with: (regions, blocks, slots)."""
        count = REGIONS * self.blocks * self.slots
        return (np.arange(count, dtype=np.uint32) + np.uint32(seed)).reshape(REGIONS, self.blocks, self.slots)

    def region(self, number: int, seed: int) -> Bytes:
        """The content of one region: (blocks, slots, slot_bytes)."""
        made = np.empty((self.blocks, self.slots, self.slot_bytes), np.uint8)
        made[:] = self._filling(seed)
        heads = np.ascontiguousarray(self.numbers(seed)[number]).view(np.uint8)
        made[:, :, :4] = heads.reshape(self.blocks, self.slots, 4)
        return made

    def block(self, number: int, seed: int) -> Bytes:
        """The content of one block over all regions: (regions, slots, slot_bytes)."""
        made = np.empty((REGIONS, self.slots, self.slot_bytes), np.uint8)
        made[:] = self._filling(seed)
        heads = np.ascontiguousarray(self.numbers(seed)[:, number]).view(np.uint8)
        made[:, :, :4] = heads.reshape(REGIONS, self.slots, 4)
        return made

    def _filling(self, seed: int) -> Bytes:
        """What follows the number; the same in every slot, and another one for another seed."""
        return np.random.default_rng(seed).integers(0, 256, self.slot_bytes, dtype=np.uint8)


def large(mib: int) -> Shape:
    """Blocks of 2 MiB, as an 8B-class model has them: 64 fragments of 32 KiB; a token is 64 x 2 KiB."""
    return Shape(16, 2048, max(4, mib // 2))


def small(mib: int) -> Shape:
    """Blocks of 128 KiB, 64 fragments of 2 KiB: what a decode tail of one token is."""
    return Shape(1, 2048, max(8, mib * 8))

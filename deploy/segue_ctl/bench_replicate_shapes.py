"""The block shapes that `seguectl bench replicate` moves. Pure: layouts and sizes, no memory.

A shape is a geometry, how many tokens a delta brings, and whether deltas are whole blocks or tails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from segue_core.geometry import Geometry, Region

SMALL_HEADS, SMALL_DIM, SMALL_LAYERS, SMALL_BLOCK = 3, 64, 30, 32
LARGE_WIDTH, LARGE_LAYERS, LARGE_BLOCK = 1024, 32, 16
ITEM_BYTES = 2
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """`tail`: each delta is one token in a block that has others; else it is whole blocks."""

    name: str
    geometry: Geometry
    tail: bool

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.geometry.block_bytes // self.geometry.block_size

    @property
    def unit_bytes(self) -> int:
        """New KV in one block or one tail."""
        return self.token_bytes if self.tail else self.geometry.block_bytes

    @property
    def pieces(self) -> tuple[int, int]:
        """(count, bytes of one) of the contiguous pieces that a unit's bytes lie in."""
        if not self.tail:
            return len(self.geometry.fragments), self.geometry.fragments[0].nbytes
        if not self.geometry.slot_axis_known:
            return 1, self.token_bytes  # what a transport that knew the layout would have gathered
        runs = self.geometry.slot_runs(0, 1)
        return len(runs), runs[0].piece.nbytes


def large(blocks: int) -> Geometry:
    """An 8B-class model: 32 layers of K and V, 8 heads of 128, bf16; 16 tokens a block: 64 x 32 KiB."""
    shape = (blocks, LARGE_BLOCK, LARGE_WIDTH)
    slot = LARGE_WIDTH * ITEM_BYTES
    strides = (LARGE_BLOCK * slot, slot, ITEM_BYTES)
    layer = blocks * strides[0]
    regions = tuple(
        Region(0, number * layer, shape, strides, ITEM_BYTES, ("block", "slot", "dim"))
        for number in range(2 * LARGE_LAYERS)
    )
    return Geometry(blocks, LARGE_BLOCK, (len(regions) * layer,), regions).validate()


def small(blocks: int) -> Geometry:
    """SmolLM2-135M as vLLM lays it out on a CPU: 30 x 24 KiB a block of 32 tokens, slots not addressable."""
    shape = (blocks, SMALL_HEADS, SMALL_BLOCK, 2 * SMALL_DIM)
    strides = []
    stride = ITEM_BYTES
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    regions = tuple(
        Region(
            0,
            n * stride,
            shape,
            tuple(reversed(strides)),
            ITEM_BYTES,
            ("block", "opaque", "opaque", "opaque"),
        )
        for n in range(SMALL_LAYERS)
    )
    return Geometry(blocks, SMALL_BLOCK, (SMALL_LAYERS * stride,), regions).validate()


@lru_cache(maxsize=256)
def slot_index(shape: Shape, slot: int) -> Numbers:
    """Which items of a block, in the order in which they travel, are one token's KV."""
    if shape.geometry.slot_axis_known:
        layer = np.arange(2 * LARGE_LAYERS)[:, None] * (LARGE_BLOCK * LARGE_WIDTH)
        return (layer + slot * LARGE_WIDTH + np.arange(LARGE_WIDTH)).reshape(-1)
    head = np.arange(SMALL_LAYERS * SMALL_HEADS)[:, None] * (2 * SMALL_DIM * SMALL_BLOCK)
    key = np.arange(SMALL_DIM) * SMALL_BLOCK + slot  # transposed: an item in each row
    value = SMALL_DIM * SMALL_BLOCK + slot * SMALL_DIM + np.arange(SMALL_DIM)
    index: Numbers = (head + np.concatenate([key, value])).reshape(-1)
    return index


def shapes(blocks_bytes: int) -> tuple[Shape, ...]:
    """All shapes, with pages of about `blocks_bytes`."""
    large_blocks = max(2, blocks_bytes // large(2).block_bytes)
    small_blocks = max(2, blocks_bytes // small(2).block_bytes)
    return (
        Shape("8b-block", large(large_blocks), tail=False),
        Shape("small-block", small(small_blocks), tail=False),
        Shape("8b-tail", large(large_blocks), tail=True),
        Shape("small-tail", small(small_blocks), tail=True),
    )


def smallest(shape: Shape) -> Geometry:
    """The same layout with hardly any memory: for an engine that only asks."""
    return large(2) if shape.geometry.slot_axis_known else small(2)

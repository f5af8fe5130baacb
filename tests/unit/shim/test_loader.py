"""Loading replicas: every byte where it belongs, none anywhere else."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.errors import ProtocolError
from segue_core.geometry import Geometry, Region
from segue_shim.layout import Pages, share_pages
from segue_shim.loader import Arena, Loader
from support.kv_pages import BLOCK_SIZE, BLOCKS, kv_tensors

ARENA_BYTES = 1 << 18


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    """Random bytes."""
    fd = os.memfd_create("arena")
    os.write(fd, random.Random(3).randbytes(ARENA_BYTES))
    yield Arena(fd, ARENA_BYTES, 1)
    os.close(fd)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Blocks-outside and layers-outside layouts, with gaps, odd item sizes and several handles."""
    blocks = draw(st.integers(1, 9))
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    regions: list[Region] = []
    sizes: list[int] = []
    for handle in range(draw(st.integers(1, 2))):
        layers, heads, width = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
        gap = draw(st.integers(0, 3)) * itemsize
        run = width * itemsize
        head_stride = run + gap
        page = heads * head_stride
        block_outside = draw(st.booleans())
        block_stride, layer_stride = (page * layers, page) if block_outside else (page, page * blocks)
        start = draw(st.integers(0, 3)) * itemsize
        for layer in range(layers):
            regions.append(
                Region(
                    handle=handle,
                    offset=start + layer * layer_stride,
                    shape=(blocks, heads, width),
                    strides=(block_stride, head_stride, itemsize),
                    itemsize=itemsize,
                    axes=("block", "opaque", "opaque"),
                )
            )
        sizes.append(start + page * layers * blocks + draw(st.integers(0, 20)))
    return Geometry(
        num_blocks=blocks, block_size=4, handle_bytes=tuple(sizes), regions=tuple(regions)
    ).validate()


@settings(max_examples=150, deadline=None)
@given(geometry=geometries(), data=st.data())
def test_bytes_land_where_the_geometry_says(arena: Arena, geometry: Geometry, data: st.DataObject) -> None:
    """Against a byte-by-byte copy: the blocks named are filled, all other bytes stay."""
    blocks = data.draw(st.lists(st.integers(0, geometry.num_blocks - 1), unique=True))
    if data.draw(st.booleans()):
        blocks.sort()
    unit = data.draw(st.sampled_from([1, 8]))
    start = data.draw(st.integers(0, 64)) * unit
    if data.draw(st.booleans()):
        step = geometry.block_bytes + data.draw(st.integers(0, 4)) * unit
        extents = [start + index * step for index in range(len(blocks))]
    else:
        limit = (ARENA_BYTES - geometry.block_bytes) // unit
        extents = [data.draw(st.integers(0, limit)) * unit for _ in blocks]
    views = tuple(torch.randint(0, 256, (n,), dtype=torch.uint8) for n in geometry.handle_bytes)
    expected = [bytearray(view.numpy().tobytes()) for view in views]
    source = arena.bytes.numpy().tobytes()
    for block, extent in zip(blocks, extents, strict=True):
        at = extent
        for piece in geometry.fragments:
            to = piece.offset + block * piece.block_stride
            expected[piece.handle][to : to + piece.nbytes] = source[at : at + piece.nbytes]
            at += piece.nbytes
    copied = Loader(Pages(geometry, (), views)).copy(arena, blocks, extents)
    assert copied == len(blocks) * geometry.block_bytes
    assert [view.numpy().tobytes() for view in views] == [bytes(one) for one in expected]


@pytest.mark.parametrize(
    ("blocks", "extents"),
    [
        ([BLOCKS], [0]),
        ([-1], [0]),
        ([0], [ARENA_BYTES]),
        ([0], [-8]),
        ([0, 1], [0]),
        ([0, 1], [0, ARENA_BYTES - 8]),
    ],
)
def test_nothing_moves_if_anything_is_out_of_bounds(
    arena: Arena, blocks: list[int], extents: list[int]
) -> None:
    """A wrong extent in an answer cannot read or write outside."""
    tensors = kv_tensors()
    pages = share_pages(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    before = pages.views[0].clone()
    with pytest.raises(ValueError, match=r"block|extent"):
        Loader(pages).copy(arena, blocks, extents)
    assert torch.equal(pages.views[0], before)


def test_neighbouring_blocks_are_copied_together(arena: Arena) -> None:
    """vLLM's layout and a fresh cache: one copy call, not one a block and layer."""
    pages = share_pages(kv_tensors(), num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    loader = Loader(pages)
    assert len(loader._byte_groups) == 1
    step = pages.geometry.block_bytes
    loader.copy(arena, list(range(BLOCKS)), [block * step for block in range(BLOCKS)])


def test_an_arena_that_is_smaller_than_announced_is_refused() -> None:
    """Reading behind its end would kill the engine with a bus error."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 8192)
    with pytest.raises(ProtocolError, match="8192"):
        Arena(fd, 8193, 1)
    arena = Arena(fd, 8192, 1)
    arena.prefault()
    os.close(fd)


def test_the_arena_cannot_be_written() -> None:
    """The mapping itself forbids it."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, mmap.PAGESIZE)
    arena = Arena(fd, mmap.PAGESIZE, 1)
    with pytest.raises(TypeError):
        arena._map[0] = 1
    os.close(fd)

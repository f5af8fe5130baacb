"""Geometry: which bytes belong to a block and to a slot, for layouts that engines really use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.errors import GeometryError
from segue_core.geometry import Geometry, Region

LAYOUTS = {
    "NHD": ("kv", "block", "slot", "head", "dim"),
    "HND": ("block", "kv", "head", "slot", "dim"),
    "opaque": ("block", "opaque", "opaque"),
    "layers packed": ("block", "layer", "kv", "slot", "head", "dim"),
}


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """One or two regions of a real layout behind each other in one allocation."""
    num_blocks, block_size = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    regions = []
    offset = 0
    for _ in range(draw(st.integers(1, 2))):
        axes = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
        lengths = {"block": num_blocks, "slot": block_size}
        shape = tuple(lengths.get(name) or draw(st.integers(1, 3)) for name in axes)
        itemsize = draw(st.sampled_from([2, 4]))
        strides = []
        step = itemsize
        for length in reversed(shape):
            strides.append(step)
            step *= length
        regions.append(Region(0, offset, shape, tuple(reversed(strides)), itemsize, axes))
        offset += step + draw(st.sampled_from([0, 64]))
    return Geometry(num_blocks, block_size, (offset,), tuple(regions)).validate()


def reference_bytes(geometry: Geometry, block: int, slots: range | None) -> set[int]:
    """Every byte of the block (or of some slots of it), by walking the index space."""
    found: set[int] = set()
    for region in geometry.regions:
        for index in np.ndindex(*region.shape):
            named = dict(zip(region.axes, index, strict=True))
            if named["block"] != block or (slots is not None and named["slot"] not in slots):
                continue
            start = region.offset + sum(i * s for i, s in zip(index, region.strides, strict=True))
            found.update(range(start, start + region.itemsize))
    return found


@given(geometries())
def test_fragments_are_exactly_the_blocks_bytes(geometry: Geometry) -> None:
    """No byte of another block, none missing, none twice."""
    for block in range(geometry.num_blocks):
        covered = [
            byte
            for f in geometry.fragments
            for byte in range(f.offset + block * f.block_stride, f.offset + block * f.block_stride + f.nbytes)
        ]
        assert len(covered) == len(set(covered)) == geometry.block_bytes
        assert set(covered) == reference_bytes(geometry, block, None)


@given(geometries(), st.data())
def test_slot_runs_are_exactly_the_slots_bytes(geometry: Geometry, data: st.DataObject) -> None:
    """A token's bytes can be told apart wherever the slot axis is known."""
    if any("slot" not in region.axes for region in geometry.regions):
        return
    first = data.draw(st.integers(0, geometry.block_size - 1))
    last = data.draw(st.integers(first + 1, geometry.block_size))
    runs = geometry.slot_runs(first, last)
    covered = [b for run in runs for b in range(run.piece.offset, run.piece.offset + run.piece.nbytes)]
    assert len(covered) == len(set(covered))
    assert set(covered) == reference_bytes(geometry, 0, range(first, last))
    packed = [b for f in geometry.fragments for b in range(f.offset, f.offset + f.nbytes)]
    for run in runs:
        assert packed[run.packed] == run.piece.offset


def small(**changes: object) -> Geometry:
    region = {"handle": 0, "offset": 0, "shape": (4, 2, 8), "strides": (32, 16, 2), "itemsize": 2}
    region |= {"axes": ("block", "slot", "dim")} | changes
    return Geometry(4, 2, (128,), (Region(**region),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"handle": 1},
        {"offset": 2},
        {"offset": -2},
        {"shape": (5, 2, 8)},
        {"shape": (4, 3, 8)},
        {"strides": (32, 16)},
        {"strides": (32, 16, 0)},
        {"axes": ("block", "block", "dim")},
        {"axes": ("slot", "head", "dim")},
        {"axes": ("block", "slot", "nonsense")},
        {"itemsize": 0},
    ],
)
def test_a_layout_that_makes_no_sense_is_refused_with_a_reason(changes: dict[str, object]) -> None:
    """Whatever arrives in a registration, no byte outside the exported memory is ever addressed."""
    small().validate()
    with pytest.raises(GeometryError):
        small(**changes).validate()


def test_the_digest_names_the_bytes_not_the_place() -> None:
    """Two engines with different numbers of blocks can exchange them; other shapes cannot."""
    larger = Geometry(8, 2, (256,), (Region(0, 0, (8, 2, 8), (32, 16, 2), 2, ("block", "slot", "dim")),))
    assert small().digest == larger.digest
    assert small(itemsize=1, strides=(32, 16, 1)).digest != small().digest


def test_layouts_that_order_the_same_bytes_differently_have_different_digests() -> None:
    """NHD and HND blocks are equally large and must never be exchanged."""
    nhd = Region(0, 0, (4, 2, 4, 8), (128, 64, 16, 2), 2, ("block", "slot", "head", "dim"))
    hnd = Region(0, 0, (4, 2, 4, 8), (128, 16, 32, 2), 2, ("block", "slot", "head", "dim"))
    wide = Region(0, 0, (4, 2, 2, 16), (128, 64, 32, 2), 2, ("block", "slot", "head", "dim"))
    digests = {Geometry(4, 2, (512,), (region,)).validate().digest for region in (nhd, hnd, wide)}
    assert len(digests) == 3


def layers(block_stride: int, layer_stride: int, head_stride: int = 32, axis: int = 2) -> Geometry:
    """Two layers of blocks [heads, 2 slots, 16 bytes] in one allocation."""
    shape, axes = (4, axis, 2, 8), ("block", "head", "slot", "dim")
    strides = (block_stride, head_stride, 16, 2)
    regions = tuple(Region(0, layer * layer_stride, shape, strides, 2, axes) for layer in range(2))
    return Geometry(4, 2, (1024,), regions).validate()


def test_where_layers_and_heads_lie_does_not_keep_engines_apart() -> None:
    """Layer by layer, packed into blocks, heads outermost, one head anywhere: a block has the same bytes."""
    assert layers(64, 256).digest == layers(128, 64).digest == layers(32, 256, head_stride=128).digest
    assert layers(32, 128, head_stride=2, axis=1).digest == layers(64, 32, head_stride=32, axis=1).digest


def test_layers_packed_into_a_block_are_copied_in_one_piece() -> None:
    """Only if they are side by side in every block."""
    assert [piece.nbytes for piece in layers(128, 64).fragments] == [128]
    assert [piece.nbytes for piece in layers(64, 256).fragments] == [64, 64]
    runs = layers(128, 64).slot_runs(1, 2)
    assert [(run.piece.offset, run.packed) for run in runs] == [(16, 16), (48, 48), (80, 80), (112, 112)]

"""Where a block's bytes are: the layout of an engine's KV pages.

A geometry is a list of regions. A region is a strided array inside one exported allocation
("handle"), with named axes. One axis is `block`. If one axis is `slot`, the bytes of a single token
are known and a tail block can be shipped as slot runs; without it the block is *opaque*: whole
blocks can be copied, single slots cannot be told apart.

Pure arithmetic over bytes: no torch, no numpy, no memory. Invariant: for a valid geometry every
fragment of every block lies inside its handle, so a fragment list may be used without more checks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

import msgspec

from segue_core.errors import GeometryError
from segue_core.memory_handle import MemoryHandle, check_handles

AXES = ("block", "slot", "head", "kv", "dim", "layer", "opaque")
MAX_BLOCKS = 1 << 26
"""More than any engine has; the daemon keeps 8 bytes for each."""
MAX_REGIONS = 4096
MAX_BLOCK_BYTES = 1 << 30
MAX_FRAGMENTS = 1 << 16


class Fragment(NamedTuple):
    """A contiguous piece of a block: `offset` in bytes from the handle's start for block 0."""

    handle: int
    offset: int
    block_stride: int
    nbytes: int

    def followed_by(self, other: Fragment) -> bool:
        """Whether `other` begins where this ends, in every block."""
        return (other.handle, other.block_stride, other.offset) == (
            self.handle,
            self.block_stride,
            self.offset + self.nbytes,
        )


class SlotRun(NamedTuple):
    """A piece of some slots: where it is in memory, and its offset in the packed block."""

    piece: Fragment
    packed: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A strided array of KV inside one handle.

    `offset` and `strides` are in bytes; `axes[i]` names `shape[i]`. `opaque` marks an axis whose
    meaning is not claimed.
    """

    handle: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    axes: tuple[str, ...]

    def axis(self, name: str) -> int | None:
        """Position of the axis called `name`, or None."""
        return self.axes.index(name) if name in self.axes else None

    def inner_axes(self) -> list[tuple[str, int, int]]:
        """(name, length, rank of its stride) of every axis within a block, in shape order.

        Axes of one are left out, and how far apart blocks are: it says nothing about a block's bytes.
        """
        axes = [
            (name, length, stride)
            for name, length, stride in zip(self.axes, self.shape, self.strides, strict=True)
            if name != "block" and length > 1
        ]
        order = sorted({stride for _, _, stride in axes}, reverse=True)
        return [(name, length, order.index(stride)) for name, length, stride in axes]

    def inner(self, skip: tuple[str, ...]) -> list[tuple[int, int]]:
        """(stride, length) of all axes not in `skip`, widest stride first, length-1 axes left out."""
        pairs = [
            (stride, length)
            for name, stride, length in zip(self.axes, self.strides, self.shape, strict=True)
            if name not in skip and length > 1
        ]
        return sorted(pairs, reverse=True)


def _runs(inner: list[tuple[int, int]], itemsize: int) -> tuple[int, list[int]]:
    """Merge the inner axes into contiguous runs: (bytes of one run, offsets of the runs)."""
    run = itemsize
    outer = list(inner)
    while outer and outer[-1][0] == run:
        run *= outer.pop()[1]
    count = _product(length for _, length in outer)
    if count > MAX_FRAGMENTS:  # before they are listed: strides may overlap, so a small handle bounds nothing
        raise GeometryError(f"a block falls into {count} pieces")
    offsets = [
        sum(index * stride for index, (stride, _) in zip(indices, outer, strict=True))
        for indices in product(*(range(length) for _, length in outer))
    ]
    return run, offsets


class Geometry(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The KV layout of one engine rank.

    `num_blocks` blocks of `block_size` slots (tokens); `handle_bytes[h]` is the size of exported
    allocation h. `block_bytes` bytes hold one block over all layers. `handles[h]` says how that allocation is
    reached; without any, all are host memory.
    """

    num_blocks: int
    block_size: int
    handle_bytes: tuple[int, ...]
    regions: tuple[Region, ...]
    handles: tuple[MemoryHandle, ...] = ()

    def validate(self) -> Geometry:
        """Return self, or raise GeometryError with the reason: call it on anything that arrived."""
        if not 0 < self.num_blocks <= MAX_BLOCKS or not 0 < self.block_size <= 1 << 16:
            raise GeometryError(f"geometry has {self.num_blocks} blocks of {self.block_size} slots")
        if not 0 < len(self.regions) <= MAX_REGIONS:
            raise GeometryError(f"geometry has {len(self.regions)} regions, expected 1 to {MAX_REGIONS}")
        check_handles(self.handles, self.handle_bytes)
        for number, region in enumerate(self.regions):
            self._validate_region(number, region)
        if self.block_bytes > MAX_BLOCK_BYTES or len(self.fragments) > MAX_FRAGMENTS:
            raise GeometryError(
                f"a block of {self.block_bytes} bytes in {len(self.fragments)} fragments is too large"
            )
        return self

    def _validate_region(self, number: int, region: Region) -> None:
        where = f"region {number}"
        rank = len(region.shape)
        if not (rank == len(region.strides) == len(region.axes)) or not 1 <= rank <= 8:
            raise GeometryError(f"{where}: shape, strides and axes differ in length")
        if any(name not in AXES for name in region.axes) or region.axes.count("block") != 1:
            raise GeometryError(f"{where}: axes {region.axes}: need one `block`, others of {AXES}")
        if region.axes.count("slot") > 1:
            raise GeometryError(f"{where}: axes {region.axes}: more than one `slot`")
        if not 0 <= region.handle < len(self.handle_bytes):
            raise GeometryError(f"{where}: handle {region.handle} was not exported")
        if min(region.shape) < 1 or min(region.strides) < 1 or not 1 <= region.itemsize <= 64:
            raise GeometryError(f"{where}: shape, strides and item size must be positive")
        block = region.shape[region.axes.index("block")]
        slot = region.axis("slot")
        if block != self.num_blocks or (slot is not None and region.shape[slot] != self.block_size):
            raise GeometryError(
                f"{where}: shape {region.shape} does not hold {self.num_blocks} blocks"
                f" of {self.block_size} slots"
            )
        last = region.offset + region.itemsize
        last += sum((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True))
        if region.offset < 0 or last > self.handle_bytes[region.handle]:
            raise GeometryError(f"{where}: reaches byte {last} outside its allocation")

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """Contiguous pieces of block 0, in region order; block b is `block_stride * b` further on. Regions
        that follow each other within the block (layers packed into it) are one piece."""
        found: list[Fragment] = []
        for region in self.regions:
            run, offsets = _runs(region.inner(("block",)), region.itemsize)
            stride = region.strides[region.axes.index("block")]
            if len(found) + len(offsets) > MAX_FRAGMENTS:
                raise GeometryError(f"a block falls into more than {MAX_FRAGMENTS} pieces")
            for offset in offsets:
                piece = Fragment(region.handle, region.offset + offset, stride, run)
                last = found[-1] if found else None
                if last is not None and last.followed_by(piece):
                    found[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
                else:
                    found.append(piece)
        return tuple(found)

    @property
    def fd_count(self) -> int:
        """Descriptors that the exported memory takes."""
        return sum(h.fd_count for h in self.handles) if self.handles else len(self.handle_bytes)

    @property
    def gpu(self) -> str:
        """UUID of the GPU that the memory is on; empty: it is host memory."""
        return self.handles[0].uuid if self.handles else ""

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(
            region.itemsize
            * _product(n for n, name in zip(region.shape, region.axes, strict=True) if name != "block")
            for region in self.regions
        )

    @cached_property
    def slot_axis_known(self) -> bool:
        """Whether every region says where one slot's bytes are, in runs worth addressing singly."""
        return all(
            region.axis("slot") is not None and self.slot_run_bytes(region) >= MIN_SLOT_RUN_BYTES
            for region in self.regions
        )

    def slot_run_bytes(self, region: Region) -> int:
        """Bytes of one slot that lie together in `region` (0 if the slot axis is unknown)."""
        if region.axis("slot") is None:
            return 0
        return _runs(region.inner(("block", "slot")), region.itemsize)[0]

    def slot_runs(self, first: int, last: int) -> tuple[SlotRun, ...]:
        """Contiguous pieces of slots [first, last) of block 0, in region order; needs `slot_axis_known`."""
        cached = self._slot_runs.get((first, last))
        if cached is None:
            runs = [run for region in self.regions for run in self._region_runs(region, first, last)]
            cached = self._slot_runs[first, last] = tuple(runs)
        return cached

    def _region_runs(self, region: Region, first: int, last: int) -> Iterator[SlotRun]:
        slot_stride = region.strides[region.axes.index("slot")]
        block_stride = region.strides[region.axes.index("block")]
        run, offsets = _runs(region.inner(("block", "slot")), region.itemsize)
        together = run == slot_stride
        for offset in offsets:
            for slot in range(first, first + 1 if together else last):
                start = region.offset + offset + slot * slot_stride
                nbytes = run * (last - first) if together else run
                piece = Fragment(region.handle, start, block_stride, nbytes)
                yield SlotRun(piece, self._packed_offset(region.handle, start))

    def _packed_offset(self, handle: int, start: int) -> int:
        """Where byte `start` of block 0 lies once the block's fragments stand one after another."""
        number = bisect_right(self._fragment_starts, (handle, start, MAX_FRAGMENTS)) - 1
        _, offset, index = self._fragment_starts[number]
        return self._packed_starts[index] + start - offset

    @cached_property
    def _slot_runs(self) -> dict[tuple[int, int], tuple[SlotRun, ...]]:
        return {}

    @cached_property
    def _fragment_starts(self) -> list[tuple[int, int, int]]:
        return sorted((f.handle, f.offset, index) for index, f in enumerate(self.fragments))

    @cached_property
    def _packed_starts(self) -> list[int]:
        return list(accumulate((f.nbytes for f in self.fragments), initial=0))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly if a block means the same bytes in the same order.

        Where blocks lie, and how many there are, is the engine's own affair and not part of it.
        """
        shape = [(region.itemsize, region.inner_axes()) for region in self.regions]
        encoded = msgspec.msgpack.encode((self.block_size, shape))
        return hashlib.blake2b(encoded, digest_size=16, person=b"segue-geometry").digest()


MIN_SLOT_RUN_BYTES = 16
"""Below this, addressing slots singly costs more than comparing the block with a shadow."""


def _product(values: Iterable[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result

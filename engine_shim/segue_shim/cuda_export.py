"""From KV tensors on a GPU to handles by which the daemon maps the memory behind them.

Looks at addresses, touches no byte. Each allocation is exported once, however many tensors lie in it. What
cannot be exported is refused with the way to start the engine so that it can. Invariant: every byte of every
tensor lies in an exported allocation, or nothing is exported and no descriptor stays open.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from segue_core.errors import GeometryError
from segue_core.geometry import Geometry, Region
from segue_core.memory_handle import MAX_PIECES, MemoryHandle, uuid_text
from segue_shim.cuda_driver import CudaCallError, CudaDriver
from segue_shim.cuda_table import POSIX_FD
from segue_shim.regions import Axes, region_of

NO_DESCRIPTOR = (
    "the KV cache is in memory of the driver's virtual memory calls that was made without descriptors."
    " vLLM with sleep mode or its cumem allocator: start it without, or use a vLLM whose allocator asks for"
    " POSIX descriptors. PyTorch: unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0"
)
TOO_MANY = (
    "the KV cache is in more than {limit} physical allocations, each of which needs a descriptor:"
    " start the engine without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
)
NO_IPC = (
    "the KV cache is in memory that the driver does not share ({reason}): start the engine with"
    " PYTORCH_CUDA_ALLOC_CONF=backend:native, without MIG, and see docs/gpu.md"
)

CHANGED = "the KV cache's memory changed while it was looked at: start the engine again, and see docs/gpu.md"


class DeviceTensor(NamedTuple):
    """One KV tensor: where it begins, and its layout in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """Address behind its last byte."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.address + last + self.itemsize


@dataclass(frozen=True)
class DeviceExport:
    """Exported memory: `fds` belong to the `cuda_vmm` handles of `geometry`, in their order, and are the
    caller's; `bases[h]` is the address here of geometry handle h's first byte."""

    geometry: Geometry
    fds: tuple[int, ...]
    bases: tuple[int, ...]
    device: int


class _Piece(NamedTuple):
    """A physical allocation where it is mapped."""

    base: int
    nbytes: int


def export_tensors(
    driver: CudaDriver,
    tensors: Sequence[DeviceTensor],
    *,
    num_blocks: int,
    block_size: int,
    axes: Axes = None,
) -> DeviceExport:
    """Describe and export `tensors`, in this order. A context must be current.

    Raises GeometryError with the reason, and what to do about it.
    """
    if not tensors:
        raise GeometryError("the engine has no KV cache tensors")
    devices = {driver.device_of(tensor.address) for tensor in tensors}
    if len(devices) > 1:
        raise GeometryError(f"the KV cache of this rank lies on GPUs {sorted(devices)}: one is supported")
    device = devices.pop()
    spans = _spans(driver, tensors)
    bases = tuple(span.base for span in spans)
    regions = _regions(tensors, spans, num_blocks, axes)
    fds: list[int] = []
    try:
        uuid = uuid_text(driver.uuid(device))
        handles = tuple(_handle(driver, span, uuid, fds) for span in spans)
        geometry = Geometry(
            num_blocks=num_blocks,
            block_size=block_size,
            handle_bytes=tuple(span.nbytes for span in spans),
            regions=regions,
            handles=handles,
        ).validate()
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return DeviceExport(geometry, tuple(fds), bases, device)


class _Span(NamedTuple):
    """Memory that becomes one handle: physical allocations side by side, or one `cuMemAlloc` allocation."""

    base: int
    nbytes: int
    pieces: tuple[_Piece, ...]
    physical: bool


def _spans(driver: CudaDriver, tensors: Sequence[DeviceTensor]) -> list[_Span]:
    """The allocations behind all tensors, by address."""
    physical: dict[int, _Piece] = {}
    whole: dict[int, _Piece] = {}
    for tensor in tensors:
        handle = driver.retain(tensor.address)
        if handle is not None:
            driver.release(handle)
            physical.update((piece.base, piece) for piece in _pieces(driver, tensor))
            if len(physical) > MAX_PIECES:
                raise GeometryError(TOO_MANY.format(limit=MAX_PIECES))
            continue
        found = _Piece(*driver.range_of(tensor.address))
        if tensor.end > found.base + found.nbytes:
            raise GeometryError(f"{tensor.name}: reaches beyond the allocation that it begins in")
        whole[found.base] = found
    spans = [_Span(piece.base, piece.nbytes, (piece,), False) for piece in whole.values()]
    return sorted([*spans, *_joined(sorted(physical.values()))])


def _joined(pieces: list[_Piece]) -> list[_Span]:
    """Physical allocations whose addresses follow each other, put together."""
    spans: list[_Span] = []
    for piece in pieces:
        last = spans[-1] if spans else None
        if last is not None and last.base + last.nbytes == piece.base:
            spans[-1] = _Span(last.base, last.nbytes + piece.nbytes, (*last.pieces, piece), True)
        else:
            spans.append(_Span(piece.base, piece.nbytes, (piece,), True))
    return spans


def _pieces(driver: CudaDriver, tensor: DeviceTensor) -> list[_Piece]:
    """The physical allocations under one tensor.

    Found by asking for the allocation at every step of the granularity: it is the same as long as one lasts.
    """
    handle = driver.retain(tensor.address)
    if handle is None:
        raise GeometryError(CHANGED)
    try:
        step = driver.granularity(driver.properties(handle))
    finally:
        driver.release(handle)
    start = tensor.address // step * step
    while _at(driver, start - step) == handle:
        start -= step
    pieces: list[_Piece] = []
    at, current = start, handle
    while True:
        at += step
        following = _at(driver, at)
        if following == current:
            continue
        pieces.append(_Piece(start, at - start))
        if at >= tensor.end:
            return pieces
        if following is None:
            raise GeometryError(f"{tensor.name}: its memory has a hole at byte {at - tensor.address}")
        if len(pieces) > MAX_PIECES:
            raise GeometryError(TOO_MANY.format(limit=MAX_PIECES))
        start, current = at, following


def _at(driver: CudaDriver, address: int) -> int | None:
    """Which physical allocation is mapped at `address`."""
    handle = driver.retain(address)
    if handle is not None:
        driver.release(handle)
    return handle


def _handle(driver: CudaDriver, span: _Span, uuid: str, fds: list[int]) -> MemoryHandle:
    """Export one span; descriptors are appended to `fds`."""
    sizes = tuple(piece.nbytes for piece in span.pieces)
    if not span.physical:
        try:
            token = driver.ipc_handle(span.base)
        except CudaCallError as error:
            raise GeometryError(NO_IPC.format(reason=error.name)) from error
        return MemoryHandle("cuda_ipc", uuid, 0, sizes, token)
    for piece in span.pieces:
        fds.append(_descriptor(driver, piece))
    return MemoryHandle("cuda_vmm", uuid, 0, sizes)


def _descriptor(driver: CudaDriver, piece: _Piece) -> int:
    handle = driver.retain(piece.base)
    if handle is None:
        raise GeometryError(CHANGED)
    try:
        if not driver.properties(handle).requested_handle_types & POSIX_FD:
            raise GeometryError(NO_DESCRIPTOR)
        return driver.export_fd(handle)
    except CudaCallError as error:
        raise GeometryError(f"{error}: the KV cache cannot be shared; is `ulimit -n` too low?") from error
    finally:
        driver.release(handle)


def _regions(
    tensors: Sequence[DeviceTensor], spans: list[_Span], num_blocks: int, axes: Axes
) -> tuple[Region, ...]:
    """Where each tensor's blocks are in their span."""
    regions: dict[tuple[int, int], Region] = {}
    for tensor in tensors:
        handle = next(
            n for n, span in enumerate(spans) if span.base <= tensor.address < span.base + span.nbytes
        )
        region = region_of(
            tensor.name,
            tensor.shape,
            tensor.strides,
            tensor.itemsize,
            handle,
            tensor.address - spans[handle].base,
            num_blocks,
            axes,
        )
        # Layers that share one KV cache are one region; a second reading of the same bytes is not.
        if regions.setdefault((handle, region.offset), region) != region:
            raise GeometryError(f"{tensor.name}: overlaps another layer's KV cache in a different shape")
    return tuple(regions.values())

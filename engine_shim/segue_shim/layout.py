"""From an engine's KV tensors to shared memory and a `Geometry` that says where each block is.

Owns the one step that touches the engine's memory: swapping its storages, in place, for shared ones of
the same content. It decides before it touches: a layout that is not understood is refused with a
reason, and the engine's tensors stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from segue_core.errors import GeometryError
from segue_core.geometry import Geometry, Region
from segue_shim.regions import Axes, region_of


@dataclass(frozen=True)
class Pages:
    """An engine's KV memory, shared. `fds[h]` stays open as long as the engine's storage lives;
    `views[h]` is its bytes, uint8 [handle_bytes[h]]."""

    geometry: Geometry
    fds: tuple[int, ...]
    views: tuple[torch.Tensor, ...] = ()


def share_pages(
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size: int,
    axes: Axes = None,
) -> Pages:
    """Share the storages behind `tensors` (one KV tensor a layer) and describe them.

    `axes` names each dimension (see `segue_core.geometry`); None finds the block axis by its length
    and claims nothing about the others. The order of the tensors is the order of a block's bytes.
    Raises GeometryError with the reason if the layout is not understood.
    """
    geometry = describe(tensors, num_blocks=num_blocks, block_size=block_size, axes=axes)
    fds: list[int] = []
    views: list[torch.Tensor] = []
    for storage, nbytes in zip(_storages(tensors).values(), geometry.handle_bytes, strict=True):
        fd, shared_bytes = storage._share_fd_cpu_()
        if fd < 0 or shared_bytes < nbytes:
            raise GeometryError(f"sharing {nbytes} bytes of KV cache gave {shared_bytes}")
        fds.append(fd)
        views.append(torch.empty(0, dtype=torch.uint8).set_(storage))
    return Pages(geometry, tuple(fds), tuple(views))


def describe(
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size: int,
    axes: Axes = None,
) -> Geometry:
    """The geometry of `tensors`, without touching them. Raises GeometryError with the reason."""
    if not tensors:
        raise GeometryError("the engine has no KV cache tensors")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise GeometryError(f"{name}: a {type(tensor).__name__}, not one KV tensor a layer")
        if tensor.device.type != "cpu":
            raise GeometryError(
                f"{name}: KV cache on {tensor.device.type}: all of it on the host, or all on NVIDIA GPUs"
            )
        if tensor.layout != torch.strided:
            raise GeometryError(f"{name}: tensor layout {tensor.layout}")
    handles = {pointer: number for number, pointer in enumerate(_storages(tensors))}
    regions: dict[tuple[int, int], Region] = {}
    for name, tensor in tensors.items():
        region = _region(name, tensor, handles[_pointer(tensor)], num_blocks, axes)
        # Layers that share one KV cache are one region; a second reading of the same bytes is not.
        known = regions.setdefault((region.handle, region.offset), region)
        if known != region:
            raise GeometryError(f"{name}: overlaps another layer's KV cache in a different shape")
    return Geometry(
        num_blocks=num_blocks,
        block_size=block_size,
        handle_bytes=tuple(storage.nbytes() for storage in _storages(tensors).values()),
        regions=tuple(regions.values()),
    ).validate()


def _region(name: str, tensor: torch.Tensor, handle: int, num_blocks: int, axes: Axes) -> Region:
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    offset = tensor.storage_offset() * itemsize
    return region_of(name, tuple(tensor.shape), strides, itemsize, handle, offset, num_blocks, axes)


def _pointer(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _storages(tensors: Mapping[str, torch.Tensor]) -> dict[int, Any]:
    """Each distinct storage once, in order of first use, by address."""
    return {_pointer(tensor): tensor.untyped_storage() for tensor in tensors.values()}

"""An engine's side of the pages suite, run in a child: KV memory of a known content, exported like an
engine's."""

from __future__ import annotations

import mmap
import os
from typing import Any

import msgspec
import numpy as np

from segue_core.geometry import Geometry, Region
from support.cuda_process import WithDescriptors

LAYERS, BLOCKS, BLOCK_SIZE, WIDTH = 3, 16, 4, 4096
LAYER_BYTES = BLOCKS * BLOCK_SIZE * WIDTH
SHAPE = (BLOCKS, BLOCK_SIZE, WIDTH)
STRIDES = (BLOCK_SIZE * WIDTH, WIDTH, 1)
AXES = ("block", "slot", "dim")
OFFSET = 4096
"""Of the first tensor in its allocation: KV tensors seldom begin one."""
PIECES = (4 << 20, 2 << 20)
"""Physical allocations side by side, of two granules and of one."""

held: list[Any] = []
state: dict[str, Any] = {}


def content() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the pages hold: (LAYERS, BLOCKS, BLOCK_SIZE, WIDTH) bytes."""
    return np.random.default_rng(7).integers(0, 256, (LAYERS, *SHAPE), dtype=np.uint8)


def export(kind: str) -> WithDescriptors:
    """Make the memory, fill it, and export it: an encoded geometry and its descriptors."""
    geometry, fds = on_host() if kind == "host" else on_gpu(kind)
    return WithDescriptors(msgspec.msgpack.encode(geometry), fds)


def on_host() -> tuple[Geometry, list[int]]:
    """Host memory in one file."""
    nbytes = OFFSET + LAYERS * LAYER_BYTES
    fd = os.memfd_create("kv")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    memory[OFFSET:] = content().tobytes()
    held.append(memory)
    starts = range(OFFSET, nbytes, LAYER_BYTES)
    regions = tuple(Region(0, start, SHAPE, STRIDES, 1, AXES) for start in starts)
    return Geometry(BLOCKS, BLOCK_SIZE, (nbytes,), regions), [fd]


def on_gpu(kind: str) -> tuple[Geometry, list[int]]:
    """GPU memory of one allocation (`cuda_ipc`), or of two physical ones side by side (`cuda_vmm`)."""
    from cuda.bindings import driver

    from segue_shim.cuda_driver import CudaDriver
    from segue_shim.cuda_export import DeviceTensor
    from segue_shim.cuda_side import CudaSide

    cuda = CudaDriver()
    cuda.call("cuInit", 0)
    cuda.enter(cuda.primary_context(0))
    stream = cuda.create_stream()
    start = allocate(kind, driver) + OFFSET
    if kind == "cuda_vmm":
        start += PIECES[0] - LAYER_BYTES - LAYER_BYTES // 2  # the second layer lies across the seam
    for layer, values in enumerate(content()):
        (status,) = driver.cuMemcpyHtoD(start + layer * LAYER_BYTES, values.ctypes.data, LAYER_BYTES)
        assert status == 0, status
    tensors = [DeviceTensor(f"layer.{n}", start + n * LAYER_BYTES, SHAPE, STRIDES, 1) for n in range(LAYERS)]
    side = CudaSide(
        tensors, device=0, stream=lambda: stream, num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=AXES
    )
    held.append(side)
    state.update(cuda=cuda, side=side, stream=stream, start=start)
    return side.geometry, list(side.memory_fds)


def allocate(kind: str, driver: Any) -> int:
    """Device memory of the kind; its address."""
    if kind == "cuda_ipc":
        return int(checked(driver.cuMemAlloc(OFFSET + LAYERS * LAYER_BYTES)))
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    types = driver.CUmemAllocationHandleType
    properties.requestedHandleTypes = types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    if kind == "cuda_vmm_unshared":
        properties.requestedHandleTypes = types.CU_MEM_HANDLE_TYPE_NONE
    address = int(checked(driver.cuMemAddressReserve(sum(PIECES), 0, 0, 0)))
    state.update(memory=address, properties=properties)
    back(address, properties, driver)
    return address


def back(address: int, properties: Any, driver: Any) -> None:
    """Put new physical memory behind reserved addresses."""
    at = address
    for nbytes in PIECES:
        allocation = checked(driver.cuMemCreate(nbytes, properties, 0))
        checked(driver.cuMemMap(at, nbytes, 0, allocation, 0))
        checked(driver.cuMemRelease(allocation))
        at += nbytes
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    checked(driver.cuMemSetAccess(address, sum(PIECES), [access], 1))


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call that must have worked."""
    assert result[0] == 0, result[0]
    return result[1] if len(result) > 1 else None

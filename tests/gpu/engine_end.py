"""An engine without a model, run in a child: KV memory of known content, shared by the shim's own classes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from cuda.bindings import driver

from gpu import busy
from gpu.shapes import AT_ONCE, AXES, LOADED_SEED, REGIONS, SEED, Shape
from segue_core.extents import in_tier
from segue_core.messages.probe import ShareKind
from segue_shim.cuda_export import DeviceTensor
from segue_shim.cuda_probe_memory import OFFSET, ProbeDriver
from segue_shim.cuda_side import CudaSide
from support.cuda_process import WithDescriptors

state: dict[str, Any] = {}
TIER = 1


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call that must have worked."""
    assert result[0] == 0, result[0]
    return result[1] if len(result) > 1 else None


def begin() -> str:
    """Make the context; the GPU's name."""
    cuda = state["cuda"] = ProbeDriver()
    cuda.call("cuInit", 0)
    cuda.enter(cuda.primary_context(0))
    state["stream"] = cuda.create_stream()
    return checked(driver.cuDeviceGetName(128, 0)).split(b"\0")[0].decode()  # type: ignore[no-any-return]


def free_bytes() -> int:
    """Of the GPU, whoever has the rest."""
    status, free, _ = driver.cuMemGetInfo()
    assert status == 0, status
    return int(free)


def export(kind: ShareKind, slots: int, slot_bytes: int, blocks: int) -> WithDescriptors:
    """Make memory of this shape, fill it and share it: an encoded geometry and its descriptors."""
    shape = Shape(slots, slot_bytes, blocks)
    cuda: ProbeDriver = state["cuda"]
    start = cuda.shareable(kind, OFFSET + shape.nbytes) + OFFSET
    for number in range(REGIONS):
        data = shape.region(number, SEED)
        checked(driver.cuMemcpyHtoD(start + number * shape.region_bytes, data.ctypes.data, data.nbytes))
    size, strides = shape.tensor
    tensors = [
        DeviceTensor(f"region.{n}", start + n * shape.region_bytes, size, strides, 1) for n in range(REGIONS)
    ]
    stream = state["stream"]
    side = CudaSide(tensors, device=0, stream=lambda: stream, num_blocks=blocks, block_size=slots, axes=AXES)
    state.update(side=side, shape=shape, start=start)
    return WithDescriptors(msgspec.msgpack.encode(side.geometry), list(side.memory_fds))


# -- restore ------------------------------------------------------------------------------------------


class PlainArena:
    """A replica arena as the loader knows it, without torch: a daemon's memory, mapped read only; blocks of a
    shape, one behind the other."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.nbytes = blocks * shape.block_bytes
        fd = os.memfd_create("arena")
        os.ftruncate(fd, self.nbytes)
        with mmap.mmap(fd, self.nbytes) as daemons:
            for number in range(blocks):
                daemons.write(shape.block(number, LOADED_SEED).tobytes())
        self._map = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ)
        os.close(fd)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self.unlock: Any = None
        self.tier_lock = threading.Lock()

    @property
    def locked(self) -> bool:
        return self.unlock is not None

    def lock(self, unlock: Any) -> None:
        self.unlock = unlock


def load() -> dict[str, Any]:
    """Fill the memory from an arena, several blocks at a time, and look at every byte of it."""
    arena: Any = PlainArena(state["shape"], state["shape"].blocks)
    state["side"].loader.prepare(arena)
    locked = arena.locked
    found = _load(arena, lambda offset: offset)
    if locked:
        arena.unlock()
    return {"locked": locked, **found}


def load_from_tier(nbytes: int, descriptors: list[int] | None = None) -> dict[str, Any]:
    """Fill the memory from GPU memory of the daemon, in the same way."""
    (fd,) = descriptors or ()
    arena: Any = PlainArena(state["shape"], 1)
    arena.tier = state["side"].loader.map_tier(fd, TIER, nbytes)
    os.close(fd)
    try:
        return _load(arena, lambda offset: in_tier(TIER, offset))
    finally:
        arena.tier.close()


def _load(arena: Any, extent: Callable[[int], int]) -> dict[str, Any]:
    """Load every block from `extent(its offset)`; how long that took, and whether all of it is right."""
    shape, side = state["shape"], state["side"]
    order = list(range(shape.blocks))[::-1]
    taken_ns: list[int] = []
    for at in range(0, len(order), AT_ONCE):
        some = order[at : at + AT_ONCE]
        begun_ns = time.monotonic_ns()
        side.loader.copy(arena, some, [extent(number * shape.block_bytes) for number in some])
        taken_ns.append(time.monotonic_ns() - begun_ns)
    is_equal = all(
        np.array_equal(_read_region(number), shape.region(number, LOADED_SEED)) for number in range(REGIONS)
    )
    return {"equal": is_equal, "seconds": sum(taken_ns) / 1e9, "nbytes": shape.nbytes}


def _read_region(number: int) -> Any:
    shape: Shape = state["shape"]
    found = np.empty(shape.tensor[0], np.uint8)
    at = state["start"] + number * shape.region_bytes
    checked(driver.cuMemcpyDtoH(found.ctypes.data, at, found.nbytes))
    return found


# -- plain copies, to compare with ---------------------------------------------------------------------


def plain_copies(nbytes: int, seconds: float) -> dict[str, float]:
    """Copies of bytes that lie together, each waited for: GB/s from the GPU and to it."""
    pinned = int(checked(driver.cuMemHostAlloc(nbytes, 0)))
    memory = int(checked(driver.cuMemAlloc(nbytes)))
    stream = state["stream"]
    found: dict[str, float] = {}
    for name, call, target, source in (
        ("from_gpu_gb_per_s", driver.cuMemcpyDtoHAsync, pinned, memory),
        ("to_gpu_gb_per_s", driver.cuMemcpyHtoDAsync, memory, pinned),
    ):
        count, begun_ns = 0, time.monotonic_ns()
        while (taken_ns := time.monotonic_ns() - begun_ns) < seconds * 1e9 or not count:
            checked(call(target, source, nbytes, stream))
            checked(driver.cuStreamSynchronize(stream))
            count += 1
        found[name] = count * nbytes / taken_ns if taken_ns else 0.0
    checked(driver.cuMemFree(memory))
    checked(driver.cuMemFreeHost(pinned))
    return found


# -- a GPU at work --------------------------------------------------------------------------------------


def prepare_work(kinds: list[str]) -> list[str]:
    """Make a load for the GPU, of the first kind that works here: [its name, why the others do not]."""
    work, reason = busy.choose(kinds, state["stream"])
    state["work"] = work
    return [work.name, reason]


def work(seconds: float) -> float:
    """Keep the GPU at work; rounds a second."""
    return float(busy.rounds_per_s(state["work"], seconds))

"""The engine's side of the error grid, run in a child with the driver's double: an engine shares its KV
cache, runs steps, loads a replica, sleeps, wakes up and ends while a call fails, in a process of its own."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from conformance import pages_engine
from conformance.pages_engine import AXES, BLOCK_SIZE, BLOCKS, LAYER_BYTES, LAYERS, OFFSET, SHAPE, STRIDES
from segue_core.errors import GeometryError
from segue_core.extents import in_tier
from segue_core.messages.journal import SequenceBegin
from segue_shim import cuda_loader
from segue_shim.channel import Channel
from segue_shim.cuda_driver import CudaCallError
from segue_shim.cuda_export import DeviceTensor
from segue_shim.cuda_side import CudaSide
from segue_shim.exporter import Exporter
from segue_shim.loader import Arena
from segue_shim.plan import Load, Source, StepPlan, pack_u32
from support.cuda_double import Control
from support.cuda_held import held, left_behind
from support.forked import forked
from support.waiting import wait_for

NOWHERE = "/nonexistent/segue.sock"
DAEMON, FOR_EVER_NS = 5, 1 << 62
TARGETS = (4, 9)
BLOCK_BYTES = LAYERS * STRIDES[0]
REPLICA = np.random.default_rng(3).integers(0, 256, len(TARGETS) * BLOCK_BYTES, dtype=np.uint8).tobytes()
cuda_loader.STAGED_BYTES = BLOCK_BYTES  # two batches of these few blocks
NOT_READY = 600
TIER, TIER_BYTES = 7, 2 << 20
FINAL = (4, 700)
"""After these the engine itself cannot go on: DEINITIALIZED, ILLEGAL_ADDRESS."""


class Engine:
    """Memory, a stream, and what the shim has logged."""

    def __init__(self, kind: str) -> None:
        checked = pages_engine.checked
        checked(driver.cuInit(0))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(0))))
        self.stream = int(checked(driver.cuStreamCreate(1)))
        self.start = pages_engine.allocate(kind, driver) + OFFSET
        self.tier_fd = tier_with(REPLICA[BLOCK_BYTES:])
        self.lines: list[logging.LogRecord] = []
        self.side: CudaSide | None = None
        handler = logging.Handler()
        handler.emit = self.lines.append  # type: ignore[method-assign]
        logging.getLogger("segue_shim").addHandler(handler)

    def life(self) -> dict[str, Any]:
        """All that a shim does in an engine's life; what came of it."""
        self.lines.clear()
        tensors = [
            DeviceTensor(f"layer.{n}", self.start + n * LAYER_BYTES, SHAPE, STRIDES, 1) for n in range(LAYERS)
        ]
        shape = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "axes": AXES}
        try:
            side = CudaSide(tensors, device=0, stream=lambda: self.stream, **shape)  # type: ignore[arg-type]
        except GeometryError as error:
            return {"refused": str(error), "lines": self.said()}
        exporter = Exporter(NOWHERE, engine="a", model="m", fingerprint=b"f" * 16, incarnation=1)
        exporter.register_gpu(side)
        made, extents = channel(side, self.tier_fd)
        exporter._offer(made)
        start = SequenceBegin("s", 1, b"", pack_u32(range(9)), pack_u32(range(3)), 0)
        exporter.begin(StepPlan(pack_u32(range(3)), (start,), computed=(("s", 8),), running=1))
        source = Source(DAEMON, 1, FOR_EVER_NS, extents)
        load = Load(8, TARGETS, (source,))
        (staged,) = exporter.load([load])
        prepare(side, made.arena)
        (loaded,) = exporter.load([load])
        exporter.commit(loaded.failed_blocks)
        exporter.suspend()
        exporter.resume()
        exporter.begin(StepPlan(computed=(("s", 9),), running=1))
        exporter.commit()
        exporter.close()
        # The timeline may go only when no mark of a step is on its way.
        query = lambda: int(driver.cuStreamQuery(self.stream)[0])  # noqa: E731
        wait_for(lambda: query() != NOT_READY, "the stream is empty")
        side.close()
        return {
            "refused": "",
            "broken": exporter.broken,
            "loaded": loaded.loaded or staged.loaded,
            "failed": [list(result.failed_blocks) for result in (staged, loaded) if not result.loaded],
            "lines": self.said(),
        }

    def said(self) -> list[list[Any]]:
        """[a line of the log, whether it has a traceback]."""
        return [[record.getMessage(), record.exc_info is not None] for record in self.lines]

    def computes(self) -> bool:
        """Whether the engine's own work goes on."""
        (error,) = driver.cuMemsetD8Async(self.start, 1, LAYER_BYTES, self.stream)
        return int(error) == 0 and int(driver.cuStreamSynchronize(self.stream)[0]) == 0

    def replica_there(self) -> bool:
        """Whether the blocks that were loaded hold the replica."""
        found = bytearray()
        for block in TARGETS:
            for layer in range(LAYERS):
                part = np.empty(STRIDES[0], np.uint8)
                at = self.start + layer * LAYER_BYTES + block * STRIDES[0]
                if int(driver.cuMemcpyDtoH(part.ctypes.data, at, part.nbytes)[0]):
                    return False
                found += part.tobytes()
        return bytes(found) == REPLICA


def tier_with(content: bytes) -> int:
    """A descriptor of GPU memory that begins with this, as a daemon's tier does."""
    checked = pages_engine.checked
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.requestedHandleTypes = posix
    allocation = checked(driver.cuMemCreate(TIER_BYTES, properties, 0))
    fd = int(checked(driver.cuMemExportToShareableHandle(allocation, posix, 0)))
    os.pwrite(fd, content, 0)  # the double's memory is the descriptor's file
    return fd


def channel(side: CudaSide, tier_fd: int) -> tuple[Channel, tuple[int, ...]]:
    """What a registration brings, and where the replica's blocks are: the last one in the tier, if that can
    be mapped."""
    made = Channel(1 << 14)
    fd = os.memfd_create("arena")
    os.write(fd, REPLICA)
    made.arena = Arena(fd, len(REPLICA), DAEMON)
    os.close(fd)
    try:
        made.arena.tier = side.loader.map_tier(tier_fd, TIER, TIER_BYTES)
    except CudaCallError:
        return made, (0, BLOCK_BYTES)
    return made, (0, in_tier(TIER, 0))


def prepare(side: CudaSide, arena: Any) -> None:
    """As the registrar's thread does."""
    preparing = threading.Thread(target=side.loader.prepare, args=(arena,))
    preparing.start()
    preparing.join()


def calls(kind: str, entry_points: list[str]) -> dict[str, int]:
    """How often the shim calls each entry point while nothing fails."""

    def count() -> dict[str, int]:
        engine = Engine(kind)
        before = {entry: Control().calls(entry) for entry in entry_points}
        found = engine.life()
        assert found["loaded"] and not found["failed"] and not found["broken"], found
        return {entry: Control().calls(entry) - before[entry] for entry in entry_points}

    counts: dict[str, int] = forked(count)
    return counts


def trial(kind: str, failures: list[str]) -> list[dict[str, Any]]:
    """Lives of the shim with each of `failures`, one after another, in one engine."""
    results: list[dict[str, Any]] = forked(_trial, kind, failures)
    return results


def _trial(kind: str, failures: list[str]) -> list[dict[str, Any]]:
    engine = Engine(kind)
    results = []
    before = held()
    for failing in failures:
        Control().fail(failing)
        found = engine.life()
        Control().fail("")
        found["right"] = not found.get("loaded") or engine.replica_there()
        final = int(failing.rpartition(":")[2]) in FINAL
        found["left"] = {} if final else left_behind(before)
        found["computes"] = final or engine.computes()
        results.append(found)
    return results


assert not Path(NOWHERE).exists()

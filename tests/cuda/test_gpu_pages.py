"""GPU pages when things go wrong, and when the GPU is behind: real processes on the driver's double."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from conformance.pages_engine import BLOCK_SIZE, BLOCKS, LAYERS, WIDTH, content
from segue_core.geometry import Geometry
from support.cuda_double import device_uuid
from support.cuda_process import CudaProcess, Start

HERE = Path(__file__).parent
GPU_KINDS = ("cuda_ipc", "cuda_vmm")
BLOCK_BYTES = LAYERS * BLOCK_SIZE * WIDTH
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


def block_of(block: int) -> bytes:
    return content()[:, block].tobytes()


def map_as(name: str, engine: CudaProcess, daemon: CudaProcess, kind: str, *more: float) -> None:
    exported, fds = engine.call_for_descriptors("export", kind)
    daemon.call("open_as", name, exported, *more, descriptors=fds)


def let_go(daemon: CudaProcess, name: str) -> None:
    daemon.call("close", name)
    assert daemon.call("released", name)


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuStreamSynchronize"])
def test_a_driver_error_ends_one_mapping_and_no_other(
    engine: CudaProcess, daemon: CudaProcess, call: str
) -> None:
    """The engine whose memory cannot be read is unprotected; the daemon lives on, and so does its next
    engine."""
    map_as("one", engine, daemon, "cuda_ipc")
    map_as("other", engine, daemon, "cuda_vmm")
    daemon.call("fail_next", call, OUT_OF_MEMORY)
    error, failure = daemon.call("failing_copy", "one", 3)
    assert error == "PagesError" and call in failure and "OUT_OF_MEMORY" in failure
    assert daemon.call("failing_copy", "one", 3)[0] == "PagesError", "it is not tried again"
    assert daemon.call("copy", "other", 3) == block_of(3)
    let_go(daemon, "one")
    assert daemon.call("copy", "other", 4) == block_of(4)
    let_go(daemon, "other")


def test_a_gpu_that_stands_still_holds_nobody_up(engine: CudaProcess, daemon: CudaProcess) -> None:
    """The daemon gives the copy up at its deadline, and lets the memory go once the driver comes back."""
    map_as("stuck", engine, daemon, "cuda_vmm", 0.1)
    daemon.call("hold")
    error, failure = daemon.call("failing_copy", "stuck", 1)
    assert error == "PagesError" and "has not returned" in failure
    daemon.call("close", "stuck")
    daemon.call("let_go")
    assert daemon.call("released", "stuck")


OPENING = {
    "cuda_ipc": ("cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuIpcOpenMemHandle", "cuMemHostRegister"),
    "cuda_vmm": ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"),
}


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_an_engine_that_cannot_be_mapped_is_told_why_and_leaves_nothing(
    engine: CudaProcess, daemon: CudaProcess, kind: str
) -> None:
    """Whatever fails while its memory is opened, all that was taken is given back."""
    for call in OPENING[kind]:
        daemon.call("fail_next", call, OUT_OF_MEMORY)
        exported, fds = engine.call_for_descriptors("export", kind)
        said = daemon.call("refusal", exported, descriptors=fds)
        assert said.startswith("ProtocolError") and call in said, said
        assert daemon.call("settled", {}) == {}, call


def test_an_older_driver_copies_piece_by_piece(engine: CudaProcess, start: Start) -> None:
    """Batches came with CUDA 13; engines on older drivers are protected too."""
    daemon = start("daemon", driver_version=12080)
    map_as("old", engine, daemon, "cuda_ipc")
    assert daemon.call("copy", "old", 6) == block_of(6)
    assert daemon.call("calls", "cuMemcpyDtoHAsync") >= LAYERS


def test_the_gpu_is_found_by_its_uuid(start: Start) -> None:
    """Engine and daemon may number the GPUs as they like; one that is not here is named."""
    engine = start("engine", devices=2, visible="1")
    exported, fds = engine.call_for_descriptors("export", "cuda_vmm")
    daemon = start("daemon", devices=2, visible="0")
    daemon.call("open_as", "second", exported, descriptors=fds)
    assert daemon.call("copy", "second", 2) == block_of(2)
    elsewhere = start("daemon", devices=1)
    exported, fds = engine.call_for_descriptors("export", "cuda_vmm")
    said = elsewhere.call("refusal", exported, descriptors=fds)
    assert f"GPU-{device_uuid(1)}" in said and f"GPU-{device_uuid(0)}" in said


@pytest.mark.parametrize(
    ("kind", "lacks", "advice"),
    [
        ("cuda_vmm_unshared", (), "sleep mode"),
        ("cuda_ipc", ("ipc",), "PYTORCH_CUDA_ALLOC_CONF=backend:native"),
    ],
)
def test_memory_that_cannot_be_exported_is_refused_with_what_to_do(
    start: Start, kind: str, lacks: tuple[str, ...], advice: str
) -> None:
    """An operator reads how to start the engine so that it is protected."""
    said = start("engine", lacks=lacks).call("refusal", kind)
    assert said.startswith("GeometryError") and advice in said


def test_what_a_step_computed_counts_once_the_gpu_is_there(start: Start, daemon: CudaProcess) -> None:
    """The journal runs ahead of the kernels: nothing is shipped that they have not written."""
    engine = start("engine")
    message, fds = engine.call_for_descriptors("register", "cuda_vmm")
    daemon.call("register", message, descriptors=fds)
    engine.call("begin", 1, 0)
    engine.call("commit", 1, 3)
    assert daemon.call("drained_until", "s", 3)
    engine.call("hold")
    engine.call("commit", 2, 5)
    assert daemon.call("drained") == [{"s": 3}, True]
    engine.call("begin", 3, 5)  # announced anew while step 2 still runs
    assert daemon.call("drained") == [{"s": 0}, True]
    engine.call("let_go")
    assert daemon.call("drained_until", "s", 5)
    engine.call("hold")
    engine.call("commit", 3, 6)
    engine.kill()
    assert daemon.call("drained") == [{"s": 5}, True], "a dead engine's last step was never complete"
    assert daemon.call("session_block", 1) == block_of(1)
    assert daemon.call("close_session")


@pytest.mark.parametrize("lacks", [(), ("read_only_register",)])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_replica_is_loaded_into_the_engine_s_own_pages(
    start: Start, daemon: CudaProcess, kind: str, lacks: tuple[str, ...]
) -> None:
    """A standby goes on from what its daemon holds; what it did not ask for stays as it was."""
    engine = start("engine", lacks=lacks)
    map_as("loaded", engine, daemon, kind)
    replica = np.random.default_rng(1).integers(0, 256, 2 * BLOCK_BYTES, dtype=np.uint8).tobytes()
    locked, left = engine.call("load", replica, [BLOCKS - 1, 4], [0, BLOCK_BYTES])
    assert (locked, left) == ((False, 1) if lacks else (True, 0)), "the memory for the second step is kept"
    assert daemon.call("copy", "loaded", BLOCKS - 1) == replica[:BLOCK_BYTES]
    assert daemon.call("copy", "loaded", 4) == replica[BLOCK_BYTES:]
    assert daemon.call("copy", "loaded", 5) == block_of(5)
    let_go(daemon, "loaded")


def test_a_load_comes_after_what_the_engine_has_queued(start: Start) -> None:
    """The kernels of the block's last owner may still run: they must not write over the replica."""
    engine = start("engine", megabytes_per_s=5)
    engine.call_for_descriptors("export", "cuda_ipc")
    replica = np.random.default_rng(2).integers(0, 256, BLOCK_BYTES, dtype=np.uint8).tobytes()
    assert engine.call("load_behind_a_write", replica) == replica


def test_memory_that_nobody_copies_to_any_more_is_unlocked(engine: CudaProcess, daemon: CudaProcess) -> None:
    """Links come and go while an engine lives; the host's memory is not locked for those that went."""
    map_as("one", engine, daemon, "cuda_ipc")
    assert daemon.call("locked_buffers", "one") <= 2, "that for copies elsewhere, and the last one"
    let_go(daemon, "one")


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_handle_may_begin_inside_its_allocation(
    engine: CudaProcess, daemon: CudaProcess, kind: str
) -> None:
    """What lies in front of the KV cache in the same allocation is not the daemon's affair."""
    exported, fds = engine.call_for_descriptors("export", kind)
    whole = msgspec.msgpack.decode(exported, type=Geometry)
    skipped = whole.regions[0].offset
    inside = msgspec.structs.replace(
        whole,
        handle_bytes=(whole.handle_bytes[0] - skipped,),
        regions=tuple(msgspec.structs.replace(r, offset=r.offset - skipped) for r in whole.regions),
        handles=(msgspec.structs.replace(whole.handles[0], offset=skipped),),
    )
    daemon.call("open_as", "inside", msgspec.msgpack.encode(inside), descriptors=fds)
    assert skipped and daemon.call("copy", "inside", 7) == block_of(7)
    let_go(daemon, "inside")

"""Copies of many blocks at once, out of and into an engine's GPU memory: real processes on the driver's
double."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from conformance.pages_engine import BLOCK_SIZE, BLOCKS, LAYERS, WIDTH, content
from segue_core.geometry import Geometry
from support.cuda_process import CudaProcess, Start

HERE = Path(__file__).parent
GPU_KINDS = ("cuda_ipc", "cuda_vmm")
BLOCK_BYTES = LAYERS * BLOCK_SIZE * WIDTH
CHUNK_BYTES = 4 << 20
"""As in the daemon: blocks of one chunk are handed on together."""
CHUNK = CHUNK_BYTES // BLOCK_BYTES
MANY = [n % BLOCKS for n in range(3 * CHUNK - 7)]
LOADED = 3 * CHUNK
"""Blocks of a load that fills both halves of the staging memory, and the first one once more."""
OUT_OF_MEMORY = 2


def map_as(name: str, engine: CudaProcess, daemon: CudaProcess, kind: str, *more: float) -> None:
    exported, fds = engine.call_for_descriptors("export", kind)
    daemon.call("open_as", name, exported, *more, descriptors=fds)


def let_go(daemon: CudaProcess, name: str) -> None:
    daemon.call("close", name)
    assert daemon.call("released", name)


def digest_of(blocks: list[int]) -> str:
    layers = content()
    return hashlib.blake2b(b"".join(layers[:, block].tobytes() for block in blocks)).hexdigest()


def test_many_blocks_take_few_calls_of_the_driver(engine: CudaProcess, daemon: CudaProcess) -> None:
    """A prefill's blocks are submitted in batches: a call for each piece would take longer than the copy."""
    map_as("many", engine, daemon, "cuda_vmm")
    before = daemon.call("calls", "*")
    assert daemon.call("copy_many", "many", MANY) == [len(MANY), digest_of(MANY), "", ""]
    assert daemon.call("calls", "*") - before < 20
    let_go(daemon, "many")


def test_a_batch_is_bounded(engine: CudaProcess, daemon: CudaProcess) -> None:
    """Blocks of very many pieces are copied by several calls, and are the same."""
    map_as("pieces", engine, daemon, "cuda_ipc")
    copied, digest, error, failure, calls = daemon.call("copy_in_small_batches", "pieces", MANY[:CHUNK], 100)
    assert (copied, digest, error, failure) == (CHUNK, digest_of(MANY[:CHUNK]), "", "")
    assert calls == -(-CHUNK * LAYERS // 100)
    let_go(daemon, "pieces")


def test_an_older_driver_copies_many_blocks_piece_by_piece(engine: CudaProcess, start: Start) -> None:
    """Batches came with CUDA 13; what is copied without them is the same."""
    daemon = start("daemon", driver_version=12080)
    map_as("old", engine, daemon, "cuda_ipc")
    assert daemon.call("copy_many", "old", MANY) == [len(MANY), digest_of(MANY), "", ""]


@pytest.mark.parametrize(
    ("call", "complete"),
    [
        ("cuMemcpyBatchAsync:1", 0),
        ("cuMemcpyBatchAsync:3", CHUNK),
        ("cuEventRecord:1", 0),
        ("cuEventSynchronize:2", CHUNK),
        ("cuStreamSynchronize:1", 2 * CHUNK),
    ],
)
def test_an_error_in_the_middle_leaves_what_is_complete(
    engine: CudaProcess, daemon: CudaProcess, call: str, complete: int
) -> None:
    """What was handed on before the driver failed is right; nothing is after it; no other engine is hurt."""
    map_as("failing", engine, daemon, "cuda_ipc")
    map_as("other", engine, daemon, "cuda_vmm")
    daemon.call("fail", f"{call}:{OUT_OF_MEMORY}")
    copied, digest, error, failure = daemon.call("copy_many", "failing", MANY)
    assert (copied, digest, error) == (complete, digest_of(MANY[:complete]), "PagesError")
    assert call.partition(":")[0] in failure
    assert daemon.call("copy_many", "failing", MANY)[0] == 0, "it is not tried again"
    assert daemon.call("copy_many", "other", MANY)[:2] == [len(MANY), digest_of(MANY)]
    let_go(daemon, "failing")
    let_go(daemon, "other")


def test_memory_is_not_let_go_while_the_gpu_still_copies(engine: CudaProcess, start: Start) -> None:
    """After an error in the middle of a copy the rest of it is waited for: else the GPU would write to memory
    that is gone, and the daemon would lose it for all engines."""
    daemon = start("daemon", megabytes_per_s=20)
    map_as("failing", engine, daemon, "cuda_vmm")
    daemon.call("fail", f"cuMemcpyBatchAsync:3:{OUT_OF_MEMORY}")
    assert daemon.call("copy_many", "failing", MANY)[2] == "PagesError"
    let_go(daemon, "failing")
    map_as("next", engine, daemon, "cuda_vmm")
    assert daemon.call("failing_copy", "next", 1) == ["none", ""]


def test_only_what_the_gpu_has_copied_is_handed_on(engine: CudaProcess, daemon: CudaProcess) -> None:
    """A GPU that stops in the middle of the second chunk: the first one is complete, and nothing else goes
    out."""
    map_as("half", engine, daemon, "cuda_vmm", 1.0)
    daemon.call("hold", CHUNK * BLOCK_BYTES + 1000)
    copied, digest, error, failure = daemon.call("copy_many", "half", MANY)
    assert (copied, digest, error) == (CHUNK, digest_of(MANY[:CHUNK]), "PagesError")
    assert "has not returned" in failure
    daemon.call("close", "half")
    daemon.call("let_go")
    assert daemon.call("released", "half")


def test_a_copy_that_cannot_be_left_cleanly_is_the_last_one(engine: CudaProcess, daemon: CudaProcess) -> None:
    """What a GPU may still write to is not filled again: the pages say that they cannot be read any more."""
    map_as("stopped", engine, daemon, "cuda_ipc", 1.0)
    daemon.call("hold", CHUNK * BLOCK_BYTES + 1000)
    copied, error, failure = daemon.call("leave_stuck", "stopped", MANY)
    assert (copied, error) == (CHUNK, "PagesError")
    assert "has not returned" in failure
    daemon.call("close", "stopped")
    daemon.call("let_go")
    assert daemon.call("released", "stopped")


def test_memory_that_goes_in_the_middle_of_a_copy_is_missed_at_once(
    engine: CudaProcess, daemon: CudaProcess
) -> None:
    """Nobody waits for a thread that has ended, nor takes it for one that hangs."""
    map_as("gone", engine, daemon, "cuda_vmm")
    assert daemon.call("close_midway", "gone", MANY) == [CHUNK, "PagesError", ""]
    assert daemon.call("released", "gone")


def test_all_blocks_of_a_copy_have_one_deadline(engine: CudaProcess, start: Start) -> None:
    """The event loop waits: a slow GPU does not hold it up once more for each chunk, page-locked or not."""
    daemon = start("daemon", megabytes_per_s=40)
    map_as("slow", engine, daemon, "cuda_ipc", 0.25)
    copied, error = daemon.call("copy_to_ordinary_memory", "slow", MANY)
    assert copied < len(MANY) and error == "PagesError"


def test_an_engine_that_was_here_leaves_no_memory_behind(engine: CudaProcess, daemon: CudaProcess) -> None:
    """Engines come and go while the daemon stays: it does not grow by its buffers each time."""
    map_as("was here", engine, daemon, "cuda_ipc")
    assert daemon.call("left_behind", "was here") == 0


def test_a_copy_that_is_left_early_writes_nothing_more(engine: CudaProcess, start: Start) -> None:
    """The buffer is used for the next delta: the rest of the last one must not land in it."""
    daemon = start("daemon", megabytes_per_s=200)
    map_as("left", engine, daemon, "cuda_ipc")
    assert daemon.call("leave_early", "left", MANY) == [CHUNK, True]


def as_opaque(exported: bytes) -> bytes:
    """The same memory, of which nobody says where a slot is."""
    geometry = msgspec.msgpack.decode(exported, type=Geometry)
    regions = tuple(
        msgspec.structs.replace(region, axes=("block", "opaque", "opaque")) for region in geometry.regions
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(geometry, regions=regions))


@pytest.mark.parametrize("layout", ["slots", "opaque"])
def test_tails_that_are_due_together_cost_one_copy(
    engine: CudaProcess, daemon: CudaProcess, layout: str
) -> None:
    """The decode tails of many sequences are one batch and one wait for the GPU: a round trip for each would
    cost more than the copies."""
    exported, fds = engine.call_for_descriptors("export", "cuda_vmm")
    daemon.call("open_as", "tails", as_opaque(exported) if layout == "opaque" else exported, descriptors=fds)
    shipped = daemon.call("ship_tails", "tails")
    assert shipped == {"right": [[True] * BLOCKS], "calls": [1, 1, 0], "failure": ""}
    let_go(daemon, "tails")


def test_tails_that_are_copied_together_have_one_deadline(engine: CudaProcess, start: Start) -> None:
    """A GPU that hardly moves holds up the event loop once, not once for each sequence; nothing of what it
    may still be writing goes out."""
    daemon = start("daemon", megabytes_per_s=1)
    map_as("slow", engine, daemon, "cuda_ipc")
    shipped = daemon.call("ship_tails", "slow", 0.05)
    assert (shipped["right"], shipped["calls"]) == ([], [1, 1, 0])
    assert "has not returned" in shipped["failure"]
    let_go(daemon, "slow")


def test_what_a_dead_engine_left_is_kept_in_slices_of_a_copy_each(
    engine: CudaProcess, daemon: CudaProcess
) -> None:
    """Its memory is let go sooner than with a copy for each block, and the event loop has its turn in
    between; what was kept before the GPU failed stays, and is right."""
    map_as("dead", engine, daemon, "cuda_ipc")
    kept = daemon.call("keep", "dead", 4)
    assert kept == {"tokens": BLOCKS * BLOCK_SIZE, "right": True, "used": BLOCKS, "copies": BLOCKS // 4}
    daemon.call("fail", f"cuMemcpyBatchAsync:3:{OUT_OF_MEMORY}")
    kept = daemon.call("keep", "dead", 4)
    assert kept == {"tokens": 8 * BLOCK_SIZE, "right": True, "used": 8, "copies": 3}
    let_go(daemon, "dead")


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_blocks_copied_before_their_step_is_complete_are_seen_to_be_old(
    start: Start, daemon: CudaProcess, kind: str
) -> None:
    """The step counter decides when a block may be copied: ahead of it the bytes are wrong, behind it all are
    right."""
    engine = start("engine")
    message, fds = engine.call_for_descriptors("register", kind)
    daemon.call("register", message, descriptors=fds)
    engine.call("begin", 1, 0)
    engine.call("hold", BLOCK_BYTES // 2)
    engine.call("rewrite", [0, 1], 0x3C)
    engine.call("commit", 1, 2 * BLOCK_SIZE)
    assert daemon.call("drained") == [{"s": 0}, True]
    after = hashlib.blake2b(bytes([0x3C]) * 2 * BLOCK_BYTES).hexdigest()
    assert daemon.call("session_blocks", [0, 1]) != after, "old or torn, and nothing that may be shipped"
    engine.call("let_go")
    assert daemon.call("drained_until", "s", 2 * BLOCK_SIZE)
    assert daemon.call("session_blocks", [0, 1]) == after
    engine.kill()
    assert daemon.call("close_session")


WAYS: dict[str, dict[str, Any]] = {
    "page-locked": {},
    "staged": {"lacks": ("read_only_register",)},
    "older driver": {"driver_version": 12080},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_load_of_many_blocks_is_complete_when_it_returns(start: Start, way: str) -> None:
    """The engine computes on what was loaded at once: each block is whole by then, however it was copied and
    however slow the GPU is."""
    engine = start("engine", megabytes_per_s=100, **WAYS[way])
    engine.call_for_descriptors("export", "cuda_vmm")
    blocks = [BLOCKS // 2 + n % (BLOCKS // 2) for n in range(LOADED)]
    blocks[CHUNK - BLOCKS // 2 : CHUNK] = range(BLOCKS // 2)  # the end of the first half, and never again
    locked, found = engine.call("load_many", blocks, 5)
    assert locked == (way != "staged")
    replica = np.random.default_rng(5).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    assert found == [hashlib.blake2b(block).hexdigest() for block in replica]

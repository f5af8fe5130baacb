"""What every kind of pages promises: host memory, and GPU memory by either kind of handle.

Engine and daemon are processes of their own, as they are in life; GPUs are the driver's double, or real ones
(`tests/gpu/run.sh`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.pages_engine import BLOCK_SIZE, BLOCKS, LAYERS, WIDTH, content
from support import cuda_double, real_driver
from support.cuda_process import CudaProcess

HERE = Path(__file__).parent
KINDS = ("host", "cuda_ipc", "cuda_vmm")
BLOCK_BYTES = LAYERS * BLOCK_SIZE * WIDTH
MANY = 200
"""Blocks of a copy that takes more than one piece of it on a GPU."""


class World:
    """An engine that has exported, and a daemon that has mapped."""

    def __init__(self, engine: CudaProcess, daemon: CudaProcess, kind: str) -> None:
        self.engine = engine
        self.daemon = daemon
        self.map(kind)

    def map(self, kind: str) -> None:
        """Export anew, and open that."""
        exported, fds = self.engine.call_for_descriptors("export", kind)
        assert self.daemon.call("open_exported", exported, descriptors=fds) == BLOCK_BYTES


@pytest.fixture(scope="module")
def library() -> Path:
    if real_driver.wanted():
        real_driver.require()
        return Path("not used")
    return cuda_double.required()


@pytest.fixture(scope="module")
def daemon(library: Path) -> Iterator[CudaProcess]:
    """One daemon for all: what an engine leaves behind would meet the next one."""
    process = CudaProcess(library, HERE / "pages_daemon.py")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def engine(library: Path) -> Iterator[CudaProcess]:
    """One process for the engines that live on."""
    process = CudaProcess(library, HERE / "pages_engine.py")
    yield process
    process.kill()


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, engine: CudaProcess, daemon: CudaProcess) -> Iterator[World]:
    """Every test on each kind of memory."""
    yield World(engine, daemon, request.param)
    daemon.call("close")


@functools.cache
def block_of(block: int) -> bytes:
    """A block over all layers."""
    return content()[:, block].tobytes()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_block_is_copied_byte_for_byte(world: World, pinned: bool) -> None:
    """What is shipped is what the engine computed, and nothing beside it is touched."""
    for block in (0, 5, BLOCKS - 1):
        assert world.daemon.call("copy_block", block, BLOCK_BYTES, pinned) == block_of(block)


@pytest.mark.parametrize("pinned", [False, True])
def test_blocks_are_copied_one_behind_the_other(world: World, pinned: bool) -> None:
    """What a delta brings of many blocks is what the engine computed, and at any moment what is said to be
    complete is."""
    blocks = [(7 * n + n // BLOCKS) % BLOCKS for n in range(MANY)]
    said = world.daemon.call("copy_blocks", blocks, MANY * BLOCK_BYTES, pinned)
    counts = [complete for complete, _ in said]
    assert counts == sorted(set(counts)) and counts[-1] == MANY and len(counts) > 1
    for before, (complete, digest) in zip([0, *counts], said, strict=False):
        expected = b"".join(map(block_of, blocks[before:complete]))
        assert digest == hashlib.blake2b(expected).hexdigest()
    assert world.daemon.call("copy_blocks", [], 0) == []


@pytest.mark.parametrize("pinned", [False, True])
def test_pieces_that_are_copied_together_lie_each_at_its_place(world: World, pinned: bool) -> None:
    """What the decode tails of several sequences bring is what the engine computed, and what lies between
    them stays."""
    slot_bytes = LAYERS * WIDTH
    room = np.full(BLOCKS * (BLOCK_BYTES + 64), 0xA5, np.uint8)
    pieces, at = [], 64
    for block in range(BLOCKS):
        first, last = ((0, 0), (0, 1), (1, 3), (0, BLOCK_SIZE))[block % 4]
        found = content()[:, block, first:last] if last else content()[:, block]
        nbytes = (last - first) * slot_bytes if last else BLOCK_BYTES
        room[at : at + nbytes] = found.reshape(-1)
        pieces.append((block, first, last, at))
        at += nbytes + 64
    digest = hashlib.blake2b(room).hexdigest()
    for _ in range(2):
        assert world.daemon.call("copy_pieces", pieces, len(room), pinned) == [BLOCKS, digest]
    assert world.daemon.call("copy_pieces", [], 0) == [0, hashlib.blake2b(b"").hexdigest()]


def test_blocks_are_refused_before_anything_is_copied(world: World) -> None:
    """One that is not there, or too little room: half a delta never passes for a whole one."""
    for blocks in ([1, BLOCKS], [1, -1]):
        assert world.daemon.call("refused_blocks", blocks, 2 * BLOCK_BYTES) == ["IndexError", False]
    assert world.daemon.call("refused_blocks", [1, 2], 2 * BLOCK_BYTES - 1) == ["ValueError", False]
    world.daemon.call("close")
    assert world.daemon.call("refused_blocks", [1, 2], 2 * BLOCK_BYTES) == ["PagesError", False]


def test_slots_are_copied_in_the_order_of_their_runs(world: World) -> None:
    """A decode tail is the new tokens of every layer, and no others."""
    for first, last in ((0, 1), (1, 3), (0, BLOCK_SIZE)):
        nbytes, found = world.daemon.call("copy_slots", 9, first, last, BLOCK_BYTES)
        assert nbytes == LAYERS * (last - first) * WIDTH
        assert found == content()[:, 9, first:last].tobytes()


@pytest.mark.parametrize("block", [-1, BLOCKS, 1 << 40])
def test_a_block_that_is_not_there_is_refused(world: World, block: int) -> None:
    """Bytes of something else never go out as KV."""
    assert world.daemon.call("refusal", "copy_block", block, BLOCK_BYTES) == "IndexError"
    assert world.daemon.call("refusal", "copy_slots", block, 0, 1, BLOCK_BYTES) == "IndexError"
    assert world.daemon.call("refusal", "copy_piece", block, BLOCK_BYTES) == "IndexError"


def test_too_little_room_is_refused(world: World) -> None:
    """A copy never writes past its destination."""
    assert world.daemon.call("refusal", "copy_block", 1, BLOCK_BYTES - 1) == "ValueError"
    assert world.daemon.call("refusal", "copy_slots", 1, 0, 2, LAYERS * WIDTH) == "ValueError"
    assert world.daemon.call("refusal", "copy_piece", 1, BLOCK_BYTES - 1) == "ValueError"


def test_closed_pages_refuse_and_a_buffer_outlives_them(world: World) -> None:
    """An engine that is gone is not read any more, while what was copied may still be on its way."""
    daemon = world.daemon
    daemon.call("keep_buffer", 1000)
    daemon.call("close")
    assert daemon.call("refusal", "copy_block", 1, BLOCK_BYTES) == "PagesError"
    assert daemon.call("refusal", "copy_slots", 1, 0, 1, BLOCK_BYTES) == "PagesError"
    assert daemon.call("refusal", "copy_piece", 1, BLOCK_BYTES) == "PagesError"
    assert daemon.call("kept_buffer") == 7000


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_engine_s_blocks_can_still_be_copied(library: Path, daemon: CudaProcess, kind: str) -> None:
    """What was not acknowledged when an engine died is salvaged from its memory."""
    mortal = CudaProcess(library, HERE / "pages_engine.py")
    try:
        World(mortal, daemon, kind)
    finally:
        mortal.kill()
    for block in range(BLOCKS):
        assert daemon.call("copy_block", block, BLOCK_BYTES) == block_of(block)
    daemon.call("close")


def test_engines_come_and_go_without_a_trace(world: World) -> None:
    """A daemon that has seen a thousand engines holds no more than one that has seen none."""
    daemon = world.daemon
    daemon.call("copy_block", 1, BLOCK_BYTES, True)
    daemon.call("close")
    before = daemon.call("held")
    for kind in KINDS:
        world.map(kind)
        daemon.call("copy_block", 1, BLOCK_BYTES, True)
        daemon.call("close")
    assert daemon.call("held") == before


def test_the_content_tells_blocks_and_layers_apart() -> None:
    """These tests cannot pass on memory that is the same everywhere."""
    blocks = content().reshape(LAYERS * BLOCKS, -1)
    assert len(np.unique(blocks, axis=0)) == LAYERS * BLOCKS

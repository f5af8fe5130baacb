"""Copies of replicas in GPU memory of the daemon: engines take sequences over from there, on the double."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.pages_engine import content
from support.cuda_double import Settings
from support.cuda_process import CudaProcess
from support.daemons import DaemonSet
from support.waiting import wait_for

ENGINE = Path(__file__).parent / "gpu_engine.py"
IDS = list(range(100, 115))
TOKENS, FULL_BLOCKS = 14, 3
BUDGET_BYTES = 1 << 20
BLOCKS = [8, 9, 10, 11]


class Standby:
    """Daemon b has a GPU tier; what an engine beside daemon a computes is replicated there."""

    def __init__(self, daemons: DaemonSet, library_folder: Path, **settings: Any) -> None:
        self.daemon = daemons["b"]
        self.daemon.config["store"]["gpu_budget_bytes"] = BUDGET_BYTES
        self.first = CudaProcess(library_folder, ENGINE)
        self.engine = CudaProcess(library_folder, ENGINE, Settings(**settings))
        daemons.start()
        for process, name, incarnation in ((self.first, "a", 1), (self.engine, "b", 2)):
            assert process.call("join", daemons[name].socket, name, incarnation, "cuda_vmm")
            wait_for(daemons[name].protects, f"engine {name} is registered")

    def replicate(self) -> None:
        self.first.call("run", IDS, TOKENS)
        wait_for(lambda: self.daemon.watermark("s") == TOKENS, "all is at the peer")

    def store(self, what: str) -> Any:
        return self.daemon.status()["store"][f"tier_{what}"]

    def kill(self) -> None:
        self.first.kill()
        self.engine.kill()


@pytest.fixture
def standby(daemons: DaemonSet, library_folder: Path) -> Iterator[Standby]:
    made = Standby(daemons, library_folder)
    yield made
    made.kill()


def loaded_right(engine: CudaProcess) -> bool:
    """Whether the blocks of the sequence hold what the first engine had computed."""
    wanted = [content()[:, number].tobytes() for number in range(FULL_BLOCKS)]
    return [engine.call("block", block) for block in BLOCKS[:FULL_BLOCKS]] == wanted


def test_a_sequence_is_taken_over_from_the_gpu_tier(standby: Standby) -> None:
    """Full blocks come out of GPU memory, the tail out of the arena, and no token is computed again."""
    standby.replicate()
    wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made")
    assert standby.engine.call("take_over", IDS, BLOCKS) == TOKENS
    assert loaded_right(standby.engine)
    assert standby.store("hits") == FULL_BLOCKS
    assert standby.store("bytes") >= BUDGET_BYTES > standby.store("used_bytes") > 0


def test_replicas_from_before_the_engine_came_are_copied_too(standby: Standby) -> None:
    """The tier comes and goes with the engine; another engine gets one of its own, and reads no older one."""
    standby.replicate()
    wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made")
    stale = standby.engine.call("match", IDS)
    standby.engine.call("rejoin")
    wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made anew")
    assert standby.engine.call("load_matched", stale, IDS, BLOCKS) == 0, "that tier is gone"
    assert standby.engine.call("take_over", IDS, BLOCKS) == TOKENS
    assert loaded_right(standby.engine) and standby.store("hits") == FULL_BLOCKS
    standby.engine.kill()
    wait_for(lambda: standby.store("bytes") == 0, "the memory is let go")


def test_an_engine_that_cannot_map_the_tier_loads_from_the_arena(
    daemons: DaemonSet, library_folder: Path
) -> None:
    """The daemon hears why, says so in its status, and keeps no GPU memory for nothing."""
    failing = "cuMemImportFromShareableHandle:1:304"
    standby = Standby(daemons, library_folder, failures=failing)
    try:
        wait_for(lambda: "cuMemImportFromShareableHandle" in standby.store("detail"), "it is told why")
        standby.replicate()
        assert standby.store("bytes") == 0
        assert standby.engine.call("take_over", IDS, BLOCKS) == TOKENS
        assert loaded_right(standby.engine)
    finally:
        standby.kill()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemcpyHtoDAsync"])
def test_a_tier_that_fails_costs_nothing_but_itself(
    daemons: DaemonSet, library_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The GPU is full, or does not copy: the sequence is taken over from the arena as if there were none."""
    monkeypatch.setenv("CUDA_DOUBLE_FAIL", f"{call}:1:2")
    standby = Standby(daemons, library_folder)
    try:
        standby.replicate()
        wait_for(lambda: call in standby.store("detail"), "it says why")
        assert standby.engine.call("take_over", IDS, BLOCKS) == TOKENS
        assert loaded_right(standby.engine) and standby.store("bytes") == 0
    finally:
        standby.kill()

"""Copies of replicas in GPU memory of the daemon: engines take sequences over from there, on the double."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.pages_engine import content
from support.cuda_double import Settings
from support.cuda_failover import replicated
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
        self._daemons, self.daemon = daemons, daemons["b"]
        self.daemon.config["store"]["gpu_budget_bytes"] = BUDGET_BYTES
        self.first = CudaProcess(library_folder, ENGINE)
        self.engine = CudaProcess(library_folder, ENGINE, Settings(**settings))
        daemons.start()
        for process, name, incarnation in ((self.first, "a", 1), (self.engine, "b", 2)):
            assert process.call("join", daemons[name].socket, name, incarnation, "cuda_vmm")

    def replicate(self) -> None:
        replicated(self._daemons, self.first, IDS, TOKENS)

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


def takes_over(standby: Standby) -> bool:
    """Whether the engine goes on with all tokens, and what it loaded is what the first engine computed."""
    wanted = [content()[:, number].tobytes() for number in range(FULL_BLOCKS)]
    tokens = standby.engine.call("take_over", IDS, BLOCKS)
    found = [standby.engine.call("block", number) for number in BLOCKS[:FULL_BLOCKS]]
    return tokens == TOKENS and found == wanted


def test_a_sequence_is_taken_over_from_the_gpu_tier(standby: Standby) -> None:
    """Full blocks come out of GPU memory, the tail out of the arena, and no token is computed again."""
    standby.replicate()
    wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made")
    assert takes_over(standby)
    assert standby.store("hits") == FULL_BLOCKS and not standby.store("detail")
    assert standby.store("bytes") >= BUDGET_BYTES > standby.store("used_bytes") > 0


def test_each_registration_has_a_tier_of_its_own(standby: Standby) -> None:
    """It goes before the next one comes, also in an engine that is idle; what was found in it is not read
    any more, and the next one begins with the replicas that are there."""
    standby.replicate()
    wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made")
    stale, held = standby.engine.call("match", IDS), standby.engine.call("mappings")
    standby.engine.call("rejoin")
    wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made anew")
    assert standby.engine.call("load_matched", stale, IDS, BLOCKS) == 0, "that tier is gone"
    assert takes_over(standby) and standby.store("hits") == FULL_BLOCKS
    standby.daemon.stop(signal.SIGKILL)
    standby.daemon.start()
    wait_for(standby.daemon.protects, "the idle engine is registered again")
    wait_for(lambda: not standby.store("detail"), "and has mapped a tier")
    assert standby.engine.call("mappings") == held
    standby.engine.kill()
    wait_for(lambda: standby.store("bytes") == 0 and standby.store("detail"), "the memory is let go")


def test_a_load_that_fails_ends_the_tier_and_not_the_protection(
    daemons: DaemonSet, library_folder: Path
) -> None:
    """The engine computes those tokens, and lets the tier go; the next takeover comes from the arena."""
    standby = Standby(daemons, library_folder, driver_version=12080)
    try:
        standby.replicate()
        wait_for(lambda: standby.store("blocks") == FULL_BLOCKS, "the copies are made")
        held = standby.engine.call("mappings")
        standby.engine.call("fail", "cuMemcpyDtoDAsync:1:1")
        assert standby.engine.call("take_over", IDS, BLOCKS) == 0
        wait_for(lambda: "cuMemcpyDtoDAsync" in standby.store("detail"), "the daemon hears why")
        wait_for(lambda: standby.engine.call("mappings") < held, "the engine lets it go")
        assert takes_over(standby) and standby.store("bytes") == 0 and standby.daemon.protects()
    finally:
        standby.kill()


def test_an_engine_that_cannot_map_the_tier_loads_from_the_arena(
    daemons: DaemonSet, library_folder: Path
) -> None:
    """The daemon hears why, says so in its status, and keeps no GPU memory for nothing."""
    standby = Standby(daemons, library_folder, failures="cuMemImportFromShareableHandle:1:304")
    try:
        wait_for(lambda: "cuMemImportFromShareableHandle" in standby.store("detail"), "it is told why")
        standby.replicate()
        assert standby.store("bytes") == 0 and takes_over(standby)
    finally:
        standby.kill()


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("cuMemCreate:1:2", "store.gpu_budget_bytes"),
        ("cuMemCreate:1:hang", "being opened"),
        ("cuMemcpyHtoDAsync:1:2", "cuMemcpyHtoDAsync"),
    ],
)
def test_a_tier_that_fails_costs_nothing_but_itself(
    daemons: DaemonSet, library_folder: Path, monkeypatch: pytest.MonkeyPatch, failure: str, says: str
) -> None:
    """The GPU is full, hangs, or does not copy: the sequence is taken over from the arena as if there were
    none, nobody waits for it, and the daemon stops when it is told to."""
    monkeypatch.setenv("CUDA_DOUBLE_FAIL", failure)
    standby = Standby(daemons, library_folder)
    try:
        standby.replicate()
        wait_for(lambda: says in standby.store("detail"), "it says why")
        assert takes_over(standby) and standby.store("bytes") == 0
        assert standby.daemon.stop() == 0
    finally:
        standby.kill()

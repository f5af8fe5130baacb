"""KV memory that goes and comes back while the engine lives: sleep mode, with real daemons on the driver's
double."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cuda_double import Settings
from support.cuda_process import CudaProcess
from support.cuda_sleep import content_after
from support.daemons import DaemonSet
from support.waiting import wait_for

ENGINE = Path(__file__).parent / "gpu_engine.py"
TOKENS = 14
"""Three whole blocks and half a tail."""
Pair = tuple[DaemonSet, CudaProcess, CudaProcess]


@pytest.fixture(scope="module")
def pair(library_folder: Path) -> Iterator[Pair]:
    """Two daemons, an engine that may sleep beside the first, one beside the second."""
    daemons = DaemonSet("a", "b")
    first, standby = (CudaProcess(library_folder, ENGINE) for _ in "ab")
    try:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in Settings().environment(library_folder).items():
                environment.setenv(name, value)
            daemons.start()
        assert first.call("join", daemons["a"].socket, "a", 1, "cuda_vmm")
        assert standby.call("join", daemons["b"].socket, "b", 2, "cuda_ipc")
        for name in "ab":
            wait_for(daemons[name].protects, f"engine {name} is registered")
        daemon = daemons["a"].process
        assert daemon is not None
        first.call("may_sleep", [daemon.pid])
        yield daemons, first, standby
    finally:
        first.kill()
        standby.kill()
        daemons.stop()


def check_replica(pair: Pair, seq: str, times: int) -> None:
    """A new sequence is taken over as the engine has it, in memory that came back so often."""
    daemons, first, standby = pair
    ids = [1000 * times + number for number in range(TOKENS + 1)]
    first.call("run", ids, TOKENS, seq)
    wait_for(lambda: daemons["b"].watermark(seq) == TOKENS, f"{seq} is at the peer")
    assert standby.call("take_over", ids, [8, 9, 10, 11], seq) == TOKENS
    for number in range(3):
        assert standby.call("block", 8 + number) == content_after(times)[:, number].tobytes()


def test_memory_that_went_and_came_back_is_protected_again(pair: Pair) -> None:
    """When an engine goes to sleep its daemon lets go first, so that the memory is really freed; once the KV
    cache is back, replicas are made of the new memory. If it is exchanged without a word, that is noticed
    before the next step. An engine that ends keeps none of it."""
    daemons, first, _ = pair
    check_replica(pair, "s", 0)
    assert first.call("sleep", 1) == [0, 0], "pieces of memory held here, and by the daemon"
    assert not daemons["a"].protects()
    first.call("wake_up", ["weights"])
    assert not daemons["a"].protects(), "the KV cache is still away"
    first.call("wake_up", ["kv_cache"])
    assert first.call("idle_until_registered")
    check_replica(pair, "t", 1)
    first.call("exchange")
    assert first.call("idle_until_registered")
    check_replica(pair, "u", 2)
    assert first.call("end") == 0, "pieces of memory that an engine holds which has ended in a living process"

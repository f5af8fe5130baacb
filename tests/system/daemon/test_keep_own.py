"""A host of its own: an engine that was killed and started again goes on with what its daemon kept of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.daemons import DaemonSet
from support.engine_process import EngineProcess
from support.light_engine import LightEngine
from support.waiting import wait_for


@pytest.fixture(scope="module")
def lone() -> Iterator[DaemonSet]:
    """One daemon; there is no peer anywhere."""
    daemons = DaemonSet("a")
    try:
        yield daemons.start()
    finally:
        daemons.stop()


def kill_an_engine(daemons: DaemonSet, **prompts: int) -> None:
    """It had these sequences, and was killed in the middle of its answers, after twenty tokens of each."""
    process = EngineProcess(daemons["a"].socket, "a", incarnation=1)
    try:
        for seq, tokens in prompts.items():
            process.start(seq, tokens)
        process.step(20)
    finally:
        process.kill()
    wait_for(lambda: daemons["a"].status()["store"]["own_replicas"] == len(prompts), "they are kept")
    for seq, tokens in prompts.items():
        _, found = daemons["a"].get(f"/v1/sequences/{seq}")
        assert (found["role"], found["watermark"]) == ("replica", tokens + 20)


def restarted(daemons: DaemonSet) -> LightEngine:
    engine = LightEngine(daemons["a"].socket, "a", incarnation=2)
    wait_for(lambda: engine.exporter.registered, "the restarted engine is registered")
    return engine


def resumed(daemons: DaemonSet, engine: LightEngine, seq: str, prompt: int) -> tuple[int, int]:
    """Tokens that the promotion promised, and that were loaded, of prompt and twenty tokens."""
    ids = [*range(prompt), *[1] * 20]
    body = {"epoch": 2, "want_tokens": len(ids)}
    promised = daemons["a"].get(f"/v1/sequences/{seq}/promote", body)[1]["watermark"]
    loaded = engine.resume(seq, [*ids, 7], 2)
    engine.step()
    assert engine.live[seq].computed == len(ids) + 1 and engine.wrong_tokens(seq) == []
    return promised, loaded


def test_a_restarted_engine_takes_its_sequences_back_without_any_peer(lone: DaemonSet) -> None:
    """Every token that was computed before the kill is loaded, right to the byte; what is loaded is not kept
    any longer, and the memory of the dead engine is free."""
    kill_an_engine(lone, s=100, t=40)
    engine = restarted(lone)
    assert resumed(lone, engine, "s", 100) == (120, 120)
    wait_for(lambda: lone["a"].status()["store"]["own_replicas"] == 1, "one is back where it belongs")
    assert resumed(lone, engine, "t", 40) == (60, 60)
    process = lone["a"].process
    assert process is not None
    with open(f"/proc/{process.pid}/maps") as maps:
        pages = [line for line in maps if "torch_" in line]
    assert len(pages) == 1, "only the living engine's pages are mapped"
    engine.close()


def test_a_daemon_restarted_in_between_has_nothing_and_all_is_computed(lone: DaemonSet) -> None:
    """What is kept is in memory only: losing it costs time, not the answer."""
    kill_an_engine(lone, u=100)
    lone["a"].stop(signal.SIGKILL)
    lone["a"].start()
    engine = restarted(lone)
    assert resumed(lone, engine, "u", 100) == (0, 0)
    engine.close()

"""The local cluster with real daemons and a real router around small engines, killed and started again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from segue_ctl import cluster as cluster_module
from segue_ctl.cluster import Cluster
from segue_ctl.cluster_checks import daemon_status
from segue_ctl.failure_run import Question, interrupted, measure, uninterrupted
from segue_ctl.vllm_server import Command, EnginePlace, EngineSpec
from segue_ctl.waiting import ClusterError

ENGINE = Path(__file__).with_name("counting_engine.py")
QUESTION = Question([{"role": "user", "content": "count"}], max_tokens=40, salt="s")


def counting_engine(spec: EngineSpec, place: EnginePlace, model_dir: Path) -> Command:
    """The command of an engine that counts."""
    argv = (sys.executable, str(ENGINE), str(place.port), model_dir.name, *spec.extra_args)
    return Command(argv, dict(os.environ))


def broken_engine(spec: EngineSpec, place: EnginePlace, model_dir: Path) -> Command:
    """The command of an engine that ends at once."""
    return Command((sys.executable, "-c", "raise SystemExit('out of memory, says the engine')"), {})


def _cluster(**more: object) -> Cluster:
    engines = [EngineSpec(name, protected=False) for name in "ab"]
    options = {"model_dir": Path("m"), "engine_command": counting_engine} | more
    return Cluster(engines, **options)  # type: ignore[arg-type]


async def test_an_answer_goes_on_when_its_engine_is_killed_and_the_engine_comes_back() -> None:
    """Kill, resume elsewhere, restart, and again: no token lost or repeated, and nothing stays behind."""
    async with _cluster() as cluster:
        reference = await uninterrupted(cluster, cluster.router_url(), QUESTION)
        assert reference.token_ids == list(range(10, 50))
        for after_tokens in (1, 20):
            run = await interrupted(cluster, cluster.router_url(), QUESTION, after_tokens=after_tokens)
            got = measure(run, reference, QUESTION)
            assert got.equal_tokens and got.equal_text and not (got.lost_tokens or got.repeated_tokens)
            assert got.moves == 1 and got.detected_by and 0 < got.detect_ms < 5_000
            assert after_tokens <= got.delivered_tokens <= after_tokens + 3
            assert {got.engine, got.standby} == {"a", "b"}
            await cluster.restart_engine(got.engine)
        folder = cluster.folder
    assert not folder.exists()


async def test_a_second_router_may_stand_beside_the_first() -> None:
    """Replay is measured through a router of its own; killing one router leaves the other alone."""
    async with _cluster() as cluster:
        other = await cluster.start_router("second", replicated=False)
        assert other != cluster.router_url()
        cluster.kill_router()
        assert len((await uninterrupted(cluster, other, QUESTION)).token_ids) == 40
        assert await cluster.start_router() == cluster.router_url()
        assert len((await uninterrupted(cluster, cluster.router_url(), QUESTION)).token_ids) == 40


async def test_daemons_find_each_other_and_again_after_a_kill() -> None:
    """Daemons without engines link up; one that was killed starts on its old socket and links up again."""
    async with _cluster(sinks=("x", "y")) as cluster:
        cluster.kill_daemon("x")
        assert cluster.daemons_alive() == ["y"]
        await cluster.start_daemon("x")
        await cluster.wait_linked()
        status = await daemon_status(cluster.session, cluster.daemon_url("x"))
        assert not isinstance(status, str)
        assert [(peer.peer, peer.connected) for peer in status.peers] == [("y", True)]


async def test_an_engine_that_does_not_start_shows_why_and_nothing_stays_behind() -> None:
    """The message has the engine's own last words; the run folder and all processes are gone."""
    cluster = _cluster(engine_command=broken_engine)
    with pytest.raises(ClusterError, match="out of memory, says the engine"):
        await cluster.start()
    await cluster.stop()
    assert not cluster.folder.exists()


async def test_an_engine_that_never_gets_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a deadline, and the message says what was missing."""
    monkeypatch.setattr(cluster_module, "ENGINE_START_S", 1.0)

    def mute_engine(spec: EngineSpec, place: EnginePlace, model_dir: Path) -> Command:
        return Command((sys.executable, "-c", "import signal; signal.pause()"), {})

    with pytest.raises(ClusterError, match=r"engine [ab] serves m: not within 1 s: .* does not answer"):
        async with _cluster(engine_command=mute_engine):
            pass

"""Silence, and who is to blame: one stream, its engine, all engines at once, or the router itself."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from segue_core.messages.status import RouterStatus, SequenceStatus
from system.router.asked import CHAT, COMPLETIONS, assert_uninterrupted, request
from system.router.fake_daemon import FakeDaemon
from system.router.fake_engine import FakeEngine, Fault
from system.router.fake_tokens import generate
from system.router.harness import DEADLINE_S, FAST, Answer, Client, Stage, eventually, read_answer, session_of
from system.router.router_process import start_process, until_ready

LONG = 140
SILENT_AFTER = 7
PAUSE_S = 5.0
"""Several times each time-out of the router that is paused, and shorter than its streams."""


async def beside_a_busy_stream(
    stage: Stage, engines: list[FakeEngine], client: Client
) -> tuple[asyncio.Task[Answer], asyncio.Task[Answer]]:
    """Two streams on engine a, one that goes on all the time, and one that falls silent."""
    home = session_of("a")
    body = request(COMPLETIONS, max_tokens=LONG)
    busy = asyncio.create_task(client.ask(COMPLETIONS, body, x_session_id=home))
    await eventually(lambda: engines[0].seen, "the first one has begun")
    stage.faults.append(Fault("silent", SILENT_AFTER))
    silent = asyncio.create_task(client.ask(COMPLETIONS, request(COMPLETIONS), x_session_id=home))
    await eventually(
        lambda: len(engines[0].seen) > 1 and engines[0].seen[1].sent_tokens == SILENT_AFTER, "it is silent"
    )
    return busy, silent


async def only_the_silent_one_moved(
    client: Client, busy: asyncio.Task[Answer], silent: asyncio.Task[Answer]
) -> None:
    answer = await silent
    assert_uninterrupted(answer, COMPLETIONS, request(COMPLETIONS))
    (move,) = (await client.story(answer.seq)).moves
    assert (move.from_engine, move.to, move.detected_by) == ("a", "b", "stalled")
    assert not busy.done(), "the other one still streams: the engine was never still"
    engine = next(e for e in (await client.status()).engines if e.name == "a")
    assert (engine.state, engine.failures) == ("up", 0), "and is not to blame"
    answer = await busy
    assert_uninterrupted(answer, COMPLETIONS, request(COMPLETIONS, max_tokens=LONG))
    assert (await client.story(answer.seq)).moves == ()


async def test_one_silent_stream_is_moved_where_nobody_can_ask(stage: Stage) -> None:
    """Without a daemon: after lone_stall_ms, although its engine streams to others."""
    engines = [await stage.engine(token_s=0.02), await stage.engine()]
    client = await stage.router(engines, timeouts={"stall_ms": 200, "lone_stall_ms": 800})
    busy, silent = await beside_a_busy_stream(stage, engines, client)
    await only_the_silent_one_moved(client, busy, silent)
    (move,) = (await client.story((await silent).seq)).moves
    assert move.detect_ms is not None
    assert move.detect_ms >= 750, "until then it might have waited in the engine"


def tells(daemon: FakeDaemon, known: int) -> None:
    """It knows `known` tokens of every sequence that its engine writes."""
    daemon.says_of = lambda seq: SequenceStatus(seq, "owner", 1, known, known, 0, 0)


@pytest.mark.parametrize("ahead", [True, False], ids=["stuck on the way", "waits in the engine"])
async def test_a_daemon_tells_a_stuck_stream_from_one_that_waits(stage: Stage, ahead: bool) -> None:
    """A preempted sequence is silent too: what counts is whether the engine has more than it delivered."""
    engines = [await stage.engine(token_s=0.02), await stage.engine()]
    daemons = [await stage.daemon(), await stage.daemon()]
    for daemon in daemons:
        daemon.say(running=2, progress_age_ms=0)
    client = await stage.router(engines, daemons, timeouts={"stall_ms": 300, "first_token_ms": 1_800})
    delivered = len(generate(COMPLETIONS, request(COMPLETIONS))[0]) + SILENT_AFTER
    tells(daemons[0], delivered + ahead)
    busy, silent = await beside_a_busy_stream(stage, engines, client)
    await only_the_silent_one_moved(client, busy, silent)
    (move,) = (await client.story((await silent).seq)).moves
    assert move.detect_ms is not None
    assert (move.detect_ms < 1_500) is ahead, "one that waits is let be, up to first_token_ms"


async def test_a_sequence_that_its_daemon_does_not_know_is_let_be(stage: Stage) -> None:
    """Unprotected, or not announced yet: that proves nothing."""
    engines = [await stage.engine(token_s=0.02), await stage.engine()]
    daemons = [await stage.daemon(), await stage.daemon()]
    for daemon in daemons:
        daemon.say(running=2, progress_age_ms=0)
    client = await stage.router(engines, daemons, timeouts={"stall_ms": 200, "first_token_ms": 1_500})
    busy, silent = await beside_a_busy_stream(stage, engines, client)
    await only_the_silent_one_moved(client, busy, silent)
    (move,) = (await client.story((await silent).seq)).moves
    assert move.detect_ms is not None
    assert move.detect_ms >= 1_450


async def test_engines_that_all_fall_silent_at_once_lose_no_stream(stage: Stage) -> None:
    """The router may be cut off: nobody is marked down, nothing is given up, new requests are still tried."""
    engines = [await stage.engine(token_s=0.02), await stage.engine(token_s=0.02)]
    timeouts = {"stall_ms": 1_000, "health_ms": 150, "failover_ms": 20_000}
    client = await stage.router(engines, timeouts=timeouts)
    stage.faults.extend([Fault("slow_first", delay_s=2.5), Fault("pause", SILENT_AFTER, delay_s=2.5)])
    for engine in engines:
        engine.probes_hang = True
    states = client.context.registry.engines
    await eventually(lambda: [e.health.state for e in states] == ["suspect"] * 2, "both are suspected")
    body = request(COMPLETIONS)
    asked = [
        asyncio.create_task(client.ask(COMPLETIONS, body, x_session_id=session_of(name))) for name in "ab"
    ]
    for asking in asked:
        answer = await asking
        assert_uninterrupted(answer, COMPLETIONS, body)
        assert (await client.story(answer.seq)).moves == ()
        assert [e.health.state for e in states if e.health.state == "down"] == []
    assert {e.health.failures for e in states} == {0}


async def test_one_engine_that_falls_silent_is_down_soon(stage: Stage) -> None:
    """The other one answers: so the router is not cut off."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines, timeouts={"failover_ms": 60_000})
    engines[0].probes_hang = True
    await eventually(lambda: client.context.registry["a"].health.state == "down", "it is seen")
    assert client.context.registry["b"].health.state == "up"


@pytest.mark.parametrize("with_daemons", [False, True], ids=["alone", "with daemons"])
async def test_a_router_that_was_paused_blames_nobody(
    stage: Stage, tmp_path: Path, with_daemons: bool
) -> None:
    """SIGSTOP for many times every time-out, then SIGCONT: each stream goes on where it is."""
    engines = [await stage.engine(token_s=0.06), await stage.engine(token_s=0.06)]
    for engine in engines:
        engine.probe_s = 0.2  # most of the time a probe is under way
    entries: list[dict[str, Any]] = [{"name": n, "url": e.url} for n, e in zip("ab", engines, strict=True)]
    if with_daemons:
        for entry in entries:
            daemon = await stage.daemon()
            daemon.say(running=1, progress_age_ms=0)
            entry["daemon"] = daemon.url
    timeouts = FAST | {"stall_ms": 1_000, "lone_stall_ms": 1_000, "first_token_ms": 1_500}
    config = tmp_path / "router.yaml"
    config.write_text(yaml.safe_dump({"listen": {"port": 0}, "engines": entries, "timeouts": timeouts}))
    process, url = await start_process(config)
    try:
        async with asyncio.timeout(3 * DEADLINE_S), aiohttp.ClientSession() as session:
            await until_ready(session, url)
            asked = [(path, request(path, max_tokens=LONG)) for path in (COMPLETIONS, CHAT) * 2]
            answers = [asyncio.create_task(read_answer(session, url + path, body)) for path, body in asked]
            seen = [engine.seen for engine in engines]
            await eventually(lambda: sum(map(len, seen)) == 4, "all have begun")
            await eventually(lambda: all(s.sent_tokens > 3 for each in seen for s in each), "all stream")
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            os.kill(process.pid, signal.SIGCONT)
            assert not any(s.finished for each in seen for s in each), "they go on after the pause"
            for (path, body), answer in zip(asked, await asyncio.gather(*answers), strict=True):
                assert_uninterrupted(answer, path, body)
            async with session.get(url + "/status") as response:
                status = msgspec.json.decode(await response.read(), type=RouterStatus)
    finally:
        process.kill()
        _, logged = await process.communicate()
    assert sum(map(len, seen)) == 4, "nothing was asked again elsewhere"
    assert (status.failovers, {(e.state, e.failures) for e in status.engines}) == (0, {("up", 0)})
    assert b"the router itself stood still" in logged
    assert b"engine is suspect" not in logged
    assert b"engine is down" not in logged

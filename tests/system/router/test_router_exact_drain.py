"""Planned moves of answers that are continued exactly: engines that are drained, routers that stop."""

from __future__ import annotations

import asyncio

import pytest

from segue_router.takeover import Takeover
from system.router.able import ALL, ELSEWHERE, PATHS, able, question
from system.router.exact_engine import ExactEngine
from system.router.fake_engine import Fault
from system.router.fake_tokens import generate, text_of
from system.router.harness import Client, Stage, eventually, session_of


async def test_drained_streams_move_before_the_old_engine_is_let_go(stage: Stage) -> None:
    """A planned move is the unplanned one, but for the order: the standby is promoted while the old engine
    still generates; it is not blamed, and the move does not count against the request."""
    engines, daemons = await able(stage, [ALL, ALL])
    for engine in engines:
        engine.token_s = 0.01
    for daemon in daemons:
        daemon.watermark = 1000
    router = await stage.router(engines, daemons, failover=ELSEWHERE | {"max_moves": 0})
    body = question(PATHS[0], max_tokens=40, stop=["zzz"])
    asked = asyncio.create_task(router.ask(PATHS[0], body, x_session_id=session_of("a")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    moved = await drain(router, "a")
    answer = await asked
    _, output, _ = generate(PATHS[0], body)
    assert moved == 1
    assert answer.done
    assert answer.text == text_of(output)
    assert daemons[1].promoted
    assert (await router.status()).failovers == 0
    assert router.context.registry["a"].health.state == "up"
    (move,) = (await router.story(answer.seq)).moves
    assert (move.how, move.detected_by) == ("exact", "drained")
    await eventually(lambda: engines[0].seen[0].gone.is_set(), "the old engine is let go")


async def drain(router: Client, name: str) -> int:
    """Ask every stream on the engine to move; returns how many do."""
    engine = router.context.registry[name]
    engine.draining = True
    running = [each for each in router.context.running if each.is_on(engine)]
    return sum(await asyncio.gather(*(each.move_away(engine) for each in running)))


async def test_a_stream_that_nobody_could_continue_stays(stage: Stage) -> None:
    """A drain must not break what a crash would have broken."""
    engines, daemons = await able(stage, [(), ()])
    engines[0].token_s = engines[1].token_s = 0.01
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    body = question(PATHS[0], temperature=1, seed=9)
    asked = asyncio.create_task(router.ask(PATHS[0], body, x_session_id=session_of("a")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    assert await drain(router, "a") == 0
    answer = await asked
    assert answer.done
    assert engines[1].seen == []


async def test_a_drained_answer_goes_where_its_replica_is(stage: Stage) -> None:
    """Of two standbys the one that holds its KV, not the first."""
    engines, daemons = await able(stage, [ALL, ALL, ALL])
    engines[0].token_s = 0.01
    daemons[2].watermark = 1000
    router = await stage.router(engines, daemons)
    body = question(PATHS[0], max_tokens=60)
    asked = asyncio.create_task(router.ask(PATHS[0], body, x_session_id=session_of("a", "abc")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    assert await drain(router, "a") == 1
    answer = await asked
    (move,) = (await router.story(answer.seq)).moves
    assert (answer.done, move.to) == (True, "c")


async def test_an_answer_that_loses_its_way_out_stays(stage: Stage) -> None:
    """The standby is drained too, while the first one's answer waits for its replica."""
    engines, daemons = await able(stage, [ALL, ALL])
    engines[0].token_s = 0.01
    router = await stage.router(engines, daemons)
    body = question(PATHS[0], stop=["zzz"], max_tokens=200)
    asked = asyncio.create_task(router.ask(PATHS[0], body, x_session_id=session_of("a")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    before = len(daemons[1].asked)
    moving = asyncio.create_task(drain(router, "a"))
    await eventually(lambda: len(daemons[1].asked) > before + 1, "it asks for its replica, and asks again")
    router.context.registry["b"].draining = True
    assert await moving == 0
    answer = await asked
    assert (answer.done, answer.error) == (True, None)
    assert (await router.story(answer.seq)).moves == ()


async def test_an_answer_goes_back_to_a_drained_engine_rather_than_end(stage: Stage) -> None:
    """It has moved, and its new engine dies; the old one is still there, and well."""
    engines, daemons = await able(stage, [ALL, ALL])
    for engine in engines:
        engine.token_s = 0.01
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    for daemon in daemons:
        daemon.watermark = 1000
    body = question(PATHS[0], stop=["zzz"], max_tokens=80)
    asked = asyncio.create_task(router.ask(PATHS[0], body, x_session_id=session_of("a")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    assert await drain(router, "a") == 1
    await eventually(lambda: engines[1].seen and engines[1].seen[0].sent_tokens > 3, "it goes on")
    await engines[1].kill()
    answer = await asked
    _, output, _ = generate(PATHS[0], body)
    assert (answer.done, answer.text) == (True, text_of(output))
    assert [move.to for move in (await router.story(answer.seq)).moves] == ["b", "a"]
    asked_anew = await router.ask(PATHS[0], body, x_session_id=session_of("a"))
    assert asked_anew.status == 503, "but nothing new goes there"


async def test_a_move_is_over_when_its_answer_is(stage: Stage) -> None:
    """Nobody waits for the replica of an answer that has ended: others wait for that place."""
    engines, daemons = await able(stage, [ALL, ALL])
    engines[0].token_s = 0.01
    router = await stage.router(engines, daemons, timeouts={"failover_ms": 60_000})
    asked = asyncio.create_task(router.ask(PATHS[0], question(PATHS[0]), x_session_id=session_of("a")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    async with asyncio.timeout(5):
        assert await drain(router, "a") == 0
    assert (await asked).done


async def test_a_drain_leaves_alone_what_no_other_engine_could_hold(stage: Stage) -> None:
    """The other one is well, but has another model behind the name: no answer is even stopped for it."""
    engines = [ExactEngine(stage.faults), ExactEngine(stage.faults)]
    for engine, root in zip(engines, ("one", "two"), strict=True):
        engine.cards = [engine.cards[0] | {"root": root}]
        engine.token_s = 0.01
        await engine.start()
        stage.stack.push_async_callback(engine.stop)
    router = await stage.router([*engines])
    asked = asyncio.create_task(
        router.ask(PATHS[0], question(PATHS[0], max_tokens=60), x_session_id=session_of("a"))
    )
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    assert await drain(router, "a") == 0
    answer = await asked
    assert answer.done
    assert (await router.story(answer.seq)).moves == ()


async def test_an_answer_between_two_engines_hears_that_the_router_stops(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine is left that could be told to give it up."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)

    async def cut_off(*_: object) -> None:
        router.context.cutting_off = True
        for request in tuple(router.context.running):
            request.stop()

    monkeypatch.setattr(Takeover, "promote", cut_off)
    stage.faults.append(Fault("die", after=5))
    answer = await router.ask(PATHS[0], question(PATHS[0]))
    assert answer.error is not None
    assert (answer.done, answer.error["code"]) == (False, "router_stopping")


async def test_a_drained_engine_gets_its_second_chance(stage: Stage) -> None:
    """Nobody else could go on with its answer, so it stayed; when its connection breaks, it goes on there."""
    engines, daemons = await able(stage, [ALL, ()])
    engines[0].token_s = 0.01
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=15))
    body = question(PATHS[0], stop=["zzz"])
    asked = asyncio.create_task(router.ask(PATHS[0], body, x_session_id=session_of("a")))
    await eventually(lambda: engines[0].seen and engines[0].seen[0].sent_tokens > 3, "it generates")
    assert await drain(router, "a") == 0
    answer = await asked
    _, output, _ = generate(PATHS[0], body)
    assert (answer.done, answer.text) == (True, text_of(output))

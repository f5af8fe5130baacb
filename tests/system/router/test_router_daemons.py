"""Failover with daemons: what they say is believed, fenced and used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from segue_router.daemons import settle
from system.router.asked import COMPLETIONS, assert_uninterrupted, request
from system.router.fake_daemon import FakeDaemon
from system.router.fake_engine import FakeEngine, Fault
from system.router.harness import Client, Stage, eventually


async def three(stage: Stage, **settings: Any) -> tuple[list[FakeEngine], list[FakeDaemon], Client]:
    engines = [await stage.engine() for _ in range(3)]
    daemons = [await stage.daemon() for _ in range(3)]
    return engines, daemons, await stage.router(engines, daemons, **settings)


async def begin(
    client: Client, engines: list[FakeEngine], body: dict[str, Any]
) -> tuple[asyncio.Task[Any], int]:
    """Ask, and tell on which engine the answer began."""
    asking = asyncio.create_task(client.ask(COMPLETIONS, body))
    await eventually(lambda: any(engine.seen for engine in engines), "an engine has the request")
    return asking, next(i for i, engine in enumerate(engines) if engine.seen)


async def test_the_freshest_replica_is_chosen_and_fenced(stage: Stage) -> None:
    """The standby that holds the most takes over with a higher epoch; the old owner's daemon is fenced."""
    engines, daemons, client = await three(stage)
    stage.faults.append(Fault("error_event", 10))
    body = request(COMPLETIONS)
    for daemon, held in zip(daemons, (12, 20, 15), strict=True):
        daemon.watermark = held
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    (move,) = (await client.story(answer.seq)).moves
    first = next(i for i, e in enumerate(engines) if e.seen and not e.seen[0].finished)
    others = [i for i in range(3) if i != first]
    best = max(others, key=lambda i: daemons[i].watermark)
    assert engines[best].seen
    ((seq, promote),) = daemons[best].promoted
    resumed = engines[best].seen[0].body
    want = len(resumed["prompt"]) - 1
    assert (seq, promote.epoch, promote.want_tokens) == (answer.seq, 2, want)
    assert move.watermark == min(daemons[best].watermark, want)
    assert resumed["kv_transfer_params"] == {"segue": {"seq": answer.seq, "epoch": 2, "resume": True}}
    await eventually(lambda: daemons[first].fenced == [(answer.seq, 2)], "the old owner is fenced")
    started = engines[first].seen[0].body["kv_transfer_params"]
    assert started == {"segue": {"seq": answer.seq, "epoch": 1}}


async def test_the_clients_own_transfer_params_are_kept(stage: Stage) -> None:
    """Keys beside Segue's stay."""
    engines, _, client = await three(stage)
    await client.ask(COMPLETIONS, request(COMPLETIONS, kv_transfer_params={"mine": 1}))
    seen = next(e.seen[0] for e in engines if e.seen)
    assert seen.body["kv_transfer_params"]["mine"] == 1
    assert seen.body["kv_transfer_params"]["segue"]["epoch"] == 1


async def test_the_answers_of_a_failed_engine_do_not_all_go_to_one_other(stage: Stage) -> None:
    """They choose at the same moment, while each other's next engines are still being promoted."""
    engines, daemons, client = await three(stage)
    stage.faults.extend(Fault("silent", 5) for _ in range(18))
    body = request(COMPLETIONS)
    asking = [asyncio.create_task(client.ask(COMPLETIONS, body)) for _ in range(18)]
    await eventually(
        lambda: [sum(seen.sent_tokens == 5 for seen in engine.seen) for engine in engines] == [6, 6, 6],
        "all have begun, and stand still",
    )
    daemons[0].say(state="dead")
    await eventually(lambda: sum(len(engine.seen) for engine in engines[1:]) == 18, "they go on")
    assert [len(engine.seen) for engine in engines[1:]] == [9, 9]
    assert not any(engine.expected for engine in client.context.registry.engines)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize(("state", "cause"), [("dead", "daemon_dead"), ("stalled", "stalled")])
async def test_a_daemons_word_moves_streams_at_once(stage: Stage, state: str, cause: str) -> None:
    """The engine's connection is still open: its daemon's word is enough, long before the stall time-out."""
    engines, daemons, client = await three(stage, timeouts={"stall_ms": 60_000})
    stage.faults.append(Fault("silent", 5))
    body = request(COMPLETIONS)
    asking, first = await begin(client, engines, body)
    daemons[first].say(state=state)
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    (move,) = (await client.story(answer.seq)).moves
    assert move.detected_by == cause
    assert move.detect_ms is not None
    assert move.detect_ms < 3_000
    await asyncio.wait_for(engines[first].seen[0].gone.wait(), 5)
    states = {e.name: e.state for e in (await client.status()).engines}
    assert states["abc"[first]] == "down"
    daemons[first].say(state="running", incarnation=2)
    await eventually(
        lambda: client.context.registry["abc"[first]].health.state == "up", "it comes back with its new life"
    )


async def test_a_new_incarnation_ends_the_streams_of_the_old(stage: Stage) -> None:
    """The process was restarted behind an open connection."""
    engines, daemons, client = await three(stage, timeouts={"stall_ms": 60_000})
    stage.faults.append(Fault("silent", 5))
    body = request(COMPLETIONS)
    asking, first = await begin(client, engines, body)
    daemons[first].say(incarnation=7)
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves[0].detected_by == "daemon_dead"


async def test_silence_is_waited_out_while_the_daemon_sees_progress(stage: Stage) -> None:
    """A long prefill of somebody else is not a failure; no progress is."""
    engines, daemons, client = await three(stage, timeouts={"stall_ms": 200})
    for daemon in daemons:
        daemon.say(running=1, progress_age_ms=0)
    stage.faults.append(Fault("silent", 5))
    body = request(COMPLETIONS)
    asking, first = await begin(client, engines, body)
    done, _ = await asyncio.wait({asking}, timeout=0.8)
    assert not done, "it was moved although its engine progresses"
    daemons[first].say(progress_age_ms=500)
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves[0].detected_by == "stalled"


async def test_a_bare_reset_is_retried_on_the_same_engine_once(stage: Stage) -> None:
    """Its process is alive, and so is its KV: ask it again, but not twice."""
    engines, daemons, client = await three(stage)
    stage.faults.append(Fault("die", 6))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    (move,) = (await client.story(answer.seq)).moves
    assert move.from_engine == move.to
    ((_, promote),) = (each for daemon in daemons for each in daemon.promoted)
    assert promote.wait_ms == 0, "nobody ships to a daemon what its own engine has"
    for engine in engines:
        engine.seen.clear()
    stage.faults.extend([Fault("die", 6), Fault("die", 3)])
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    moves = (await client.story(answer.seq)).moves
    assert [m.from_engine == m.to for m in moves] == [True, False]


async def test_connections_that_break_again_do_not_use_up_the_only_engine(stage: Stage) -> None:
    """An engine that is well is not left out for what the network did to it: nobody waits beside it."""
    engine, daemon = await stage.engine(), await stage.daemon()
    client = await stage.router([engine], [daemon], failover={"max_moves": 5})
    stage.faults.extend([Fault("die", 6), Fault("die", 3), Fault("die", 2)])
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert len((await client.story(answer.seq)).moves) == 3


async def test_a_killed_engine_is_not_retried(stage: Stage) -> None:
    """Its daemon has not noticed yet, but nothing listens at the engine any more."""
    engines, _, client = await three(stage)
    for engine in engines:
        engine.token_s = 0.01
    body = request(COMPLETIONS)
    asking, first = await begin(client, engines, body)
    await eventually(lambda: engines[first].seen[0].sent_tokens >= 3, "the answer has begun")
    await engines[first].kill()
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    moves = (await client.story(answer.seq)).moves
    assert [m.to for m in moves] != ["abc"[first]]
    assert len(moves) == 1


async def test_superseded_epochs_are_overtaken(stage: Stage) -> None:
    """Somebody promoted higher: the router goes above."""
    engines, daemons, client = await three(stage)
    engines[0].token_s = engines[1].token_s = engines[2].token_s = 0.01
    body = request(COMPLETIONS, max_tokens=12)
    stage.faults.append(Fault("error_event", 8))
    asking, first = await begin(client, engines, body)
    (generation,) = client.context.running
    for daemon in daemons:
        daemon.watermark = 5
        daemon.epochs[generation._seq] = 40  # type: ignore[attr-defined]
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    second = next(e for i, e in enumerate(engines) if i != first and e.seen)
    assert second.seen[0].body["kv_transfer_params"]["segue"]["epoch"] == 41


async def test_the_engine_that_goes_on_is_promoted_although_another_was_busy(stage: Stage) -> None:
    """The first standby answers 503: the daemon of the second one is asked and fenced all the same."""
    engines, daemons, client = await three(stage)
    for daemon in daemons:
        daemon.watermark = 15
    stage.faults.extend([Fault("error_event", 8), Fault("status", status=503)])
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    last = next(i for i, engine in enumerate(engines) if engine.seen and engine.seen[-1].finished)
    ((seq, promote),) = daemons[last].promoted
    assert (seq, promote.epoch) == (answer.seq, 2)


async def test_an_engine_without_shim_serves_although_its_daemon_remembers_a_dead_one(stage: Stage) -> None:
    """It was restarted unprotected: the daemon says "dead" for ever, the engine answers."""
    engine, daemon = await stage.engine(), await stage.daemon()
    client = await stage.router([engine], [daemon])
    health = client.context.registry["a"].health
    daemon.say(state="dead", exact=("output",))
    await eventually(lambda: health.state == "down", "dead is believed")
    await eventually(lambda: health.state == "up", "what answers is used")
    assert client.context.registry["a"].exact == frozenset(), "what the dead one could do is no promise"
    body = request(COMPLETIONS)
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)
    assert health.daemon_state == "dead"
    daemon.say(state="running", incarnation=2)
    daemon.say(state="dead", incarnation=2)
    await eventually(lambda: health.state == "down", "a new death is believed again")


async def test_fences_under_way_are_not_lost_when_the_router_stops() -> None:
    """They get a moment to arrive; what hangs does not hold the router up."""
    answers = {name: asyncio.Event() for name in ("slow", "hung")}
    arrived = []

    async def fence(daemon: str) -> bool:
        await answers[daemon].wait()
        arrived.append(daemon)
        return True

    tasks = {asyncio.create_task(fence(daemon)) for daemon in answers}
    stopping = asyncio.create_task(settle(tasks))
    await asyncio.sleep(0)  # now it waits for them
    answers["slow"].set()
    await asyncio.wait_for(stopping, 5)
    assert arrived == ["slow"]
    assert all(task.done() for task in tasks)


async def test_silent_daemons_cost_time_but_no_answer(stage: Stage) -> None:
    """All daemons are gone: the request is replayed."""
    _, daemons, client = await three(stage)
    for daemon in daemons:
        await daemon.stop()
    stage.faults.append(Fault("error_event", 6))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves[0].watermark == 0


async def test_a_daemon_is_watched_again_after_it_was_gone(stage: Stage) -> None:
    """Its absence changes nothing; when it is back, it is believed again."""
    engine = await stage.engine()
    daemon = await stage.daemon()
    client = await stage.router([engine], [daemon])
    health = client.context.registry["a"].health
    daemon.say(state="dead")
    await eventually(lambda: health.state == "down", "dead is believed")
    daemon.say(state="running", incarnation=2)
    await eventually(lambda: health.state == "up", "running is believed")

"""What is a failure and whose: clients that leave, requests that are refused, engines busy or slow."""

from __future__ import annotations

import asyncio

import pytest

from segue_router.choose import Candidate, rank_new
from system.router.asked import CHAT, COMPLETIONS, all_up, assert_uninterrupted, request
from system.router.fake_engine import Fault
from system.router.harness import Stage, eventually, session_of


async def test_a_long_prefill_is_not_a_failure(stage: Stage) -> None:
    """Before the first token, the stall time-out does not apply."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    stage.faults.append(Fault("slow_first", delay_s=0.8))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves == ()


async def test_a_client_that_leaves_stops_the_engine(stage: Stage) -> None:
    """Also while it waits for another engine: nothing keeps generating, nothing stays active."""
    engines = [await stage.engine(token_s=0.01), await stage.engine(token_s=0.01)]
    client = await stage.router(engines, timeouts={"failover_ms": 60_000})
    response = await client.session.post(client.url + COMPLETIONS, json=request(COMPLETIONS, max_tokens=400))
    await response.content.readany()
    response.close()
    seen = next(s for e in engines for s in e.seen)
    await asyncio.wait_for(seen.gone.wait(), 5)
    assert seen.aborted
    await eventually(lambda: not client.context.running, "nothing is active")
    assert (await client.story(response.headers["x-segue-seq"])).outcome == "client_left"
    await engines[0].stop()
    await engines[1].stop()


async def test_a_client_that_leaves_while_nobody_can_take_over(stage: Stage) -> None:
    """The wait for an engine ends with the client."""
    engine = await stage.engine()
    client = await stage.router([engine], timeouts={"failover_ms": 60_000})
    stage.faults.extend([Fault("error_event", 3), Fault("error_event", 3)])
    response = await client.session.post(client.url + COMPLETIONS, json=request(COMPLETIONS))
    await response.content.readany()
    await eventually(lambda: len(engine.seen) == 2 and not engine.faults, "both attempts failed")
    response.close()
    await eventually(lambda: not client.context.running, "nothing is active")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_is_passed_over_unharmed(stage: Stage, status: int) -> None:
    """429 and 503 before the first byte: another engine serves it, and nobody is marked down."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault("status", status=status))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert {e.state for e in (await client.status()).engines} == {"up"}
    assert (await client.story(answer.seq)).moves == ()
    stage.faults.extend([Fault("status", status=status)] * 2)
    answer = await client.ask(COMPLETIONS, body)
    assert answer.status == status
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_clients_error_says_nothing_about_an_engine(stage: Stage, stream: bool) -> None:
    """4xx goes to the client as it is; the engine stays up and no other is bothered."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    for fault in (Fault("status", status=400), Fault("client_fault")):
        stage.faults.append(fault)
        answer = await client.ask(COMPLETIONS, request(COMPLETIONS, stream=stream))
        assert answer.status == 400
        assert answer.body["error"]["code"] == 400
    assert {e.state for e in (await client.status()).engines} == {"up"}
    assert {e.failures for e in (await client.status()).engines} == {0}
    assert sum(len(engine.seen) for engine in engines) == 2


async def test_a_resumed_request_that_is_refused_harms_no_engine(stage: Stage) -> None:
    """4xx to what the router made of the request: one in-band error; the fleet is not walked."""
    engines = [await stage.engine() for _ in range(3)]
    client = await stage.router(engines, timeouts={"health_interval_ms": 60_000})
    stage.faults.extend([Fault("error_event", 5), Fault("status", status=400)])
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS))
    assert answer.error is not None
    assert answer.error["code"] == "cannot_resume_rejected"
    assert not answer.done
    assert sum(e.failures for e in (await client.status()).engines) == 1, "only the first one failed"
    assert sum(len(engine.seen) for engine in engines) == 2


async def test_a_clients_error_after_content_ends_the_stream_there(stage: Stage) -> None:
    """In-band 4xx: passed on once, what came before it is kept, no engine is blamed or asked."""
    engines = [await stage.engine() for _ in range(3)]
    client = await stage.router(engines)
    stage.faults.append(Fault("client_fault", 5))
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS))
    assert answer.error is not None
    assert answer.error["code"] == 400
    assert answer.text
    assert not answer.done
    assert sum(e.failures for e in (await client.status()).engines) == 0
    assert sum(len(engine.seen) for engine in engines) == 1


async def test_a_long_prefill_after_the_preamble_is_not_a_failure(stage: Stage) -> None:
    """The role comes at once, the first token long after stall_ms: the prompt is still being computed."""
    client = await stage.router(
        [await stage.engine(), await stage.engine()], timeouts={"first_token_ms": 1_500}
    )
    stage.faults.append(Fault("silent", events=1))
    body = request(CHAT)
    answer = await client.ask(CHAT, body)
    assert_uninterrupted(answer, CHAT, body)
    (move,) = (await client.story(answer.seq)).moves
    assert move.detect_ms is not None
    assert move.detect_ms >= 1_400, "stall_ms is 300"


async def test_a_request_that_queues_too_long_does_not_bring_its_engine_down(stage: Stage) -> None:
    """It is moved; the engine that streams to others goes on serving."""
    engines = [await stage.engine(token_s=0.02), await stage.engine()]
    client = await stage.router(engines, timeouts={"first_token_ms": 500})
    home = session_of("a")
    long = request(COMPLETIONS, max_tokens=100)
    busy = asyncio.create_task(client.ask(COMPLETIONS, long, x_session_id=home))
    await eventually(lambda: engines[0].seen, "a streams")
    stage.faults.append(Fault("slow_first", delay_s=30))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body, x_session_id=home)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert [move.detected_by for move in (await client.story(answer.seq)).moves] == ["stalled"]
    assert client.context.registry["a"].health.state == "up"
    assert_uninterrupted(await busy, COMPLETIONS, long)


async def test_a_request_that_was_lost_once_is_waited_for_as_any_other(stage: Stage) -> None:
    """A died before its first token, B refuses: the client still waits up to failover_ms."""
    engines = [await stage.engine(), await stage.engine()]
    timeouts = {"failover_ms": 5_000, "health_interval_ms": 60_000}
    client = await stage.router(engines, timeouts=timeouts)
    first = rank_new([Candidate("a"), Candidate("b")], "")[0]
    other = engines[1] if first == "a" else engines[0]
    port = other.port
    await other.stop()
    stage.faults.append(Fault("die", 0))
    body = request(COMPLETIONS)
    asking = asyncio.create_task(client.ask(COMPLETIONS, body))
    await eventually(lambda: client.context.registry["ab".replace(first, "")].health.failures, "B refused")
    await other.start(port)
    for engine in client.context.registry.engines:
        engine.look.set()
    assert_uninterrupted(await asking, COMPLETIONS, body)


async def test_a_server_error_before_the_first_byte_moves(stage: Stage) -> None:
    """500 from one engine: another one answers."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault("status", status=500))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert [m.detected_by for m in (await client.story(answer.seq)).moves] == ["http_status"]


async def test_opting_out_and_limits(stage: Stage) -> None:
    """`x-segue-failover: off` and max_moves are kept."""
    client = await stage.router([await stage.engine(), await stage.engine()], failover={"max_moves": 1})
    stage.faults.append(Fault("die", 3))
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS), x_segue_failover="off")
    assert answer.error is not None
    assert not answer.done
    await all_up(client)
    stage.faults.extend([Fault("die", 3), Fault("die", 3)])
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS))
    assert answer.error is not None
    assert len((await client.story(answer.seq)).moves) == 1


async def test_a_refused_connection_goes_elsewhere_and_is_remembered(stage: Stage) -> None:
    """An engine that is gone costs one request one connection, the next ones none."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines, timeouts={"health_interval_ms": 60_000})
    await engines[0].stop()
    body = request(COMPLETIONS)
    for _ in range(4):
        assert_uninterrupted(
            await client.ask(COMPLETIONS, body, x_session_id=session_of("a")), COMPLETIONS, body
        )
    assert len(engines[1].seen) == 4
    assert client.context.registry["a"].health.failures == 1, "it was asked again"

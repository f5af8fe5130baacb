"""Emptying an engine: live answers go on elsewhere, nothing new comes, and whoever asked is told."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from segue_core.messages.status import DrainProgress
from segue_ctl.cli import main
from system.router.asked import CHAT, COMPLETIONS, assert_uninterrupted, request
from system.router.fake_engine import FakeEngine, Fault
from system.router.harness import DEADLINE_S, Answer, Client, Stage, eventually, session_of

LONG = 150


async def drain(client: Client, query: str, **options: Any) -> tuple[int, list[DrainProgress]]:
    """What `POST /drain` answers, line by line, until it ends."""
    async with (
        asyncio.timeout(DEADLINE_S),
        client.session.post(f"{client.url}/drain{query}", **options) as response,
    ):
        lines = (await response.read()).splitlines()
        return response.status, [msgspec.json.decode(line, type=DrainProgress) for line in lines]


async def two(stage: Stage, **settings: Any) -> tuple[list[FakeEngine], Client]:
    engines = [await stage.engine(token_s=0.005), await stage.engine(token_s=0.005)]
    return engines, await stage.router(engines, **settings)


async def begin(
    client: Client, engine: FakeEngine, path: str, body: dict[str, Any], **headers: str
) -> asyncio.Task[Answer]:
    """Ask; returns when `engine` (a) has said some of the answer."""
    before = len(engine.seen)
    headers["x_session_id"] = session_of("a")
    asking = asyncio.create_task(client.ask(path, body, **headers))
    await eventually(
        lambda: len(engine.seen) > before and engine.seen[before].sent_tokens > 3, "the answer has begun"
    )
    return asking


async def test_a_drained_engine_loses_no_answer_and_gets_no_new_one(stage: Stage) -> None:
    """Each stream goes on at the other engine as if nothing had happened, and nobody is blamed."""
    engines, client = await two(stage)
    asked = []
    for path in (COMPLETIONS, CHAT, COMPLETIONS):
        body = request(path, max_tokens=LONG)
        asked.append((path, body, await begin(client, engines[0], path, body)))
    status, lines = await drain(client, "?engine=a")
    assert status == 200
    assert lines[0].active == 3
    assert lines[-1] == DrainProgress("a", active=0, moved=3, staying=0, done=True)
    for path, body, asking in asked:
        answer = await asking
        assert_uninterrupted(answer, path, body)
        (move,) = (await client.story(answer.seq)).moves
        assert (move.from_engine, move.to, move.detected_by) == ("a", "b", "drained")
    for seen in engines[0].seen:
        await asyncio.wait_for(seen.gone.wait(), DEADLINE_S)
        assert seen.aborted, "the drained engine does not go on generating"
    body = request(COMPLETIONS, max_tokens=2)
    assert_uninterrupted(await client.ask(COMPLETIONS, body, x_session_id=session_of("a")), COMPLETIONS, body)
    assert len(engines[0].seen) == 3, "its sessions go elsewhere"
    shown = {engine.name: engine for engine in (await client.status()).engines}
    assert (shown["a"].draining, shown["a"].state, shown["a"].failures) == (True, "up", 0)
    assert not shown["b"].draining
    assert 'segue_router_engine_draining{engine="a"} 1.0' in await client.metrics()
    async with client.session.post(f"{client.url}/undrain?engine=a") as response:
        assert (await response.json())["draining"] is False
    await client.ask(COMPLETIONS, body, x_session_id=session_of("a"))
    assert len(engines[0].seen) == 3, "what went on elsewhere stays where its last turn is"
    other = session_of("a", number=1)
    assert_uninterrupted(await client.ask(COMPLETIONS, body, x_session_id=other), COMPLETIONS, body)
    assert len(engines[0].seen) == 4


async def test_what_cannot_be_moved_is_waited_for_until_the_deadline(stage: Stage) -> None:
    """A client that opted out of moving keeps its stream; the call says what is left, and goes on later."""
    engines, client = await two(stage, drain={"retry_ms": 50})
    body = request(COMPLETIONS, max_tokens=LONG)
    asking = await begin(client, engines[0], COMPLETIONS, body, x_segue_failover="off")
    _, lines = await drain(client, "?engine=a&timeout_ms=200")
    assert (lines[-1].active, lines[-1].staying, lines[-1].done) == (1, 1, False)
    assert "not empty within 0.2 s" in lines[-1].detail
    _, lines = await drain(client, "", json={"engine": "a"})
    assert lines[-1].done
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves == ()


async def test_a_passed_through_request_is_waited_for(stage: Stage) -> None:
    """The router never read it: it ends where it began."""
    engines, client = await two(stage)
    engines[0].hold.clear()
    held = asyncio.create_task(client.ask("/v1/held", {"model": "fake"}, x_session_id=session_of("a")))
    await eventually(lambda: client.context.registry["a"].attempts, "it runs")
    _, lines = await drain(client, "?engine=a&wait=false")
    assert [line.active for line in lines] == [1]
    draining = asyncio.create_task(drain(client, "?engine=a"))
    engines[0].hold.set()
    assert (await held).status == 200
    assert (await draining)[1][-1].done


async def test_with_every_engine_draining_new_requests_are_refused_clearly(stage: Stage) -> None:
    """Streams that run stay and end well; a load balancer in front sees that nothing more is taken."""
    engines, client = await two(stage)
    body = request(COMPLETIONS, max_tokens=LONG)
    asking = await begin(client, engines[0], COMPLETIONS, body)
    for name in "ba":
        await drain(client, f"?engine={name}&wait=false")
    for path, asked in ((COMPLETIONS, body), ("/v1/embeddings", {"model": "fake"}), ("/v1/messages", {})):
        answer = await client.ask(path, asked)
        assert answer.status == 503
        assert "seguectl undrain" in answer.body["error"]["message"]
    status, said = await client.get("/readyz")
    assert (status, said["error"]) == (503, "every engine is being drained")
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves == ()


async def test_who_stops_watching_does_not_stop_the_drain(stage: Stage) -> None:
    """The operator's connection breaks: the engine is emptied all the same."""
    engines, client = await two(stage)
    slow = Fault("silent", 5)
    stage.faults.append(slow)
    asking = await begin(
        client, engines[0], COMPLETIONS, request(COMPLETIONS, max_tokens=LONG), x_segue_failover="off"
    )
    response = await client.session.post(f"{client.url}/drain?engine=a")
    await response.content.readline()
    response.close()
    assert (await asking).error is not None, "the silent stream ended in an error"
    assert client.context.registry["a"].draining
    assert (await drain(client, "?engine=a"))[1][-1].done


@pytest.mark.parametrize(
    ("query", "options", "status", "says"),
    [
        ("?engine=nobody", {}, 404, "engines: a, b"),
        ("", {}, 400, "?engine=NAME"),
        ("", {"data": b"[1]"}, 400, "?engine=NAME"),
        ("?engine=a&wait=maybe", {}, 400, "true or false"),
        ("?engine=a&timeout_ms=-1", {}, 400, "timeout_ms"),
        ("", {"data": b'{"engine": "' + b"x" * 9_000}, 413, "larger than"),
    ],
)
async def test_mistakes_are_explained_and_drain_nothing(
    stage: Stage, query: str, options: dict[str, Any], status: int, says: str
) -> None:
    """An operator reads what was expected."""
    _, client = await two(stage)
    async with client.session.post(f"{client.url}/drain{query}", **options) as response:
        said = await response.json()
    assert response.status == status
    assert says in said["error"] + said["hint"]
    assert not any(engine.draining for engine in client.context.registry.engines)


async def test_seguectl_drains_and_lets_serve_again(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way from the command line, while answers run."""
    engines, client = await two(stage)
    body = request(COMPLETIONS, max_tokens=LONG)
    asking = await begin(client, engines[0], COMPLETIONS, body)
    code = await asyncio.to_thread(main, ["drain", "a", "--router", client.url, "--timeout", "8"])
    assert code == 0
    assert "a: empty, 1 moved\n" in capsys.readouterr().out
    await asyncio.to_thread(main, ["status", client.url])
    assert "up, draining" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["undrain", "a", "--router", client.url]) == 0
    assert "a: up, serves again\n" in capsys.readouterr().out
    assert_uninterrupted(await asking, COMPLETIONS, body)


async def test_an_engine_is_not_empty_while_an_answer_is_on_its_way_there(stage: Stage) -> None:
    """It was chosen before the drain: who stops the engine at `done` would break it."""
    engines = [await stage.engine(), await stage.engine()]
    daemons = [await stage.daemon(), await stage.daemon()]
    client = await stage.router(engines, daemons, timeouts={"probe_ms": 10_000})
    stage.faults.append(Fault("silent", 5))
    body = request(COMPLETIONS)
    asking = await begin(client, engines[0], COMPLETIONS, body)
    daemons[1].promotes.clear()
    daemons[0].say(state="dead")
    await eventually(lambda: daemons[1].promoted, "the standby is being promoted")
    _, (progress,) = await drain(client, "?engine=b&wait=false")
    assert (progress.active, progress.done) == (1, False)
    daemons[1].promotes.set()
    assert_uninterrupted(await asking, COMPLETIONS, body)
    _, lines = await drain(client, "?engine=b")
    assert lines[-1].done

"""Requests that the router passes through without reading them: honest in their own API's words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from system.router.fake_engine import Fault
from system.router.foreign_events import FOREIGN
from system.router.harness import Client, Stage, eventually, session_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODY = {"model": "fake", "stream": True}


async def stream(client: Client, path: str, **headers: str) -> list[tuple[str, dict[str, Any]]]:
    """The events (name, data) of a stream that ends in order, as far as HTTP can tell."""
    async with (
        asyncio.timeout(10),
        client.session.post(client.url + path, json=BODY, headers=headers) as answer,
    ):
        assert answer.status == 200
        raw = (await answer.read()).decode()
    assert raw.endswith("\n\n")
    found = []
    for part in raw.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_whole_stream_is_passed_on_as_it_is(stage: Stage, path: str) -> None:
    """Every event, and nothing beside them."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    assert await stream(client, path) == [(event["type"], event) for event in FOREIGN[path]]
    stage.faults.append(Fault("die", after=10))
    assert [event for _, event in await stream(client, path)] == FOREIGN[path], "it broke after its end"


@pytest.mark.parametrize("kind", ["die", "half_chunk", "eof"])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_stream_that_breaks_ends_in_an_error_of_its_own_api(
    stage: Stage, path: str, kind: str
) -> None:
    """Whole events up to the break, then one error; also where the engine just stops in good order."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault(kind, after=4))
    *before, (name, last) = await stream(client, path)
    assert [event for _, event in before] == FOREIGN[path][:4]
    assert (name, last["type"]) == ("error", "error")
    if path == RESPONSES:
        assert (last["code"], last["sequence_number"], last["param"]) == ("stream_eof", 4, None)
        assert last["message"].startswith("the engine failed: ")
    else:
        assert last["error"]["type"] == "api_error"
        assert last["error"]["message"].startswith("the engine failed: ")


async def test_the_official_client_of_the_responses_api_sees_the_error(stage: Stage) -> None:
    """As an event of its own type; its helper never reports a finished response."""
    openai = pytest.importorskip("openai")
    client = await stage.router([await stage.engine()])
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as official:
        stage.faults.append(Fault("half_chunk", after=4))
        events = [e async for e in await official.responses.create(model="fake", input="x", stream=True)]
        assert events[-1].type == "error"
        assert (events[-1].code, events[-1].sequence_number) == ("stream_eof", 4)
        await client.up("a")
        stage.faults.append(Fault("half_chunk", after=1))
        async with official.responses.stream(model="fake", input="x") as helper:
            assert [event.type async for event in helper] == ["response.created", "error"]
            with pytest.raises(RuntimeError, match=r"response\.completed"):
                await helper.get_final_response()


async def test_the_official_client_of_the_messages_api_raises_the_error(stage: Stage) -> None:
    """In the middle of the stream, and before it, each with its type."""
    anthropic = pytest.importorskip("anthropic")
    engine = await stage.engine()
    client = await stage.router([engine])
    asked = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0) as official:
        stage.faults.append(Fault("half_chunk", after=4))
        events = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for event in await official.messages.create(**asked):
                events.append(event.type)
        assert events == [event["type"] for event in FOREIGN[MESSAGES][:4]]
        assert caught.value.body["error"]["type"] == "api_error"
        await engine.stop()
        await eventually(lambda: not client.context.registry.ready, "it is seen")
        with pytest.raises(anthropic.APIStatusError) as caught:
            await official.messages.create(**asked)
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(("path", "kind"), [(RESPONSES, "server_error"), (MESSAGES, "overloaded_error")])
async def test_before_the_first_byte_errors_have_the_form_of_the_api(
    stage: Stage, path: str, kind: str
) -> None:
    """No engine, too much load, too large: whatever the router itself says."""
    engine = await stage.engine()
    client = await stage.router([engine], limits={"max_body_bytes": 2048, "max_active": 1})
    answer = await client.ask(path, BODY | {"input": "x" * 3000})
    assert answer.status == 413
    assert answer.body.get("type") == ("error" if path == MESSAGES else None)
    engine.hold.clear()
    held = asyncio.create_task(client.ask("/v1/held", {}))
    await eventually(lambda: client.context.admitted, "there is no room")
    answer = await client.ask(path, BODY)
    assert (answer.status, answer.body["error"]["type"]) == (503, kind)
    engine.hold.set()
    assert (await held).status == 200
    await engine.stop()
    await eventually(lambda: not client.context.registry.ready, "it is seen")
    answer = await client.ask(path, BODY)
    assert (answer.status, answer.body["error"]["type"]) == (503, kind)


@pytest.mark.parametrize("headers", [{}, {"x-segue-failover": "off"}])
async def test_a_busy_or_absent_engine_is_passed_over(stage: Stage, headers: dict[str, str]) -> None:
    """It never had the request, so that this is no failover; when all are busy, the client hears it."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines, timeouts={"health_interval_ms": 60_000})
    headers |= {"x-session-id": session_of("a")}
    stage.faults.append(Fault("status", status=503))
    assert len(await stream(client, RESPONSES, **headers)) == len(FOREIGN[RESPONSES])
    assert [len(engine.seen) for engine in engines] == [1, 1]
    assert "x-segue-failover" not in {name.lower() for name in engines[1].seen[0].headers}
    stage.faults.extend([Fault("status", status=429)] * 2)
    answer = await client.ask(RESPONSES, BODY)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert sum(engine.failures for engine in (await client.status()).engines) == 0
    await engines[0].stop()
    assert len(await stream(client, RESPONSES, **headers)) == len(FOREIGN[RESPONSES])


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_client_that_leaves_stops_what_is_passed_through(stage: Stage, path: str) -> None:
    """While it streams, and while nothing has come yet: the engine does not go on for nobody."""
    engine = await stage.engine()
    client = await stage.router([engine])
    for after in (2, 0):
        stage.faults.append(Fault("silent", after=after))
        asking = asyncio.create_task(client.session.post(client.url + path, json=BODY))
        await eventually(lambda n=after: engine.seen and engine.seen[-1].sent_tokens == n, "it runs")
        response = await asking
        if after:
            await response.content.readany()
        response.close()
        seen = engine.seen.pop()
        await asyncio.wait_for(seen.gone.wait(), 5)
        assert seen.aborted
    await eventually(lambda: not client.context.admitted, "nothing is active")
    assert not client.context.registry["a"].attempts
    assert 'outcome="client_left",path="other"} 2.0' in await client.metrics()


async def test_segues_own_key_does_not_pass(stage: Stage) -> None:
    """A client could name somebody else's sequence; what else it says arrives."""
    engine = await stage.engine()
    client = await stage.router([engine])
    own = {"segue": {"seq": "seq-of-somebody", "epoch": 9}, "mine": 1}
    answer = await client.ask("/v1/echo", BODY | {"kv_transfer_params": own, "input": "segue"})
    assert json.loads(answer.body["body"]) == BODY | {"kv_transfer_params": {"mine": 1}, "input": "segue"}

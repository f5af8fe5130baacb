"""The real `openai` client against the router: it notices nothing of a failure, and what it cannot be spared
comes as the exceptions that programs written for it expect.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI

from system.router.fake_engine import FakeEngine, Fault
from system.router.fake_tokens import generate, prompt_ids, text_of
from system.router.harness import DEADLINE_S, Client, Stage, eventually, session_of

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]
TOKENS = 24
Endpoint = Literal["chat", "completions"]
each_endpoint = pytest.mark.parametrize("endpoint", ["chat", "completions"])


def expected(endpoint: Endpoint, tokens: int = TOKENS) -> str:
    """The text of the uninterrupted answer."""
    body = {"messages": MESSAGES, "prompt": "Once upon a time", "max_tokens": tokens}
    path = CHAT if endpoint == "chat" else "/v1/completions"
    return text_of(generate(path, body)[1])


async def client_of(stage: Stage, router: Client, engine: str = "a") -> AsyncOpenAI:
    """As a user makes it, for a session that lives on `engine`."""
    return await stage.stack.enter_async_context(
        AsyncOpenAI(
            base_url=f"{router.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=DEADLINE_S,
            default_headers={"x-session-id": session_of(engine)},
        )
    )


async def ask(client: AsyncOpenAI, endpoint: Endpoint, **more: Any) -> Any:
    """The question, with or without streaming."""
    if endpoint == "chat":
        return await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=TOKENS, **more
        )
    return await client.completions.create(model="fake", prompt="Once upon a time", max_tokens=TOKENS, **more)


def said(endpoint: Endpoint, choice: Any) -> str:
    """The text of a streamed choice."""
    return (choice.delta.content or "") if endpoint == "chat" else choice.text


@each_endpoint
async def test_an_answer_in_one_piece(stage: Stage, endpoint: Endpoint) -> None:
    """Without streaming: one object, parsed by the client's own types."""
    client = await client_of(stage, await stage.router([await stage.engine()]))
    answer = await ask(client, endpoint)
    (choice,) = answer.choices
    assert (choice.message.content if endpoint == "chat" else choice.text) == expected(endpoint)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS


@each_endpoint
@pytest.mark.parametrize("fails", [False, True], ids=["undisturbed", "engine dies"])
async def test_a_streamed_answer(stage: Stage, endpoint: Endpoint, fails: bool) -> None:
    """One id, one whole text, one finish and one usage, though the engine died in the middle of it."""
    engines = [await stage.engine(), await stage.engine()]
    client = await client_of(stage, await stage.router(engines))
    if fails:
        stage.faults.append(Fault("die", after=9))
    chunks = [
        chunk
        async for chunk in await ask(client, endpoint, stream=True, stream_options={"include_usage": True})
    ]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(said(endpoint, choice) for choice in choices) == expected(endpoint)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [TOKENS]
    assert len(engines[1].seen) == fails


async def test_the_accumulating_stream_helper(stage: Stage) -> None:
    """`chat.completions.stream` puts the chunks together itself, and has the uninterrupted answer."""
    client = await client_of(stage, await stage.router([await stage.engine(), await stage.engine()]))
    stage.faults.append(Fault("die", after=5))
    ends = {"eos_at": TOKENS, "eos_base": len(prompt_ids(CHAT, {"messages": MESSAGES}))}
    async with client.chat.completions.stream(model="fake", messages=MESSAGES, extra_body=ends) as stream:
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.message.content == expected("chat")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")


async def test_several_choices(stage: Stage) -> None:
    """n > 1 keeps its indices."""
    client = await client_of(stage, await stage.router([await stage.engine()]))
    texts = {0: "", 1: ""}
    async for chunk in await ask(client, "chat", stream=True, n=2):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys((0, 1), expected("chat"))


async def test_what_the_client_asks_for_reaches_the_engine(stage: Stage) -> None:
    """Tools, structured output and fields that only some engine knows."""
    engine = await stage.engine()
    client = await client_of(stage, await stage.router([engine]))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    choice = {"type": "function", "function": {"name": "look"}}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    await ask(
        client,
        "chat",
        tools=tools,
        tool_choice=choice,
        response_format=schema,
        extra_body={"top_k": 7},
        stream=False,
    )
    body = engine.seen[-1].body
    assert (body["tools"], body["tool_choice"], body["response_format"]) == (tools, choice, schema)
    assert body["top_k"] == 7


async def test_the_models_are_listed(stage: Stage) -> None:
    """`models.list()` is the union over the engines."""
    one, other = await stage.engine(), await stage.engine()
    other.cards = [{"id": "other", "object": "model", "created": 1, "owned_by": "x"}]
    client = await client_of(stage, await stage.router([one, other]))
    assert {model.id async for model in client.models.list()} == {"fake", "other"}


async def test_a_request_that_the_engine_refuses(stage: Stage) -> None:
    """400 is BadRequestError with the engine's own words, and it moves nothing."""
    engines = [await stage.engine(), await stage.engine()]
    client = await client_of(stage, await stage.router(engines))
    stage.faults.append(Fault("status", status=400))
    with pytest.raises(openai.BadRequestError, match="injected"):
        await ask(client, "chat", stream=True)
    assert [len(engine.seen) for engine in engines] == [1, 0]


async def test_a_request_that_the_router_cannot_read(stage: Stage) -> None:
    """The router's own 400 is BadRequestError too, with a code."""
    client = await client_of(stage, await stage.router([await stage.engine()]))
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, "chat", extra_body={"n": "two"})
    assert caught.value.code == "invalid_n"
    assert caught.value.type == "invalid_request_error"


async def test_a_model_that_nobody_serves(stage: Stage) -> None:
    """404 is NotFoundError, and says what is served."""
    client = await client_of(stage, await stage.router([await stage.engine()]))
    with pytest.raises(openai.NotFoundError, match="fake") as caught:
        await client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


async def test_a_path_that_the_engine_does_not_have(stage: Stage) -> None:
    """Embeddings of an engine without them: its 404, as NotFoundError."""
    client = await client_of(stage, await stage.router([await stage.engine()]))
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="fake", input="text")


async def test_no_engine_at_all(stage: Stage) -> None:
    """503 is InternalServerError, whose status and code programs can look at."""
    client = await client_of(stage, await stage.router([FakeEngine()], engine={"url": "http://127.0.0.1:1"}))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(client, "chat", stream=True)
    assert caught.value.status_code == 503
    assert caught.value.code == "no_engine_available"


@each_endpoint
async def test_a_stream_that_cannot_go_on(stage: Stage, endpoint: Endpoint) -> None:
    """The in-band error is raised from the iteration as APIError, after all text that was good; the answer
    never just ends."""
    client = await client_of(stage, await stage.router([await stage.engine()], failover={"enabled": False}))
    stage.faults.append(Fault("die", after=7))
    text = ""
    with pytest.raises(openai.APIError, match="failover is off") as caught:
        async for chunk in await ask(client, endpoint, stream=True):
            text += "".join(said(endpoint, choice) for choice in chunk.choices)
    assert text and expected(endpoint).startswith(text)
    assert not isinstance(caught.value, openai.APIConnectionError)
    assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "server_error"


async def test_an_answer_in_one_piece_that_cannot_be_had(stage: Stage) -> None:
    """Without streaming the same failure is a status: 502, InternalServerError."""
    client = await client_of(stage, await stage.router([await stage.engine()], failover={"enabled": False}))
    stage.faults.append(Fault("die", after=7))
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(client, "chat")
    assert caught.value.status_code == 502


async def test_a_client_that_leaves_stops_the_engine(stage: Stage) -> None:
    """Closing the stream early aborts the generation; nothing goes on for nobody."""
    engine = await stage.engine(token_s=0.02)
    router = await stage.router([engine])
    client = await client_of(stage, router)
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=400, stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(DEADLINE_S):
        await engine.seen[0].gone.wait()
    assert engine.seen[0].aborted and not engine.seen[0].finished
    await eventually(lambda: not router.context.running, "the router has nothing to do")


async def test_the_raw_response_names_the_request(stage: Stage) -> None:
    """The header that the story of a request is found by is there for programs that look."""
    router = await stage.router([await stage.engine()])
    client = await client_of(stage, router)
    raw = await client.chat.completions.with_raw_response.create(
        model="fake", messages=MESSAGES, max_tokens=TOKENS
    )
    story = await router.story(raw.headers["x-segue-seq"])
    assert story.delivered_tokens == TOKENS


async def test_a_key_is_passed_on(stage: Stage) -> None:
    """The client's own key goes to the engine, which checks it."""
    engine = await stage.engine()
    client = await client_of(stage, await stage.router([engine]))
    await ask(client, "chat")
    headers = {name.lower(): value for name, value in engine.seen[0].headers.items()}
    assert headers["authorization"] == "Bearer none"


async def test_the_synchronous_client(stage: Stage) -> None:
    """`OpenAI` beside `AsyncOpenAI`: the same stream, read by a thread."""
    router = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault("die", after=3))

    def read() -> str:
        with openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        ) as client:
            stream = client.chat.completions.create(
                model="fake", messages=MESSAGES, max_tokens=TOKENS, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(read) == expected("chat")

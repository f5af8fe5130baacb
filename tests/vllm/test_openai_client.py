"""The real `openai` client, the real router, real vLLM: what programs do every day, and an engine killed
while they do it.

One cluster for the whole file. Answers are greedy, so two of one question are equal; each has a cache salt of
its own, so that no cache answers for the engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Literal

import openai
import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from segue_core.messages.status import DaemonStatus, RouterStatus
from segue_ctl.cluster import Cluster
from segue_ctl.cluster_checks import daemon_status, router_status
from segue_ctl.model import DEFAULT_MODEL_DIR
from segue_ctl.vllm_server import EngineSpec, one_core_each
from support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about a journey from Oslo to Rome, in detail."}]
TOKENS = 48
CITIES = ["Paris", "Rome", "Oslo"]
STOPS = {"type": "array", "items": {"enum": CITIES}, "minItems": 8, "maxItems": 8}
SCHEMA = {
    "type": "object",
    "properties": {"stops": STOPS},
    "required": ["stops"],
    "additionalProperties": False,
}
PLAN = {"type": "function", "function": {"name": "plan", "parameters": SCHEMA, "strict": True}}
"""strict: without it vLLM does not hold the model to the schema."""
CALL_PLAN = {"type": "function", "function": {"name": "plan"}}
STRUCTURED = {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True}}
PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_salts = count()


class Plan(pydantic.BaseModel):
    """What `parse` is to make of an answer."""

    first: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


class Stage:
    """The cluster and a client of its router."""

    def __init__(self, cluster: Cluster, client: AsyncOpenAI) -> None:
        self.cluster = cluster
        self.client = client
        self._killed: list[str] = []

    async def chat(self, **more: Any) -> Any:
        """The question, with or without streaming."""
        salt = {"cache_salt": f"client-{next(_salts)}"} | more.pop("extra_body", {})
        asked = {"max_tokens": TOKENS, "temperature": 0, "extra_body": salt} | more
        return await self.client.chat.completions.create(model=self.cluster.model, messages=MESSAGES, **asked)

    async def kill_serving(self) -> None:
        """SIGKILL to the engine that writes the only stream there is."""
        status = await router_status(self.cluster.session, self.cluster.router_url())
        assert isinstance(status, RouterStatus)
        (name,) = [engine.name for engine in status.engines if engine.active]
        self.cluster.kill_engine(name)
        self._killed.append(name)

    async def restore(self) -> None:
        """Have both engines again."""
        while self._killed:
            await self.cluster.restart_engine(self._killed.pop())

    async def until_running(self, requests: int) -> None:
        """Wait until engines work on so many requests, by their daemons."""

        async def so_many() -> bool:
            return await self._running() == requests

        await eventually(so_many, f"{requests} requests run", timeout_s=30)

    async def _running(self) -> int:
        total = 0
        for name in self.cluster.specs:
            status = await daemon_status(self.cluster.session, self.cluster.daemon_url(name))
            assert isinstance(status, DaemonStatus), status
            total += status.engine.running
        return total


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    cores = zip(("a", "b"), one_core_each(2), strict=True)
    specs = [EngineSpec(name, cpus, extra_args=PARSER) for name, cpus in cores]
    async with (
        Cluster(specs, model_dir=DEFAULT_MODEL_DIR) as cluster,
        AsyncOpenAI(
            base_url=f"{cluster.router_url()}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):
        yield Stage(cluster, client)


def deltas(chunks: list[Any]) -> list[Any]:
    """What streamed chunks bring of their one choice."""
    return [choice.delta for chunk in chunks for choice in chunk.choices]


def text_of(chunks: list[Any]) -> str:
    return "".join(delta.content or "" for delta in deltas(chunks))


def arguments_of(chunks: list[Any]) -> str:
    """The arguments of the one tool call that streamed chunks bring."""
    calls = [call for delta in deltas(chunks) for call in delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function.name] == ["plan"]
    return "".join(call.function.arguments or "" for call in calls)


async def test_a_chat_streamed_and_whole(stage: Stage) -> None:
    """Both say the same, and both count the same."""
    whole = await stage.chat()
    stream = await stage.chat(stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == TOKENS
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_completion_streamed_and_whole(stage: Stage) -> None:
    """The older endpoint, likewise."""
    asked: dict[str, Any] = {
        "model": stage.cluster.model,
        "prompt": "Once upon a time",
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = await stage.client.completions.create(**asked)
    pieces = [chunk async for chunk in await stage.client.completions.create(**asked, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 16


async def test_a_tool_is_called(stage: Stage) -> None:
    """Named `tool_choice`: arguments that fit the tool, streamed and whole alike (vLLM spaces them apart)."""
    asked = {"tools": [PLAN], "tool_choice": CALL_PLAN, "max_tokens": 150}
    whole = await stage.chat(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "plan"
    arguments = json.loads(call.function.arguments)
    assert len(arguments["stops"]) == 8
    chunks = [chunk async for chunk in await stage.chat(**asked, stream=True)]
    assert json.loads(arguments_of(chunks)) == arguments


async def test_structured_output(stage: Stage) -> None:
    """`response_format` with a schema, and `parse` with a class."""
    answer = await stage.chat(response_format=STRUCTURED)
    assert len(json.loads(answer.choices[0].message.content)["stops"]) == 8
    parsed = await stage.client.chat.completions.parse(
        model=stage.cluster.model, messages=MESSAGES, response_format=Plan, max_tokens=TOKENS, temperature=0
    )
    plan = parsed.choices[0].message.parsed
    assert plan is not None and plan.first in CITIES


async def test_what_goes_wrong_is_an_exception_of_the_client(stage: Stage) -> None:
    """vLLM's own refusals and the router's, by the client's classes; the model is listed for who looks."""
    with pytest.raises(openai.BadRequestError):
        await stage.chat(max_tokens=1_000_000)
    with pytest.raises(openai.BadRequestError):
        await stage.chat(temperature=-1, stream=True)
    with pytest.raises(openai.NotFoundError):
        await stage.client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        await stage.client.embeddings.create(model=stage.cluster.model, input="text")
    assert [model.id async for model in stage.client.models.list()] == [stage.cluster.model]


async def test_a_client_that_leaves_stops_its_engine(stage: Stage) -> None:
    """Closing the stream early: no engine goes on with the answer, long before its end."""
    await stage.restore()
    stream = await stage.chat(stream=True, max_tokens=6000, extra_body={"ignore_eos": True})
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stage.until_running(1)
    await stream.close()
    await stage.until_running(0)


async def test_an_engine_killed_in_the_middle_is_not_noticed(stage: Stage) -> None:
    """SIGKILL while the client reads: one complete answer, equal to the uninterrupted one."""
    await stage.restore()
    reference = await stage.chat()
    chunks: list[Any] = []
    async for chunk in await stage.chat(stream=True, stream_options={"include_usage": True}):
        chunks.append(chunk)
        if len(chunks) == 15:
            await stage.kill_serving()
    assert text_of(chunks) == reference.choices[0].message.content
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == TOKENS


async def test_an_engine_killed_in_the_middle_of_a_tool_call_is_not_noticed(stage: Stage) -> None:
    """The arguments that the client has put together are the uninterrupted ones: one call, one id."""
    await stage.restore()
    asked = {"tools": [PLAN], "tool_choice": CALL_PLAN, "max_tokens": 150}
    reference = [chunk async for chunk in await stage.chat(**asked, stream=True)]
    chunks: list[Any] = []
    async for chunk in await stage.chat(**asked, stream=True):
        chunks.append(chunk)
        if len(chunks) == 10:
            await stage.kill_serving()
    assert len(chunks) > 10
    assert arguments_of(chunks) == arguments_of(reference)
    ids = [call.id for delta in deltas(chunks) for call in delta.tool_calls or () if call.id]
    assert len(set(ids)) == 1

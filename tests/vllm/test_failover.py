"""Real vLLM, a real model, real processes: the answer after the failure equals the answer without one.

One cluster for the whole file: two engines, a daemon beside each, a router. Times are not judged here (see
`seguectl bench`); that nothing is lost, repeated, different or recomputed is.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from segue_core.messages.status import RequestStory
from segue_ctl import metrics, workload
from segue_ctl.bench_seam import BLOCK_SIZE, is_good
from segue_ctl.cluster import Cluster
from segue_ctl.failure_run import Measured, Question, chat_url, interrupted, measure, uninterrupted
from segue_ctl.model import DEFAULT_MODEL_DIR
from segue_ctl.openai_stream import Answer, StreamFailed, open_stream
from segue_ctl.turn_run import Said, lose_engine, next_question, take_turn
from segue_ctl.vllm_server import EngineSpec, one_core_each
from segue_ctl.waiting import get_json
from support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]

MAX_TOKENS = 70


class Stage:
    """The cluster, a question, and its answer when nothing fails."""

    def __init__(self, cluster: Cluster, chat: list[dict[str, str]], reference: Answer) -> None:
        self.cluster = cluster
        self.chat = chat
        self.reference = reference
        self._asked = 0

    def question(self) -> Question:
        """The same question, with a salt of its own so that no cache answers for the engine."""
        self._asked += 1
        return Question(self.chat, MAX_TOKENS, f"test-{self._asked}")

    async def fail(self, after_tokens: int, number: signal.Signals = signal.SIGKILL) -> Measured:
        """Ask, and fail the answering engine after so many tokens."""
        question = self.question()
        router = self.cluster.router_url()
        failed = await interrupted(self.cluster, router, question, after_tokens=after_tokens, number=number)
        return measure(failed, self.reference, question)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    specs = [EngineSpec(name, cpus) for name, cpus in zip(("a", "b"), one_core_each(2), strict=True)]
    overrides = {"timeouts": {"stall_ms": 1500}}
    # One test waits for an engine's restart.
    keeping = {**overrides, "store": {"keep_own_ms": 600_000}}
    patient = {"timeouts": {**overrides["timeouts"], "failover_ms": 120_000}}
    cluster = Cluster(specs, model_dir=DEFAULT_MODEL_DIR, daemon_overrides=keeping, router_overrides=patient)
    async with cluster:
        chat = await workload.fitting_chat(cluster, 300)
        reference = await uninterrupted(cluster, cluster.router_url(), Question(chat, MAX_TOKENS, "ref"))
        assert len(reference.token_ids) == MAX_TOKENS
        yield Stage(cluster, chat, reference)


def boundary(stage: Stage) -> int:
    """Tokens delivered when the KV in memory ends exactly at a block's end."""
    return BLOCK_SIZE - (stage.reference.prompt_tokens - 1) % BLOCK_SIZE


@pytest.mark.parametrize("place", ["first token", "block boundary", "last token"])
async def test_a_killed_engines_answer_goes_on_unchanged(stage: Stage, place: str) -> None:
    """SIGKILL to the whole process group, wherever the answer is: same ids, same text, at most two tokens
    computed again by vLLM's own count; and the restarted engine is protected again. (Inside a tail: see
    below.)"""
    after = {
        "first token": 1,
        "block boundary": boundary(stage),
        "last token": MAX_TOKENS - 1,
    }[place]
    result = await stage.fail(after)
    assert is_good(result), result
    assert result.recomputed_tokens <= 2, result
    assert result.external_tokens >= result.prompt_tokens, result
    assert result.loaded_bytes > 0
    await stage.cluster.restart_engine(result.engine)


async def test_a_stopped_engines_answer_goes_on_unchanged(stage: Stage) -> None:
    """SIGSTOP: no socket closes, nothing moves. After the stall time-out the answer goes on elsewhere; the
    engine is used again once it wakes, and what it does then changes nothing."""
    result = await stage.fail(20, signal.SIGSTOP)
    assert is_good(result), result
    assert result.recomputed_tokens <= 2, result
    stage.cluster.continue_engine(result.engine)
    await stage.cluster.wait_router()
    again = await uninterrupted(stage.cluster, stage.cluster.router_url(), stage.question())
    assert again.token_ids == stage.reference.token_ids


async def ask_whole(stage: Stage, **changes: Any) -> dict[str, Any]:
    """The question without streaming."""
    body = stage.question().body(stage.cluster.model) | changes
    url = f"{stage.cluster.router_url()}/v1/chat/completions"
    async with stage.cluster.session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def test_a_request_without_streaming_survives_too(stage: Stage) -> None:
    """It is streamed inside: the client gets one ordinary response, whole and with one usage."""
    asking = asyncio.create_task(ask_whole(stage))
    engine = await answering(stage)
    stage.cluster.kill_engine(engine)
    answer = await asking
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == stage.reference.text
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == stage.reference.prompt_tokens
    assert usage["completion_tokens"] == MAX_TOKENS
    await stage.cluster.restart_engine(engine)


async def answering(stage: Stage) -> str:
    """The engine whose daemon has seen a sequence get beyond its prompt."""
    found: list[str] = []

    async def look() -> list[str]:
        for name in stage.cluster.specs:
            status = await daemon_status(stage.cluster, name)
            if status["engine"]["sequences"] and any(p["acked_tokens"] for p in status["peers"]):
                found.append(name)
        return found

    await eventually(look, "an engine answers", timeout_s=60)
    return found[0]


async def daemon_status(cluster: Cluster, name: str) -> dict[str, Any]:
    async with cluster.session.get(f"{cluster.daemon_url(name)}/status") as response:
        status: dict[str, Any] = await response.json()
        return status


async def test_a_daemon_killed_under_load_costs_protection_and_nothing_else(stage: Stage) -> None:
    """Engines serve on without their daemons; once those are back, answers survive a kill again (here
    inside a tail)."""
    cluster = stage.cluster
    asking = asyncio.create_task(uninterrupted(cluster, cluster.router_url(), stage.question()))
    engine = await answering(stage)
    cluster.kill_daemon(engine)
    answer = await asking
    assert answer.token_ids == stage.reference.token_ids
    await cluster.start_daemon(engine)
    await cluster.wait_registered(engine)
    await cluster.wait_linked()
    result = await stage.fail(boundary(stage) + 7)
    assert is_good(result), result
    assert result.recomputed_tokens <= 2, result
    assert result.external_tokens >= result.prompt_tokens and result.loaded_bytes > 0, result
    await cluster.restart_engine(result.engine)


async def test_a_killed_router_harms_nobody(stage: Stage) -> None:
    """Engines abort what nobody reads any more; a new router serves at once."""
    cluster = stage.cluster
    asking = asyncio.create_task(uninterrupted(cluster, cluster.router_url(), stage.question()))
    engine = await answering(stage)
    cluster.kill_router()
    with pytest.raises((StreamFailed, aiohttp.ClientError)):
        await asking

    async def idle() -> bool:
        state = (await daemon_status(cluster, engine))["engine"]
        return not state["sequences"] and not state["running"]

    await eventually(idle, "the engine is idle", timeout_s=30)
    await cluster.start_router()
    answer = await uninterrupted(cluster, cluster.router_url(), stage.question())
    assert answer.token_ids == stage.reference.token_ids


async def test_an_engine_that_is_stopped_in_good_order_loses_no_answer(stage: Stage) -> None:
    """SIGTERM: vLLM ends its answers as "aborted" and says `[DONE]`. That is no end of an answer: it goes
    on elsewhere, as in every rolling restart."""
    result = await stage.fail(30, signal.SIGTERM)
    assert is_good(result), result
    await stage.cluster.restart_engine(result.engine)


async def test_the_next_turn_on_another_engine_computes_only_what_is_new(stage: Stage) -> None:
    """SIGKILL between two turns of a conversation: by vLLM's own count the other engine computes no more than
    the new question and the rest of a block, and says what an engine that never failed says. The same words
    under another cache salt share nothing with it. (The engine stays dead: the next test has use for one.)"""
    cluster, router = stage.cluster, stage.cluster.router_url()
    length = boundary(stage) + BLOCK_SIZE // 2  # the last full block is long there when the answer ends

    async def first_turn(salt: str) -> Said:
        return await take_turn(cluster, router, Question(stage.chat, length, salt))

    reference = await take_turn(cluster, router, next_question(await first_turn("well")))
    assert reference.turn.external_tokens == 0 < reference.turn.cached_tokens
    first = await first_turn("killed")
    await lose_engine(cluster, router, first.turn.engine)
    question = next_question(first)
    stranger = await take_turn(cluster, router, replace(question, salt="somebody else's"))
    assert stranger.turn.computed_tokens == stranger.turn.prompt_tokens, stranger.turn
    second = await take_turn(cluster, router, question)
    new = second.turn.prompt_tokens - first.tokens
    assert second.turn.engine != first.turn.engine
    assert second.turn.cached_tokens == 0
    assert second.turn.computed_tokens <= new + BLOCK_SIZE, (second.turn, new)
    assert second.turn.external_tokens == reference.turn.cached_tokens
    assert second.answer.token_ids == reference.answer.token_ids


async def one_engine_alone(cluster: Cluster) -> str:
    """Its name, once the other engine and the daemon beside that are dead."""
    alive = [name for name in cluster.specs if cluster.process(f"engine-{name}").alive]
    for name in alive[1:]:
        await lose_engine(cluster, cluster.router_url(), name)
    for name in cluster.specs:
        if name != alive[0]:
            cluster.kill_daemon(name)
    return alive[0]


async def test_the_only_engine_goes_on_after_its_own_restart(stage: Stage) -> None:
    """No peer anywhere: SIGKILL in the middle of an answer, and whoever watches over the engine restarts it.
    The client's stream waits, and goes on unchanged; by vLLM's own count one token is computed again."""
    cluster, router = stage.cluster, stage.cluster.router_url()
    engine = await one_engine_alone(cluster)
    child = cluster.process(f"engine-{engine}")
    starting: asyncio.Task[None] | None = None
    body = stage.question().body(cluster.model)
    async with open_stream(cluster.session, chat_url(router), body) as stream:
        answer = Answer(headers=stream.headers, started_ns=stream.started_ns)
        async for piece in stream.pieces():
            answer.add(piece)
            if starting is None and len(answer.token_ids) >= 25:
                cluster.kill_engine(engine)
                child.finish(grace_s=0)
                starting = asyncio.create_task(cluster.start_engine(engine))
    assert starting is not None
    await starting
    assert (answer.token_ids, answer.text) == (stage.reference.token_ids, stage.reference.text)
    _, told = await get_json(cluster.session, f"{router}/v1/segue/requests/{answer.headers['x-segue-seq']}")
    moves = msgspec.convert(told, RequestStory).moves  # with nobody up, the other engine is tried in vain
    assert moves[0].from_engine == engine and (moves[-1].to, moves[-1].how) == (engine, "exact"), moves
    text = await metrics.scrape(cluster.session, cluster.engine_url(engine))
    computed = metrics.sum_by_label(text, metrics.PROMPT_TOKENS_BY_SOURCE, "source")
    assert computed["local_compute"] == 1, computed
    assert computed["external_kv_transfer"] >= stage.reference.prompt_tokens, computed

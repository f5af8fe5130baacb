"""Answers that survive: every failure, at every moment, on both APIs, streamed and not."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from system.router.asked import CHAT, COMPLETIONS, LENGTH, all_up, assert_uninterrupted, request
from system.router.fake_engine import Fault
from system.router.fake_tokens import EMOJI, generate, next_token, text_of
from system.router.harness import Stage, eventually

KINDS = (
    "die",
    "eof",
    "half_chunk",
    "half_eof",
    "malformed",
    "shape",
    "not_object",
    "error_event",
    "abort",
    "done_without_finish",
)

CAUSE = {
    "die": "stream_eof",
    "eof": "stream_eof",
    "half_chunk": "stream_eof",
    "half_eof": "stream_eof",
    "malformed": "malformed_event",
    "shape": "malformed_event",
    "not_object": "malformed_event",
    "error_event": "error_event",
    "abort": "error_event",
    "done_without_finish": "stream_eof",
    "silent": "stalled",
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_survives_each_failure_at_each_place(
    stage: Stage, kind: str, path: str, stream: bool
) -> None:
    """Whatever way an engine fails, after whatever token, the client sees the uninterrupted answer."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    body = request(path, stream=stream)
    for after in (0, 1, LENGTH // 2, LENGTH - 1):
        stage.faults.append(Fault(kind, after))
        answer = await client.ask(path, body)
        assert_uninterrupted(answer, path, body)
        story = await client.story(answer.seq)
        assert story.outcome == "ok"
        assert [move.detected_by for move in story.moves] == [CAUSE[kind]]
        assert not stage.faults
        assert story.delivered_tokens == LENGTH
        await all_up(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
async def test_usage_and_ids_are_those_of_one_answer(
    stage: Stage, path: str, options: dict[str, Any]
) -> None:
    """Ids the client asked for come once each; usage counts its prompt and all tokens once."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    body = request(path, return_token_ids=True)
    if options:
        body["stream_options"] = options
    for after in range(0, LENGTH + 1, 5):
        stage.faults.append(Fault("die", after))
        answer = await client.ask(path, body)
        assert_uninterrupted(answer, path, body)
        if "continuous_usage_stats" in options:
            counts = [e["usage"]["completion_tokens"] for e in answer.events if e.get("usage")]
            assert counts == sorted(counts)
            assert counts[-1] == LENGTH
        await all_up(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 5])
async def test_characters_of_several_tokens_cross_the_seam_whole(
    stage: Stage, path: str, chunk_tokens: int
) -> None:
    """Wherever the engine dies inside a character, no text is lost, doubled, and no prompt leaks."""
    engines = [await stage.engine(chunk_tokens=chunk_tokens) for _ in range(2)]
    client = await stage.router(engines)
    body = request(path, return_token_ids=True)
    _, output, _ = generate(path, body)
    assert any(token in EMOJI for token in output), "the answer has such characters"
    for after in range(LENGTH):
        stage.faults.append(Fault("die", after))
        answer = await client.ask(path, body)
        assert_uninterrupted(answer, path, body)
        await all_up(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("kind", ["die_after_finish", "error_event_after_finish", "eof_after_finish"])
async def test_after_the_finish_no_engine_is_needed(
    stage: Stage, path: str, stream: bool, usage: bool, kind: str
) -> None:
    """The finish was said, `[DONE]` was not: the answer ends rightly without asking anybody."""
    engines = [await stage.engine()]
    client = await stage.router(engines)
    body = request(
        path, stream=stream, **({"stream_options": {"include_usage": True}} if usage and stream else {})
    )
    stage.faults.append(Fault(kind))
    answer = await client.ask(path, body)
    assert_uninterrupted(answer, path, body)
    assert len(engines[0].seen) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_after_the_role_preamble_only_the_answer_starts_again(stage: Stage, path: str) -> None:
    """The preamble is not repeated."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    stage.faults.append(Fault("die", events=1))
    body = request(path, max_tokens=6)
    answer = await client.ask(path, body)
    assert_uninterrupted(answer, path, body)
    story = await client.story(answer.seq)
    assert [move.how for move in story.moves] == ["restart" if path == CHAT else "by_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_several_failures_in_a_row(stage: Stage, path: str) -> None:
    """A, then B, then A again after it came back: still one answer."""
    client = await stage.router([await stage.engine(), await stage.engine(), await stage.engine()])
    stage.faults.extend([Fault("die", 5), Fault("error_event", 4), Fault("malformed", 3)])
    body = request(path, return_token_ids=True)
    answer = await client.ask(path, body)
    assert_uninterrupted(answer, path, body)
    story = await client.story(answer.seq)
    assert [m.detected_by for m in story.moves] == ["stream_eof", "error_event", "malformed_event"]
    assert len(story.engines) >= 3
    assert story.moves[-1].gap_ms is not None
    assert story.moves[-1].first_token_ms is not None


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_without_a_standby_the_error_is_honest(stage: Stage, stream: bool) -> None:
    """One in-band error and no `[DONE]`, or a 502."""
    client = await stage.router([await stage.engine()])
    stage.faults.extend([Fault("error_event", 5), Fault("error_event", 2)])
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, stream=stream))
    if stream:
        assert answer.status == 200
        assert answer.error is not None
        assert answer.error["code"] == "no_engine_available"
        assert "error" in answer.events[-1]
        assert not answer.done
        _, output, _ = generate(COMPLETIONS, request(COMPLETIONS))
        assert text_of(output).startswith(answer.text)
    else:
        assert answer.status == 502
        assert answer.body["error"]["code"] == "no_engine_available"
    assert (await client.story(answer.seq)).outcome == "failed"


async def test_an_engine_that_comes_back_in_time_takes_over(stage: Stage) -> None:
    """The only engine is gone and restarted on its port: the waiting client goes on there."""
    engine = await stage.engine(token_s=0.005)
    client = await stage.router([engine], timeouts={"failover_ms": 8_000})
    body = request(COMPLETIONS)
    asking = asyncio.create_task(client.ask(COMPLETIONS, body))
    await eventually(lambda: engine.seen and engine.seen[0].sent_tokens >= 3, "the answer has begun")
    port = engine.port
    await engine.kill()
    await eventually(lambda: client.context.registry.engines[0].health.state == "down", "it is down")
    await engine.start(port)
    assert_uninterrupted(await asking, COMPLETIONS, body)


@pytest.mark.parametrize("kind", ["silent", "comments"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_silent_engine_is_left(stage: Stage, path: str, kind: str) -> None:
    """Connected but silent, or with comments only: the answer moves, the old request is aborted."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    stage.faults.append(Fault(kind, 7))
    body = request(path)
    answer = await client.ask(path, body)
    assert_uninterrupted(answer, path, body)
    (move,) = (await client.story(answer.seq)).moves
    assert move.detected_by == "stalled"
    assert move.detect_ms is not None
    assert 250 <= move.detect_ms < 2_000
    (first,) = [seen for engine in engines for seen in engine.seen if not seen.finished]
    await asyncio.wait_for(first.gone.wait(), 5)
    assert first.aborted


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("n", {"n": 2}),
        ("seed", {"seed": 1}),
        ("penalties", {"presence_penalty": 0.5}),
        ("penalties", {"frequency_penalty": -0.5}),
        ("stop", {"stop": ["x"]}),
        ("bad_words", {"bad_words": ["x"]}),
        ("structured_output", {"response_format": {"type": "json_object"}}),
        ("structured_output", {"structured_outputs": {"regex": "a"}}),
        ("logprobs", {"logprobs": True}),
        ("output_state", {"vllm_xargs": {"a": 1}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
async def test_what_cannot_be_continued_rightly_is_refused(
    stage: Stage, reason: str, more: dict[str, Any]
) -> None:
    """Mid-stream: one clear error, counted by reason. Before the first token: simply served elsewhere."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    body = request(CHAT, **more)
    stage.faults.append(Fault("die", 5))
    answer = await client.ask(CHAT, body)
    assert answer.error is not None
    assert answer.error["code"] == f"cannot_resume_{reason}"
    assert not answer.done
    assert f'segue_router_refusals_total{{reason="{reason}"}} 1.0' in await client.metrics()
    await all_up(client)
    stage.faults.append(Fault("die", 0))
    answer = await client.ask(CHAT, body)
    assert answer.error is None
    assert answer.done


@pytest.mark.parametrize("more", [{"seed": 1}, {"n": 2}, {"stop": ["zzz"]}, {"logprobs": 1}])
async def test_an_unstreamed_answer_starts_again_instead_of_being_refused(
    stage: Stage, more: dict[str, Any]
) -> None:
    """Nothing was delivered yet, so anything can be asked again from the beginning."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault("die", 5))
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, stream=False, **more))
    assert answer.status == 200
    _, output, _ = generate(COMPLETIONS, request(COMPLETIONS))
    assert {choice["text"] for choice in answer.body["choices"]} == {text_of(output)}


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 1}])
async def test_an_aborted_answer_in_one_piece_is_asked_for_again(stage: Stage, more: dict[str, Any]) -> None:
    """vLLM that is stopped answers 200 with half of it and finish_reason `abort`: nobody sees that."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault("abort"))
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, stream=False, **more))
    assert answer.status == 200
    assert {choice["finish_reason"] for choice in answer.body["choices"]} == {"length"}
    assert [m.detected_by for m in (await client.story(answer.seq)).moves] == ["error_event"]


async def test_an_aborted_stream_of_several_choices_is_no_finish(stage: Stage) -> None:
    """What cannot be continued ends in one error, and neither `abort` nor `[DONE]` reaches the client."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    stage.faults.append(Fault("abort", 30))
    answer = await client.ask(CHAT, request(CHAT, n=2))
    assert answer.error is not None
    assert not answer.done
    assert "abort" not in answer.finishes


async def test_default_budgets_hold_across_the_seam(stage: Stage) -> None:
    """Without max_tokens: 16 for completions, the model's room for chat."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    for path in (COMPLETIONS, CHAT):
        body = request(path)
        del body["max_tokens"]
        stage.faults.append(Fault("die", 7))
        answer = await client.ask(path, body)
        assert_uninterrupted(answer, path, body)
        await all_up(client)


async def test_the_resumed_request_carries_reduced_budgets_and_no_chat_fields(stage: Stage) -> None:
    """What the second engine is asked: prompt + delivered ids, budgets less what was delivered."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    body = request(CHAT, min_tokens=10, user="u", temperature=0, cache_salt="s", my_extra=[1])
    stage.faults.append(Fault("die", 4))
    assert_uninterrupted(await client.ask(CHAT, body), CHAT, body)
    resumed = next(s for e in engines for s in e.seen if s.path == COMPLETIONS)
    delivered = len(resumed.body["prompt"]) - len(generate(CHAT, body)[0])
    assert resumed.body["max_tokens"] == LENGTH - delivered
    assert resumed.body["min_tokens"] == 10 - delivered
    assert resumed.body["cache_salt"] == "s"
    assert resumed.body["my_extra"] == [1]
    assert "messages" not in resumed.body
    assert "kv_transfer_params" not in resumed.body


async def test_the_fake_engine_continues_deterministically() -> None:
    """The oracle itself: resuming by ids gives the rest of the same answer."""
    body = request(COMPLETIONS)
    prompt, output, _ = generate(COMPLETIONS, body)
    assert next_token(prompt + output[:3]) == output[3]
    rest = generate(COMPLETIONS, body | {"prompt": prompt + output[:9], "max_tokens": LENGTH - 9})[1]
    assert output[:9] + rest == output


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_many_answers_under_random_failures(stage: Stage, seed: int) -> None:
    """Sixty answers at once, most of them failing somewhere: each is the uninterrupted one."""
    random = Random(seed)
    engines = [await stage.engine(chunk_tokens=random.choice([1, 1, 2])) for _ in range(3)]
    client = await stage.router(
        engines, failover={"max_moves": 30}, timeouts={"failover_ms": 8_000, "health_interval_ms": 20}
    )
    for _ in range(50):
        stage.faults.append(Fault(random.choice(KINDS), random.randrange(LENGTH + 1)))
    asked = []
    for number in range(60):
        path = random.choice([COMPLETIONS, CHAT])
        body = request(path, stream=random.random() < 0.7, return_token_ids=random.random() < 0.5)
        if path == COMPLETIONS:
            body["prompt"] = f"question {number}"
        else:
            body["messages"][0]["content"] = f"question {number}"
        asked.append((path, body))
    answers = await asyncio.gather(*(client.ask(path, body) for path, body in asked))
    for answer, (path, body) in zip(answers, asked, strict=True):
        assert_uninterrupted(answer, path, body)
    await eventually(lambda: not client.context.running, "nothing is active")
    assert all(not engine.attempts for engine in client.context.registry.engines)

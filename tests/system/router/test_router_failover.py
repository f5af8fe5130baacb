"""Answers that survive: every failure, at every moment, on both APIs, streamed and not."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from segue_router.choose import Candidate, rank_new
from system.router.fake_engine import EMOJI, Fault, generate, next_token, text_of
from system.router.harness import Answer, Client, Stage, eventually, session_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTH = 24
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


def request(path: str, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "fake", "max_tokens": LENGTH, "stream": True}
    if path == CHAT:
        base["messages"] = [{"role": "user", "content": "hello there"}]
    else:
        base["prompt"] = "hello there"
    return base | more


def assert_uninterrupted(answer: Answer, path: str, body: dict[str, Any]) -> None:
    """The answer is the one of an engine that never failed."""
    prompt, output, finish = generate(path, body)
    if not body.get("stream"):
        assert answer.status == 200, answer.body
        choice = answer.body["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert (text, choice["finish_reason"]) == (text_of(output), finish)
        assert answer.body["usage"]["completion_tokens"] == len(output)
        assert answer.body["usage"]["prompt_tokens"] == len(prompt)
        if body.get("return_token_ids"):
            assert choice["token_ids"] == output
        return
    assert answer.error is None, answer.error
    assert answer.done
    assert answer.text == text_of(output)
    assert answer.finishes == [finish]
    for key in ("id", "created", "model", "object"):
        assert len({event[key] for event in answer.events}) == 1, key
    assert all(choice["index"] == 0 for choice in answer.choices)
    if path == CHAT:
        assert [c["delta"].get("role") for c in answer.choices].count("assistant") == 1
        assert "role" in answer.choices[0]["delta"]
    if body.get("return_token_ids"):
        assert answer.ids == output
        holders = answer.events if path == CHAT else answer.choices
        assert [h["prompt_token_ids"] for h in holders if h.get("prompt_token_ids")] == [prompt]
    else:
        assert not any("token_ids" in c or "prompt_token_ids" in c for c in answer.choices)
    options = body.get("stream_options") or {}
    usages = [event["usage"] for event in answer.events if event.get("usage")]
    if options.get("include_usage"):
        total = len(prompt) + len(output)
        assert usages[-1] == {
            "prompt_tokens": len(prompt),
            "total_tokens": total,
            "completion_tokens": len(output),
        }
        assert answer.events[-1]["choices"] == []
    else:
        assert usages == []


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
        await _all_up(client)


async def _all_up(client: Client) -> None:
    engines = client.context.registry.engines
    await eventually(lambda: all(e.health.state == "up" for e in engines), "all engines are up again")


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
        await _all_up(client)


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
        await _all_up(client)


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


async def test_a_long_prefill_is_not_a_failure(stage: Stage) -> None:
    """Before the first token, the stall time-out does not apply."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    stage.faults.append(Fault("slow_first", delay_s=0.8))
    body = request(COMPLETIONS)
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert (await client.story(answer.seq)).moves == ()


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
    await _all_up(client)
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
        await _all_up(client)


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
    await _all_up(client)
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

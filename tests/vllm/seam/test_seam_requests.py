"""Real vLLM: what is asked around the answer itself: how it broke, how often, who did not want it moved."""

from __future__ import annotations

from typing import Any

import pytest

from segue_ctl import metrics
from segue_ctl.waiting import wait_for
from support.cut_proxy import Cut, data_of
from support.seam.cases import PATHS, PROMPT, SILENCE, THIRD, WAYS, Api, Body, Column, Row, cut_at
from support.seam.cell import judge, lacking, run_cell
from support.seam.joined import not_a_prefix
from support.seam.results import Record
from support.seam.stage import Got, Reference, Stage

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

PLAIN = Row("plain")
DETECTED_BY = {
    "reset": "stream_eof",
    "eof": "stream_eof",
    "error": "error_event",
    "malformed": "malformed_event",
    "silence": "stalled",
}
columns = pytest.mark.parametrize("column", ["exact", "by_ids"])
apis = pytest.mark.parametrize("api", ["completions", "chat"])
streams = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def asked(api: Api, stream: bool) -> str:
    return f"{api}, {'streamed' if stream else 'whole'}"


@columns
@apis
@pytest.mark.parametrize("how", [*WAYS, SILENCE])
async def test_an_answer_goes_on_however_it_broke(
    stage: Stage, record: Record, column: Column, api: Api, how: Any
) -> None:
    """Reset, end without a finish, error event and `[DONE]`, nonsense, silence: found, and told apart."""
    result = await run_cell(stage, column, PLAIN, api, THIRD, stream=True, how=how)
    record("every way of breaking", column, asked(api, True), how, result.result or "failed")
    assert result.result == "equal", result.problems
    assert result.detected_by == (DETECTED_BY[how],)
    assert result.how == (column,)


@apis
@streams
async def test_a_request_without_a_seed_gets_one(
    stage: Stage, record: Record, api: Api, stream: bool
) -> None:
    """Its own draw, and the same one after the seam: the answer is that of an engine asked with that seed."""
    sampled = Row("sampled", {"temperature": 1.0})
    body = sampled.request(api, stream, stage.cluster.model, {})
    await stage.ready("exact")
    stage.breaker.arm(cut_at(THIRD, body["max_tokens"], api, "reset"))
    got = await stage.ask(stage.url("exact"), PATHS[api], body)
    seeds = [each.body.get("seed") for each in stage.breaker.served]
    assert len(seeds) == 2 and seeds[0] == seeds[1] and isinstance(seeds[0], int)
    reference = await stage.ask(stage.cluster.engine_url("a"), PATHS[api], {**body, "seed": seeds[0]})
    verdict = judge(Reference(reference, 0, {}), got, stream=stream)
    record("temperature without a seed", "exact", asked(api, stream), THIRD, verdict.result or "failed")
    assert verdict.result == "equal", verdict.problems
    other = await stage.ask(stage.url("exact"), PATHS[api], body)
    assert stage.breaker.served[-1].body["seed"] != seeds[0]
    assert judge(Reference(reference, 0, {}), other, stream=stream).problems


async def test_a_request_without_a_seed_is_one_sample_by_ids(stage: Stage, record: Record) -> None:
    """What the client has is the beginning of what it gets; the rest is drawn anew."""
    body = Row("sampled", {"temperature": 1.0}).request("completions", True, stage.cluster.model, {})
    await stage.ready("by_ids")
    stage.breaker.arm(cut_at(THIRD, body["max_tokens"], "completions", "reset"))
    got = await stage.ask(stage.url("by_ids"), PATHS["completions"], body)
    (choice,) = got.joined().choices.values()
    first, second = stage.breaker.served
    assert "seed" not in first.body and "seed" not in second.body
    prompt = data_of(first.events)[0]["choices"][0]["prompt_token_ids"]
    before = second.body["prompt"][len(prompt) :]
    after = [i for event in data_of(second.events) for c in event["choices"] for i in c["token_ids"]]
    assert before and second.body["prompt"][: len(prompt)] == prompt
    assert choice["token_ids"] == before + after
    assert len(choice["token_ids"]) == body["max_tokens"]
    record("temperature without a seed", "by_ids", "completions, streamed", THIRD, "sample")


@columns
@apis
@streams
async def test_an_answer_survives_several_failures(
    stage: Stage, record: Record, column: Column, api: Api, stream: bool
) -> None:
    """One engine, the other, the first again: the second time each is asked for more."""
    reference = await stage.reference(PLAIN, api, stream=stream)
    body = PLAIN.request(api, stream, stage.cluster.model, {})
    await stage.ready(column)
    # Exact: a resumed stream begins with all that was delivered.
    counts = (6, 12, 18) if column == "exact" else (6, 6, 6)
    stage.breaker.arm(*(Cut("tokens", count) for count in counts))
    got = await stage.ask(stage.url(column), PATHS[api], body)
    verdict = judge(reference, got, stream=stream, without=lacking(column, PLAIN))
    record(
        "several failures of one request", column, asked(api, stream), "6, 12, 18", verdict.result or "failed"
    )
    assert verdict.result == "equal", verdict.problems
    engines = [each.engine for each in stage.breaker.served]
    assert engines in (list("abab"), list("baba"))
    assert [move.how for move in await stage.moves(column, got.seq)] == [column] * 3


@columns
@streams
async def test_a_request_that_kills_its_engines_ends(
    stage: Stage, record: Record, column: Column, stream: bool
) -> None:
    """After the moves that are allowed: one error, and nothing wrong before it."""
    reference = await stage.reference(PLAIN, "chat", stream=stream)
    await stage.ready(column)
    stage.breaker.arm(*(Cut("tokens", count) for count in (6, 8, 10, 12)))
    body = PLAIN.request("chat", stream, stage.cluster.model, {})
    got = await stage.ask(stage.url(column), PATHS["chat"], body)
    error_of(got, reference, stream=stream, code="stream_eof")
    assert len(stage.breaker.served) == 4
    record(
        "more failures than allowed", column, asked("chat", stream), "6, 8, 10, 12", "refused", "max_moves"
    )


@columns
@streams
async def test_a_client_may_refuse_failover(
    stage: Stage, record: Record, column: Column, stream: bool
) -> None:
    """`x-segue-failover: off`: the failure is the client's to handle."""
    reference = await stage.reference(PLAIN, "chat", stream=stream)
    await stage.ready(column)
    stage.breaker.arm(Cut("tokens", 8))
    body = PLAIN.request("chat", stream, stage.cluster.model, {})
    got = await stage.ask(stage.url(column), PATHS["chat"], body, {"x-segue-failover": "off"})
    error_of(got, reference, stream=stream, code="stream_eof")
    assert len(stage.breaker.asked) == 1
    record("failover off for one request", column, asked("chat", stream), "8", "refused", "off")


def error_of(got: Got, reference: Reference, *, stream: bool, code: str) -> None:
    """Exactly one error, in the form that belongs to the answer."""
    if not stream:
        assert got.status == 502 and got.body["error"]["code"] == code, got
        return
    joined = got.joined()
    assert joined.error is not None and joined.error["code"] == code, joined.error
    assert not joined.done
    assert joined.choices, "the error came before what was good"
    assert not_a_prefix(reference.got.joined(), joined) == []


@columns
async def test_nothing_generates_for_a_client_that_left_during_the_failover(
    stage: Stage, record: Record, column: Column
) -> None:
    """Whether the next engine has begun or not: it stops, and the story says why."""
    endless: Body = {"max_tokens": 900, "ignore_eos": True}
    body = {**PLAIN.request("completions", True, stage.cluster.model, {}), **endless}
    await stage.ready(column)
    stage.breaker.arm(Cut("tokens", 10))
    url = stage.url(column) + PATHS["completions"]
    async with stage.cluster.session.post(url, json=body) as answer:
        seq = answer.headers["x-segue-seq"]
        while len(stage.breaker.served) < 2 or not stage.breaker.served[1].events:
            assert await answer.content.readany(), "the answer ended"
        answer.close()
    await wait_for("no engine generates", lambda: running(stage), timeout_s=5)
    assert sum(len(each.events) for each in stage.breaker.served) < 600
    assert (await stage.story(column, seq)).outcome == "client_left"
    record("the client leaves during the failover", column, "completions, streamed", "10", "equal")


async def running(stage: Stage) -> str:
    """Which engines still have requests; empty if none has."""
    texts = [
        await metrics.scrape(stage.cluster.session, stage.cluster.engine_url(name))
        for name in stage.cluster.specs
    ]
    counts = [metrics.sum_by_label(text, "vllm:num_requests_running").get("", -1) for text in texts]
    return "" if counts == [0.0, 0.0] else f"running: {counts}"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_break_honestly(stage: Stage, record: Record, path: str) -> None:
    """Not continued: an error in the form of that API, and no event that says that all is well."""
    body: dict[str, Any] = {"model": stage.cluster.model, "stream": True, "temperature": 0}
    if path == "/v1/responses":
        body |= {"input": PROMPT, "max_output_tokens": 24, "store": False}
    else:
        body |= {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24}
    await stage.ready("exact")
    stage.breaker.arm()
    whole = [each.get("type") for each in events(await stage.ask(stage.url("exact"), path, body))]
    assert whole[-1] in ("response.completed", "response.incomplete", "message_stop")
    stage.breaker.arm(Cut("events", 6))
    got = events(await stage.ask(stage.url("exact"), path, body))
    assert [each.get("type") for each in got] == [*whole[:6], "error"]
    record("/v1/responses, /v1/messages", "exact", f"{path}, streamed", "6 events", "refused", "another API")


def events(got: Got) -> list[dict[str, Any]]:
    assert got.status == 200, got.body
    return data_of([b"data: " + payload for payload in got.payloads])

"""Exact continuation: engines that say everything again, joined into one stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.messages.request import SegueParams
from segue_router.errors import MalformedEvent, ReplayDiffers
from segue_router.request import parse_request
from segue_router.resume import Exact, Finish, Restart, Target, how_to_resume
from segue_router.transcript import Transcript
from support.answers import (
    CALLS,
    CHANGES,
    Answer,
    Reading,
    answers,
    events_of,
    heard,
    lives,
    sizes,
    usage_event,
)

ABLE = Target(1000, exact=frozenset({"output", "seed", "grammar"}))

PARAMS = SegueParams("s", 2, resume=True)


@given(answers(), lives, sizes, st.booleans())
def test_any_cuts_any_number_of_times_give_the_uncut_stream(
    answer: Answer,
    broken: list[tuple[list[int], int, list[int], bool]],
    last: list[int],
    wants_ids: bool,
) -> None:
    """Streams cut at any byte, resumed exactly, several times, with other chunks each time: the same text in
    every field, tool calls, ids, log probabilities, finishes and usage; one name, one role a choice."""
    asked = answer.request(return_token_ids=wants_ids, stream_options={"include_usage": True})
    uncut = Reading(asked)
    nothing = [0] * len(answer.choices)
    whole = [*events_of(answer, "uncut", nothing, [1], one_by_one=False), usage_event(answer)]
    uncut.read(whole, [], None)
    uncut.out += uncut.transcript.closing()

    joined = Reading(asked)
    delivered = nothing
    finished = False
    for number, (chunks, until, cuts, one_by_one) in enumerate(broken):
        events = events_of(answer, f"life{number}", delivered, chunks, one_by_one=one_by_one)
        joined.read([*events, usage_event(answer)], cuts, until)
        if joined.transcript.done:
            finished = True
            break
        plan = how_to_resume(asked, joined.transcript.progress, ABLE, PARAMS)
        if isinstance(plan, Finish):
            finished = True
            break
        assert isinstance(plan, (Exact, Restart))
        told = plan.body["kv_transfer_params"]["segue"].get("delivered", [])
        delivered = [len(each.get("ids", ())) for each in told] or nothing
        joined.transcript.next_engine("exact" if isinstance(plan, Exact) else "restart")
    if not finished:
        events = events_of(answer, "last", delivered, last, one_by_one=False)
        joined.read([*events, usage_event(answer)], [], None)
    assert joined.transcript.finish_reason == "stop"
    joined.out += joined.transcript.closing()
    one, other = heard(joined.out), heard(uncut.out)
    assert one.same_as(other), (one, other)
    assert len(one.call_ids) == len({(index, call) for index, call, _ in one.call_ids}), "one id a call"


def resumed(answer: Answer, tokens: int, **more: Any) -> Transcript:
    """A transcript that has so many tokens of its first choice, about to be continued exactly."""
    asked = answer.request(**more)
    transcript = Transcript(asked, 1000)
    for event in events_of(answer, "one", [0], [1], one_by_one=False)[: tokens + (answer.api == "chat")]:
        transcript.absorb(json.dumps(event).encode())
    plan = how_to_resume(asked, transcript.progress, ABLE, PARAMS)
    assert isinstance(plan, Exact)
    transcript.next_engine("exact")
    return transcript


def test_the_original_body_goes_to_the_standby_with_what_was_delivered() -> None:
    """Unchanged, but for what engines are always asked for; ids whose text is not there yet come along."""
    answer = Answer("chat", [[{"content": "a"}, {"content": ""}, {"content": "b"}]])
    asked = answer.request(presence_penalty=1.5, stop=["x"], unknown={"k": 1}, max_tokens=9)
    transcript = Transcript(asked, 1000)
    for event in events_of(answer, "one", [0], [1], one_by_one=False)[:3]:
        transcript.absorb(json.dumps(event).encode())
    plan = how_to_resume(asked, transcript.progress, ABLE, PARAMS)
    assert isinstance(plan, Exact)
    assert plan.path == "/v1/chat/completions"
    told = plan.body.pop("kv_transfer_params")["segue"]
    assert told == {"seq": "s", "epoch": 2, "resume": True, "delivered": [{"ids": [0, 1]}]}
    assert plan.body == asked.body | {"return_token_ids": True}


@pytest.mark.parametrize(("what", "change"), CHANGES)
def test_a_replay_that_differs_is_noticed_before_anything_is_sent(what: str, change: dict[str, Any]) -> None:
    """Other ids, text or prompt than what the client has: no continuation of this answer."""
    answer = Answer("completions", [[{"content": text} for text in "abcd"]])
    transcript = resumed(answer, 2)
    before = transcript.progress
    event = events_of(answer, "two", [2], [1], one_by_one=False)[0]
    event["choices"][0] |= change
    with pytest.raises(ReplayDiffers):
        transcript.absorb(json.dumps(event).encode())
    assert transcript.progress == before


def test_another_tool_call_in_the_replay_is_noticed() -> None:
    """The client has a call with another name, or other arguments."""
    answer = Answer("chat", [[*CALLS[:3], {"content": "."}]])
    other = {"tool_calls": [{"index": 0, "id": "z", "function": {"name": "other"}}]}
    for at, delta in ((0, other), (1, {"tool_calls": [{"index": 0, "function": {"arguments": "[1"}}]})):
        changed = Answer("chat", [[*answer.choices[0][:at], delta, *answer.choices[0][at + 1 :]]])
        transcript = resumed(answer, 3)
        with pytest.raises(ReplayDiffers):
            for event in events_of(changed, "two", [3], [1], one_by_one=True):
                transcript.absorb(json.dumps(event).encode())


def test_a_finished_choice_stays_finished() -> None:
    """Its index is said again by the engine, and nobody hears of it; the other one goes on."""
    answer = Answer("completions", [[{"content": "a"}], [{"content": text} for text in "bcd"]])
    asked = answer.request()
    transcript = Transcript(asked, 1000)
    out = b""
    for event in events_of(answer, "one", [0, 0], [1], one_by_one=False)[:3]:
        out += transcript.absorb(json.dumps(event).encode())
    plan = how_to_resume(asked, transcript.progress, ABLE, PARAMS)
    assert isinstance(plan, Exact)
    assert plan.body["kv_transfer_params"]["segue"]["delivered"] == [
        {"ids": [0], "finish_reason": "stop"},
        {"ids": [1000, 1001]},
    ]
    transcript.next_engine("exact")
    for event in events_of(answer, "two", [1, 2], [1], one_by_one=False):
        out += transcript.absorb(json.dumps(event).encode())
    found = heard(out + transcript.closing())
    assert found.finishes == [(0, "stop"), (1, "stop")]
    assert (found.texts[0, "content"], found.texts[1, "content"]) == ("a", "bcd")


def test_usage_of_several_choices_is_counted_when_the_engine_cannot_say_it_any_more() -> None:
    """The engine died between the last token and the usage: prompt once, tokens of all choices."""
    answer = Answer("completions", [[{"content": "a"}], [{"content": text} for text in "bcd"]])
    asked = answer.request(stream_options={"include_usage": True})
    transcript = Transcript(asked, 1000)
    for event in events_of(answer, "one", [0, 0], [1], one_by_one=False):
        transcript.absorb(json.dumps(event).encode())
    assert how_to_resume(asked, transcript.progress, Target(), None) == Finish("stop")
    (usage,) = heard(b"" + transcript.closing()).usage
    assert usage == {"prompt_tokens": 3, "completion_tokens": 4}


def test_an_echoed_prompt_is_said_once() -> None:
    """Engines that name ids leave the prompt out (vLLM 0.32); the router knows it."""
    answer = Answer("completions", [[{"content": text} for text in "abcd"]])
    asked = answer.request(echo=True)
    assert asked.engine_body(None)["return_token_ids"] is True
    transcript = Transcript(asked, 1000)
    out = b""
    for event in events_of(answer, "one", [0], [1], one_by_one=False)[:2]:
        out += transcript.absorb(json.dumps(event).encode())
    transcript.next_engine("exact")
    for event in events_of(answer, "two", [2], [1], one_by_one=False):
        out += transcript.absorb(json.dumps(event).encode())
    assert heard(out + transcript.closing()).texts[0, "content"] == "hiabcd"


def test_ids_are_not_asked_for_where_that_would_change_the_answer() -> None:
    """An echo of a prompt that is known as ids only: it cannot be resumed, but it is what was asked for."""
    asked = parse_request("/v1/completions", b'{"prompt": [1, 2], "echo": true, "stream": true}')
    assert "return_token_ids" not in asked.engine_body(None)
    transcript = Transcript(asked, 100)
    out = transcript.absorb(b'{"choices": [{"index": 0, "text": "hi there", "finish_reason": null}]}')
    assert b"hi there" in out
    assert not isinstance(how_to_resume(asked, transcript.progress, ABLE, PARAMS), Exact)


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": 5},
        {"tool_calls": [5]},
        {"tool_calls": [{"index": "0"}]},
        {"tool_calls": [{"index": 0, "function": 5}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": {}}}]},
    ],
)
def test_malformed_tool_calls(delta: dict[str, Any]) -> None:
    """Named as such, and nothing of them counts."""
    asked = Answer("chat", [[{"content": "a"}]]).request()
    transcript = Transcript(asked, 100)
    choice = {"index": 0, "delta": delta, "token_ids": [1], "finish_reason": None}
    with pytest.raises(MalformedEvent):
        transcript.absorb(json.dumps({"id": "x", "choices": [choice]}).encode())
    assert not transcript.progress.client_has


def test_the_usual_event_passes_as_it_is() -> None:
    """Of the first engine's plain events only the ids are taken out: every other byte is the engine's."""
    asked = Answer("chat", [[{"content": "a"}]]).request()
    transcript = Transcript(asked, 100)
    head = b'{"id":"x","object":"o","created":1,"model":"m","odd":[1,{"k":"v"}],"choices":[{"index":0,'
    role = head + b'"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":[1]}'
    transcript.absorb(role)
    text = rb'"delta":{"content":"say \",\"token_ids\":[1] \u00e9"},"logprobs":null,"finish_reason":null'
    out = transcript.absorb(head + text + b',"token_ids":[5,6]}]}')
    assert out == b"data: " + head + text + b"}]}\n\n"
    assert transcript.progress.choices[0].ids == [5, 6]

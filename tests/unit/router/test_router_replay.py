"""Exact continuation: engines that say everything again, joined into one stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.messages.request import SegueParams
from segue_router.errors import MalformedEvent, ReplayDiffers
from segue_router.request import GenerationRequest, parse_request
from segue_router.resume import Exact, Finish, Restart, Target, how_to_resume
from segue_router.sse import SseSplitter
from segue_router.transcript import Transcript

PROMPT = [7, 8, 9]
ABLE = Target(1000, exact=frozenset({"output", "seed", "grammar"}))
PARAMS = SegueParams("s", 2, resume=True)

CONTENT = [{"content": text} for text in ("a", " b", "", "é", "", "😀 ", "x\ufffd", "y")]
REASONING = [{"reasoning": text} for text in ("hm", " so", "")]
CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"index": 0, "id": "?", "type": "function", "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"q'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
    {"tool_calls": [{"index": 1, "id": "?", "type": "function", "function": {"name": "g"}}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
]
deltas = st.lists(st.sampled_from([*CONTENT, *REASONING]), max_size=6).flatmap(
    lambda start: st.integers(0, len(CALLS)).map(lambda count: [*start, *CALLS[:count], {"content": "."}])
)
"""What each token of a chat answer brings: text of either kind, then tool calls, then the last word."""


@dataclass
class Answer:
    """What was asked, and what an engine that nobody disturbs says: per choice, what each token brings."""

    api: str
    choices: list[list[dict[str, Any]]]
    logprobs: bool = False

    def request(self, **more: Any) -> GenerationRequest:
        body: dict[str, Any] = {"model": "m", "stream": True, "n": len(self.choices), "seed": 5} | more
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": "hi"}]
            return parse_request("/v1/chat/completions", json.dumps(body).encode())
        body["prompt"] = "hi"
        return parse_request("/v1/completions", json.dumps(body).encode())

    def ids(self, choice: int) -> list[int]:
        return [1000 * choice + at for at in range(len(self.choices[choice]))]


def merged(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Several tokens in one delta, as a parser gives it that was fed with all of them."""
    whole: dict[str, Any] = {}
    for delta in deltas:
        for key, value in delta.items():
            if key == "tool_calls":
                whole.setdefault(key, []).extend(json.loads(json.dumps(value)))
            else:
                whole[key] = whole.get(key, "") + value
    return whole


def events_of(
    answer: Answer, name: str, delivered: list[int], sizes: list[int], *, one_by_one: bool
) -> list[dict[str, Any]]:
    """The events of one engine. `delivered`: tokens a choice that it only says again; `sizes`: how many new
    tokens its events bring, in turn."""
    chat = answer.api == "chat"
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"id": name, "object": kind, "created": len(name), "model": "m"}
    events: list[dict[str, Any]] = []
    if chat:
        for index in range(len(answer.choices)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            events.append(head | {"choices": [choice], "prompt_token_ids": PROMPT})
    at = [0] * len(answer.choices)
    turn = 0
    while any(at[i] < len(steps) for i, steps in enumerate(answer.choices)):
        index = turn % len(answer.choices)
        steps = answer.choices[index]
        if at[index] < len(steps):
            size = sizes[turn % len(sizes)]
            if at[index] < delivered[index]:
                size = 1 if one_by_one else delivered[index] - at[index] + size
            end = min(len(steps), at[index] + size)
            events.append(head | {"choices": [said(answer, name, index, at[index], end)]})
            at[index] = end
        turn += 1
    return events


def said(answer: Answer, name: str, index: int, start: int, end: int) -> dict[str, Any]:
    steps = answer.choices[index]
    ids = answer.ids(index)[start:end]
    choice: dict[str, Any] = {"index": index, "logprobs": None, "token_ids": ids}
    choice["finish_reason"] = "stop" if end == len(steps) else None
    if answer.api == "chat":
        choice["delta"] = merged(steps[start:end])
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                call["id"] = f"{name}-{index}-{call['index']}"
        if answer.logprobs:
            choice["logprobs"] = {"content": [{"token": str(i), "logprob": -float(i)} for i in ids]}
        return choice
    choice["text"] = merged(steps[start:end]).get("content", "")
    if start == 0:
        choice["prompt_token_ids"] = PROMPT
    if answer.logprobs:
        tokens = [str(i) for i in ids]
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": ids,
            "text_offset": ids,
            "top_logprobs": None,
        }
    return choice


@dataclass
class Heard:
    """What a client makes of a stream."""

    names: set[tuple[Any, ...]] = field(default_factory=set)
    roles: list[int] = field(default_factory=list)
    texts: dict[tuple[int, str], str] = field(default_factory=dict)
    calls: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    call_ids: list[tuple[int, int, str]] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finishes: list[tuple[int, str]] = field(default_factory=list)
    usage: list[dict[str, int]] = field(default_factory=list)

    def same_as(self, other: Heard) -> bool:
        mine, theirs = vars(self), vars(other)
        skip = ("names", "call_ids", "finishes", "usage")
        return (
            all(mine[key] == theirs[key] for key in mine if key not in skip)
            and len(self.names) == len(other.names)
            and sorted(self.finishes) == sorted(other.finishes)
            and [(i, k) for i, k, _ in sorted(self.call_ids)]
            == [(i, k) for i, k, _ in sorted(other.call_ids)]
            and self.usage == other.usage
        )


def heard(data: bytes) -> Heard:
    """Read a client's stream; it must end properly."""
    assert data.endswith(b"data: [DONE]\n\n")
    found = Heard()
    for payload in SseSplitter(1 << 20).feed(data)[:-1]:
        event = json.loads(payload)
        found.names.add((event["id"], event["created"], event["model"], event["object"]))
        if event.get("usage"):
            usage = event["usage"]
            found.usage.append({key: usage[key] for key in ("prompt_tokens", "completion_tokens")})
        for choice in event["choices"]:
            hear_choice(found, choice)
    return found


def hear_choice(found: Heard, choice: dict[str, Any]) -> None:
    index = choice["index"]
    delta = choice.get("delta", {"content": choice.get("text", "")})
    if "role" in delta:
        found.roles.append(index)
    for key in ("content", "reasoning"):
        found.texts[index, key] = found.texts.get((index, key), "") + (delta.get(key) or "")
    for call in delta.get("tool_calls", ()):
        known = found.calls.setdefault((index, call["index"]), {"name": "", "arguments": ""})
        for key in known:
            known[key] += call.get("function", {}).get(key) or ""
        if "id" in call:
            found.call_ids.append((index, call["index"], call["id"]))
    found.ids.setdefault(index, []).extend(choice.get("token_ids", ()))
    told = choice.get("logprobs") or {}
    found.logprobs.setdefault(index, []).extend(told.get("content", told.get("tokens", ())))
    if choice["finish_reason"]:
        found.finishes.append((index, choice["finish_reason"]))


class Reading:
    """A transcript that is fed through the splitter, in pieces of any size."""

    def __init__(self, asked: GenerationRequest) -> None:
        self.transcript = Transcript(asked, 10_000)
        self.out = b""

    def read(self, events: list[dict[str, Any]], cuts: list[int], until: int | None) -> None:
        """The bytes of `events` and [DONE], cut at each of `cuts`, up to byte `until` (None: all)."""
        data = b"".join(
            b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events
        )
        data = (data + b"data: [DONE]\n\n")[:until]
        splitter = SseSplitter(1 << 20)
        places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        for start, end in pairwise(places):
            for payload in splitter.feed(data[start:end]):
                if not self.transcript.done:
                    self.out += self.transcript.absorb(payload)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    api = draw(st.sampled_from(["chat", "completions"]))
    steps = deltas if api == "chat" else st.lists(st.sampled_from(CONTENT), min_size=1, max_size=8)
    return Answer(api, draw(st.lists(steps, min_size=1, max_size=3)), draw(st.booleans()))


def usage_event(answer: Answer) -> dict[str, Any]:
    completion = sum(map(len, answer.choices))
    usage = {"prompt_tokens": 3, "completion_tokens": completion, "total_tokens": 3 + completion}
    return {"id": "u", "object": "o", "created": 1, "model": "m", "choices": [], "usage": usage}


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
lives = st.lists(
    st.tuples(sizes, st.integers(0, 2500), st.lists(st.integers(0, 5000), max_size=6), st.booleans()),
    max_size=4,
)


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


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("other ids", {"token_ids": [9, 9, 9]}),
    ("other text", {"text": "Abc"}),
    ("another prompt", {"prompt_token_ids": [1]}),
]


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

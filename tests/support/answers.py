"""Answers of engines of any kind, as they are streamed, and what a client has of a stream that it heard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from segue_router.request import GenerationRequest, parse_request
from segue_router.sse import SseSplitter
from segue_router.transcript import Transcript

PROMPT = [7, 8, 9]

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

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("other ids", {"token_ids": [9, 9, 9]}),
    ("other text", {"text": "Abc"}),
    ("another prompt", {"prompt_token_ids": [1]}),
]

"""The transcript: the joined stream equals the uncut one, whatever the cuts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_router.assemble import response_object
from segue_router.errors import EngineFault, MalformedEvent
from segue_router.request import GenerationRequest, parse_request
from segue_router.resume import ByIds, Finish, Refuse, Restart, Target, how_to_resume
from segue_router.transcript import Transcript

PROMPT = [7, 8, 9]
PIECES = ["a", " b", "", "", "é", "c ", "", "😀", "x"]
"""The text that each token completes; empty: the token is part of a character that goes on."""
LIMIT = 1000


def request(api: str = "completions", **more: Any) -> GenerationRequest:
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 50} | more
    if api == "chat":
        body["messages"] = [{"role": "user", "content": "hi"}]
        return parse_request("/v1/chat/completions", json.dumps(body).encode())
    body["prompt"] = "hi"
    return parse_request("/v1/completions", json.dumps(body).encode())


def chunk(api: str, name: str, text: str, ids: list[int], finish: str | None = None, **extra: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    choice |= {"delta": {"content": text}} if api == "chat" else {"text": text}
    if finish:
        choice["stop_reason"] = None
    kind = "chat.completion.chunk" if api == "chat" else "text_completion"
    head = {"id": name, "object": kind, "created": len(name), "model": "m"}
    return json.dumps(head | {"choices": [choice]} | extra).encode()


def stream(api: str, name: str, start: int, sizes: list[int], chat_form: bool) -> list[bytes]:
    """Events of an engine that goes on at token `start` of PIECES, in chunks of the given sizes."""
    events = []
    form = "chat" if chat_form else "completions"
    if chat_form:
        first = json.loads(chunk("chat", name, "", []))
        first["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        del first["choices"][0]["token_ids"]
        first["prompt_token_ids"] = PROMPT
        events.append(json.dumps(first).encode())
    at = start
    for size in [*sizes, len(PIECES)]:
        ids = list(range(100 + at, min(100 + at + size, 100 + len(PIECES))))
        if not ids:
            break
        text = "".join(PIECES[i - 100] for i in ids)
        at += len(ids)
        finish = "stop" if at == len(PIECES) else None
        event = json.loads(chunk(form, name, text, ids, finish))
        if at == start + len(ids) and not chat_form:
            event["choices"][0]["prompt_token_ids"] = PROMPT
        events.append(json.dumps(event).encode())
    usage = {"prompt_tokens": 3, "completion_tokens": len(PIECES), "total_tokens": 3 + len(PIECES)}
    last = {"id": name, "object": "o", "created": 1, "model": "m", "choices": [], "usage": usage}
    events.append(json.dumps(last).encode())
    return events


def events_in(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in data.split(b"\n\n") if part and part != b"data: [DONE]"]


def text_in(data: bytes) -> str:
    found = ""
    for event in events_in(data):
        for choice in event["choices"]:
            found += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


def ids_in(data: bytes) -> list[int]:
    return [i for e in events_in(data) for c in e["choices"] for i in c.get("token_ids", ())]


@given(
    st.sampled_from(["completions", "chat"]),
    st.lists(st.tuples(st.lists(st.integers(1, 1), max_size=9), st.integers(0, 12)), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_the_joined_stream_equals_the_uncut_one(
    api: str, lives: list[tuple[list[int], int]], wants_ids: bool, wants_usage: bool
) -> None:
    """Engines that fail after any number of events: same text, ids and usage, one id, one preamble."""
    more: dict[str, Any] = {"return_token_ids": True} if wants_ids else {}
    if wants_usage:
        more["stream_options"] = {"include_usage": True}
    asked = request(api, **more)
    transcript = Transcript(asked, LIMIT)
    out = b""
    start, by_ids = 0, False
    for number, (sizes, events) in enumerate([*lives, ([], 99)]):
        for payload in stream(api, f"life{number}", start, sizes or [1] * 9, api == "chat" and not by_ids)[
            :events
        ]:
            out += transcript.absorb(payload)
        if transcript.finish_reason:
            break
        plan = how_to_resume(asked, transcript.progress, Target(1000), None)
        assert isinstance(plan, (ByIds, Restart))
        by_ids = isinstance(plan, ByIds)
        if isinstance(plan, ByIds):
            done = len(transcript.progress.delivered_ids)
            assert plan.body["prompt"] == PROMPT + [100 + i for i in range(done)]
            assert plan.body["max_tokens"] == 50 - done
        transcript.next_engine("by_ids" if by_ids else "restart")
        start = len(transcript.progress.delivered_ids)
    out += transcript.closing()
    assert out.endswith(b"data: [DONE]\n\n")
    assert text_in(out) == "".join(PIECES)
    events_out = events_in(out)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events_out}) == 1
    assert ids_in(out) == ([100 + i for i in range(len(PIECES))] if wants_ids else [])
    finishes = [c["finish_reason"] for e in events_out for c in e["choices"] if c["finish_reason"]]
    assert finishes == ["stop"]
    if api == "chat":
        roles = [c["delta"].get("role") for e in events_out for c in e["choices"]]
        assert roles[0] == "assistant"
        assert roles.count("assistant") == 1
    usages = [e["usage"] for e in events_out if e.get("usage")]
    assert len(usages) == wants_usage
    if wants_usage:
        assert usages[0]["completion_tokens"] == len(PIECES)
        assert usages[0]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_empty_chunk_before_an_error_reaches_nobody(api: str) -> None:
    """vLLM's trap: an empty chunk, an error event, `[DONE]`. None of it is output."""
    transcript = Transcript(request(api), LIMIT)
    for payload in stream(api, "x", 0, [1, 1], api == "chat")[:2]:
        transcript.absorb(payload)
    before = transcript.progress
    assert transcript.absorb(chunk(api, "x", "", [])) == b""
    with pytest.raises(EngineFault) as caught:
        transcript.absorb(b'{"error": {"message": "dead", "code": 500}}')
    assert caught.value.code == 500
    assert transcript.progress == before


@pytest.mark.parametrize(
    "payload",
    [
        b"{",
        b"[]",
        b"5",
        b"{}",
        b'{"choices": 5}',
        b'{"choices": [5]}',
        b'{"choices": [{"index": 1, "text": "a"}]}',
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 0, "text": null}]}',
        b'{"choices": [{"index": 0, "text": "a", "token_ids": ["x"]}]}',
        b'{"choices": [{"index": 0, "text": "a", "token_ids": [true]}]}',
        b'{"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": 5}]}',
        b"\xff\xfe",
    ],
)
def test_a_malformed_event_changes_nothing(payload: bytes) -> None:
    """It is named as such, and what was good before stays."""
    transcript = Transcript(request(), LIMIT)
    for good in stream("completions", "x", 0, [1, 1], False)[:2]:
        transcript.absorb(good)
    before = transcript.progress
    with pytest.raises(MalformedEvent):
        transcript.absorb(payload)
    assert transcript.progress == before
    assert transcript.progress.delivered_ids == [100, 101]


def test_text_that_ends_inside_a_character_waits() -> None:
    """A replacement character at the end may still become a real one."""
    transcript = Transcript(request(return_token_ids=True), LIMIT)
    assert transcript.absorb(chunk("completions", "x", "a\ufffd", [1], prompt_token_ids=None)) == b""
    out = transcript.absorb(chunk("completions", "x", "b", [2]))
    assert text_in(out) == "a\ufffdb"
    assert ids_in(out) == [1, 2]


def test_text_that_really_is_replacement_characters_is_not_held_for_ever() -> None:
    """After a bound it is handed out, and such a seam is refused."""
    transcript = Transcript(request(), LIMIT)
    transcript.absorb(stream("completions", "x", 0, [1], False)[0])
    out = b"".join(transcript.absorb(chunk("completions", "x", "\ufffd", [i])) for i in range(40))
    assert text_in(out)
    plan = how_to_resume(request(), transcript.progress, Target(1000), None)
    assert plan == Refuse("unfinished_character")


def begun(asked: GenerationRequest, *events: tuple[str, list[int]]) -> tuple[Transcript, bytes]:
    """A transcript that has these events of text and ids, and what the client has of it."""
    transcript = Transcript(asked, LIMIT)
    out = (
        transcript.absorb(stream(asked.api, "x", 0, [1], asked.api == "chat")[0])
        if asked.api == "chat"
        else b""
    )
    for text, ids in events:
        event = json.loads(chunk(asked.api, "x", text, ids))
        if asked.api == "completions":
            event["choices"][0]["prompt_token_ids"] = PROMPT
        out += transcript.absorb(json.dumps(event).encode())
    return transcript, out


@pytest.mark.parametrize(
    ("api", "events", "may_lag"),
    [
        ("completions", [("a", [1]), (" b", [2])], False),
        ("completions", [("a", [1]), ("", [2]), (" b", [3])], False),
        ("completions", [("a", [1]), (" b", [2, 3])], True),
        ("chat", [("a", [1]), (" ", [2])], True),
    ],
)
def test_where_the_seam_is_not_plain(api: str, events: list[tuple[str, list[int]]], may_lag: bool) -> None:
    """Ids with text do not prove that all of their text was delivered: several at once, chat parsers."""
    transcript, out = begun(request(api), *events)
    assert transcript.progress.text_may_lag is may_lag
    assert transcript.progress.recent_text == text_in(out)


def test_text_like_the_prompt_or_the_last_words_is_kept() -> None:
    """Nothing is filtered by what it looks like: "ha" goes on with " haha!"."""
    transcript, out = begun(request(), ("ha", [1, 2]))
    transcript.next_engine("by_ids")
    out += transcript.absorb(chunk("completions", "y", " haha! Great", [3, 4, 5]))
    assert text_in(out) == "ha haha! Great"


def test_ids_that_were_given_back_are_not_handed_out_twice() -> None:
    """The client that asked for ids has them once, and usage counts them once."""
    transcript, out = begun(request(return_token_ids=True), ("a", [1, 2, 3]))
    transcript.next_engine("by_ids", given_back=2)
    assert transcript.progress.delivered_ids == [1]
    out += transcript.absorb(chunk("completions", "y", "b", [2]))
    out += transcript.absorb(chunk("completions", "y", "c", [3, 4]))
    assert (text_in(out), ids_in(out)) == ("abc", [1, 2, 3, 4])
    assert transcript.usage is not None
    assert transcript.usage["completion_tokens"] == 4


def test_other_ids_than_those_the_client_has_are_an_error() -> None:
    """They cannot be taken back."""
    transcript, _ = begun(request(return_token_ids=True), ("a", [1, 2]))
    transcript.next_engine("by_ids", given_back=1)
    with pytest.raises(MalformedEvent):
        transcript.absorb(chunk("completions", "y", "b", [9]))
    assert transcript.progress.delivered_ids == [1]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_breaks_off_has_not_finished(reason: str) -> None:
    """vLLM says `abort` to every request when it is stopped; nothing of that event counts."""
    transcript, _ = begun(request(), ("a", [1]))
    before = transcript.progress
    with pytest.raises(EngineFault):
        transcript.absorb(chunk("completions", "x", " half", [2], reason))
    assert transcript.progress == before


def test_what_an_engine_says_of_itself_at_the_end_is_kept() -> None:
    """`system_fingerprint` may come with the usage only."""
    asked = request(stream=False)
    transcript, _ = begun(asked, ("a", [1]))
    transcript.absorb(chunk("completions", "x", "b", [2], "stop"))
    transcript.absorb(b'{"choices": [], "usage": {}, "system_fingerprint": "v1", "metrics": {"ttft": 1}}')
    body = response_object(asked, transcript)
    assert (body["system_fingerprint"], body["metrics"]) == ("v1", {"ttft": 1})


def test_ids_that_were_asked_for_are_all_there() -> None:
    """Beyond max_transcript_tokens an answer is not protected, but it is not cut silently either."""
    asked = request(stream=False, return_token_ids=True)
    transcript = Transcript(asked, 3)
    for payload in stream("completions", "x", 0, [1] * 9, False):
        transcript.absorb(payload)
    body = response_object(asked, transcript)
    assert len(body["choices"][0]["token_ids"]) == body["usage"]["completion_tokens"] == len(PIECES)
    assert transcript.progress.overflow


def test_deep_json_is_malformed() -> None:
    """Not a crash."""
    with pytest.raises(MalformedEvent):
        Transcript(request(), LIMIT).absorb(b"[" * 100_000)


def test_the_limit_of_kept_tokens_ends_protection_not_the_answer() -> None:
    """Beyond it the answer goes on, but cannot be resumed."""
    transcript = Transcript(request(), 6)
    for payload in stream("completions", "x", 0, [1] * 9, False)[:-2]:
        transcript.absorb(payload)
    assert len(transcript.progress.delivered_ids) <= 6
    plan = how_to_resume(request(), transcript.progress, Target(1000), None)
    assert plan == Refuse("transcript_limit")


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_unstreamed_answer_is_assembled(api: str) -> None:
    """The ordinary object: text, finish, usage, ids if asked for."""
    asked = request(api, stream=False, return_token_ids=True)
    transcript = Transcript(asked, LIMIT)
    assert b"".join(map(transcript.absorb, stream(api, "x", 0, [2, 3], api == "chat"))) == b""
    body = response_object(asked, transcript)
    choice = body["choices"][0]
    text = choice["message"]["content"] if api == "chat" else choice["text"]
    assert text == "".join(PIECES)
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [100 + i for i in range(len(PIECES))]
    assert body["usage"]["completion_tokens"] == len(PIECES)
    assert body["object"] == ("chat.completion" if api == "chat" else "text_completion")


def test_reasoning_is_kept_apart_and_marks_the_output_as_parsed() -> None:
    """Its text goes to its own field; such an answer is not plain text any more."""
    asked = request("chat", stream=False)
    transcript = Transcript(asked, LIMIT)
    first = json.loads(chunk("chat", "x", "", [1]))
    first["choices"][0]["delta"] = {"reasoning": "hm"}
    transcript.absorb(json.dumps(first).encode())
    transcript.absorb(chunk("chat", "x", "yes", [2], "stop"))
    message = response_object(asked, transcript)["choices"][0]["message"]
    assert (message["role"], message["content"], message["reasoning"]) == ("assistant", "yes", "hm")
    assert transcript.progress.parsed


def test_a_finish_that_was_said_is_not_asked_for_again() -> None:
    """All tokens are there, `[DONE]` is not."""
    transcript = Transcript(request(stream_options={"include_usage": True}), LIMIT)
    for payload in stream("completions", "x", 0, [1] * 9, False)[:-1]:
        transcript.absorb(payload)
    assert how_to_resume(request(), transcript.progress, Target(), None) == Finish("stop")
    assert transcript.finish("stop") == b""
    (usage,) = events_in(transcript.closing())
    assert usage["usage"]["completion_tokens"] == len(PIECES)

"""Streams that are not the usual ones: other engines, replays that break off, several ways in turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.messages.request import SegueParams
from segue_router.errors import EngineFault, MalformedEvent, ReplayDiffers
from segue_router.request import GenerationRequest, parse_request
from segue_router.resume import ByIds, Exact, Refuse, Restart, Target, how_to_resume
from segue_router.transcript import Transcript

PROMPT = [7, 8]
ABLE = Target(1000, exact=frozenset({"output", "seed", "grammar"}))
UNABLE = Target(1000)
PARAMS = SegueParams("s", 2, resume=True)


def asked(**more: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": "hi", "stream": True, "temperature": 0, "max_tokens": 100} | more
    return parse_request("/v1/completions", json.dumps(body).encode())


def choice(text: str, ids: list[int] | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    named = {} if ids is None else {"token_ids": ids}
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish} | named | more


def event(*choices: dict[str, Any], **more: Any) -> bytes:
    head = {"id": "x", "object": "text_completion", "created": 1, "model": "m"}
    return json.dumps(head | {"choices": choices} | more, separators=(",", ":")).encode()


def begun(request: GenerationRequest, *texts: str) -> tuple[Transcript, bytes]:
    """A transcript to which an engine said `texts`, a token each, and what the client got."""
    transcript, out = Transcript(request, 1000), b""
    for at, text in enumerate(texts):
        out += transcript.absorb(event(choice(text, [at], **({} if at else {"prompt_token_ids": PROMPT}))))
    return transcript, out


def events_in(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in out.split(b"\n\n") if part and part != b"data: [DONE]"]


def text_in(out: bytes, index: int = 0) -> str:
    choices = [each for said in events_in(out) for each in said["choices"]]
    return "".join(each["text"] for each in choices if each["index"] == index)


def test_by_ids_goes_on_after_a_replay_that_broke_off() -> None:
    """What the replay still owed is not awaited of an engine that only goes on."""
    transcript, out = begun(asked(), "a", " b", " c")
    transcript.next_engine("exact")
    out += transcript.absorb(event(choice("a", [0], prompt_token_ids=PROMPT)))
    transcript.next_engine("by_ids")
    out += transcript.absorb(event(choice(" d", [3], prompt_token_ids=[*PROMPT, 0, 1, 2])))
    assert text_in(out) == "a b c d"
    assert transcript.progress.choices[0].ids == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "last", [choice("a", [0], "stop"), choice("a b c", [0, 1], "stop"), choice("a b", [0, 1, 2], "stop")]
)
def test_a_replay_that_finishes_too_early_is_no_finish(last: dict[str, Any]) -> None:
    """The client has more ids, or more text, than that engine calls the whole answer."""
    transcript, _ = begun(asked(), "a", " b", " c")
    transcript.next_engine("exact")
    with pytest.raises(ReplayDiffers):
        transcript.absorb(event(last | {"prompt_token_ids": PROMPT}))
    assert transcript.finish_reason is None


def test_text_without_ids_keeps_its_place() -> None:
    """What is held for its last character comes before what follows it, however usual that looks."""
    transcript, out = begun(asked(), "a")
    for each in (choice("x\ufffd", None), choice("b", [1]), choice("c", [2], "stop")):
        out += transcript.absorb(event(each))
    assert text_in(out) == "ax\ufffdbc"


def test_text_that_stays_invalid_is_not_held_for_ever() -> None:
    """Also of an engine that names no ids: after a while it is what was meant."""
    transcript, out = begun(asked(), "a")
    for _ in range(100):
        out += transcript.absorb(event(choice("\ufffd", None)))
    assert text_in(out).count("\ufffd") > 80
    out += transcript.absorb(event(choice("", None, "stop")))
    assert text_in(out) == "a" + "\ufffd" * 100


@pytest.mark.parametrize(
    "bad",
    [choice("", [], "abort"), choice("", []) | {"text": 5}, choice("b", [1.5])],
    ids=["interrupted", "no text", "no ids"],
)
def test_an_event_of_several_choices_counts_as_a_whole(bad: dict[str, Any]) -> None:
    """A failure in one of them: nothing of the others is taken for delivered that the client never got."""
    transcript, _ = begun(asked(n=2), "a")
    with pytest.raises((EngineFault, MalformedEvent)):
        transcript.absorb(event(choice(" b", [1]), bad | {"index": 1}))
    assert transcript.progress.choices[0].ids == [0]
    assert transcript.choices[0].recent_text == "a"


def test_an_empty_event_after_a_finish_is_no_failure() -> None:
    """Some engines say nothing once more; other output after the finish stays malformed."""
    transcript, _ = begun(asked(), "a")
    transcript.absorb(event(choice("b", [1], "stop")))
    assert transcript.absorb(event(choice("", None))) == b""
    with pytest.raises(MalformedEvent, match="after the finish"):
        transcript.absorb(event(choice("c", [2])))


@pytest.mark.parametrize(
    "delta",
    [
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"audio": {"data": "UklGRg=="}},
        {"role": "assistant", "content": None, "annotations": [{"url": "x"}]},
    ],
)
def test_what_is_not_understood_reaches_the_client(delta: dict[str, Any]) -> None:
    """Fields of other engines' answers: handed out as they are; then nothing can be continued any more."""
    body = b'{"model": "m", "messages": [], "stream": true}'
    request = parse_request("/v1/chat/completions", body)
    transcript = Transcript(request, 100)
    said = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [1]}
    out = transcript.absorb(event(said, prompt_token_ids=PROMPT))
    heard: dict[str, Any] = {}
    for each in events_in(out):
        heard |= each["choices"][0]["delta"]
    said_there = {key: value for key, value in delta.items() if value}
    assert {key: heard.get(key) for key in said_there} == said_there
    assert transcript.progress.client_has
    assert isinstance(how_to_resume(request, transcript.progress, ABLE, PARAMS), Refuse)


def test_an_empty_finish_reason_is_none() -> None:
    """Some engines say it in each event."""
    transcript, out = begun(asked(), "a")
    for at, finish in ((1, ""), (2, ""), (3, "stop")):
        out += transcript.absorb(event(choice(" b", [at], finish)))
    assert text_in(out) == "a b b b"
    assert transcript.finish_reason == "stop"


def test_usage_in_the_last_event_is_the_answers_usage() -> None:
    """Some engines have no event of its own for it: a client that asked gets it in the usual form."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    transcript = Transcript(asked(stream_options={"include_usage": True}), 100)
    out = transcript.absorb(event(choice("a", None, "stop"), usage=usage)) + transcript.closing()
    last = events_in(out)[-1]
    assert (last["choices"], last["usage"]) == ([], usage)


def test_usage_of_several_prompts_is_not_guessed() -> None:
    """The router knows one prompt's ids; a wrong count would be worse than an error."""
    request = asked(prompt=["aaa", "b"], stream_options={"include_usage": True})
    transcript = Transcript(request, 100)
    for index in (0, 1):
        last = choice("a", [1], "stop", index=index, prompt_token_ids=PROMPT[index:])
        transcript.absorb(event(last))
    assert how_to_resume(request, transcript.progress, UNABLE, None) == Refuse("unknown_usage")


def test_tokens_that_arrived_are_counted_where_they_can_be() -> None:
    """A daemon's number is compared with it: also beyond the limit of what is kept, never without ids."""
    transcript, _ = begun(asked(), "a", " b")
    assert transcript.arrived == {0: 4}
    small = Transcript(asked(), 3)
    for at in range(5):
        small.absorb(event(choice(" w", [at], prompt_token_ids=PROMPT)))
    assert small.progress.overflow
    assert small.arrived == {0: 7}
    transcript.absorb(event(choice("c", None)))
    assert transcript.arrived == {}


Life = tuple[bool, int, int, bool]
lives = st.lists(
    st.tuples(st.booleans(), st.integers(0, 14), st.integers(1, 4), st.booleans()), min_size=1, max_size=6
)
"""Whether the engine has the shim, after how many events it breaks, tokens an event, and whether it says
them again one by one."""


@given(st.lists(st.sampled_from(["a", " b", "", "é", "😀 ", "x\ufffd"]), min_size=1, max_size=10), lives)
def test_ways_in_any_order_give_one_answer(tokens: list[str], broken: list[Life]) -> None:
    """Exactly, by ids, from the start, each broken anywhere, also in the middle of a replay: one answer."""
    tokens = [*tokens, "."]
    request = asked(stream_options={"include_usage": True}, return_token_ids=True)
    transcript, out = Transcript(request, 1000), b""
    skipped, said_again = 0, 0
    for exact, until, size, one_by_one in [*broken, (False, 1000, 1, False)]:
        done = 0
        at = skipped
        while at < len(tokens) and done < until:
            step = 1 if one_by_one and at < said_again else size + max(0, said_again - at)
            end = min(len(tokens), at + step)
            finish = "stop" if end == len(tokens) else None
            first = {"prompt_token_ids": PROMPT} if at == skipped else {}
            said = choice("".join(tokens[at:end]), list(range(at, end)), finish, **first)
            out += transcript.absorb(event(said))
            at, done = end, done + 1
        if transcript.finish_reason is not None:
            break
        plan = how_to_resume(request, transcript.progress, ABLE if exact else UNABLE, PARAMS)
        if isinstance(plan, Exact):
            skipped, said_again = 0, len(transcript.progress.choices[0].ids)
            transcript.next_engine("exact")
        elif isinstance(plan, ByIds):
            skipped, said_again = len(plan.body["prompt"]) - len(PROMPT), 0
            transcript.next_engine("by_ids", given_back=plan.given_back)
        elif isinstance(plan, Restart):
            skipped = said_again = 0
            transcript.next_engine("restart")
        else:
            assert plan == Refuse("unfinished_character")
            return
    out += transcript.closing()
    assert text_in(out) == "".join(tokens)
    told = [each for said in events_in(out) for each in said["choices"]]
    assert [token for each in told for token in each["token_ids"]] == list(range(len(tokens)))
    assert [each["finish_reason"] for each in told if each["finish_reason"]] == ["stop"]
    assert events_in(out)[-1]["usage"]["completion_tokens"] == len(tokens)

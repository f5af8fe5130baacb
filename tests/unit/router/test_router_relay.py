"""The relay: streams the router cannot continue are passed on, and only complete ones end in `[DONE]`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from segue_router.errors import EngineFault, MalformedEvent
from segue_router.relay import Relay
from segue_router.request import parse_request
from segue_router.resume import Finish, Refuse, Restart, Target, how_to_resume


def relay(**more: Any) -> Relay:
    body = {"messages": [], "n": 2, "stream": True} | more
    return Relay(parse_request("/v1/chat/completions", json.dumps(body).encode()))


def chunk(index: int, content: str, finish: str | None = None, role: str | None = None) -> bytes:
    delta = {"content": content} | ({"role": role} if role else {})
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    return json.dumps({"id": "x", "choices": [choice]}).encode()


def plan(track: Relay) -> object:
    return how_to_resume(track._request, track.progress, Target(100), None)


def test_preambles_wait_so_that_another_engine_can_start_over() -> None:
    """Nothing reached the client: restart. Then everything does, in order."""
    track = relay()
    assert track.absorb(chunk(0, "", role="assistant")) == b""
    assert isinstance(plan(track), Restart)
    track.next_engine(by_ids=False)
    first, second = chunk(0, "", role="assistant"), chunk(1, "a")
    assert track.absorb(first) == b""
    assert track.absorb(second) == b"data: " + first + b"\n\ndata: " + second + b"\n\n"
    assert plan(track) == Refuse("n")


def test_finished_only_when_every_choice_is() -> None:
    """One choice open: refused. None: only the end is missing."""
    track = relay()
    track.absorb(chunk(0, "a", "stop"))
    assert track.finish_reason is None
    assert plan(track) == Refuse("n")
    track.absorb(chunk(1, "b", "length"))
    assert plan(track) == Finish("stop")
    assert track.closing() == b"data: [DONE]\n\n"


def test_a_usage_that_is_owed_cannot_be_made_up() -> None:
    """The client asked for usage and has not got it: no false end."""
    track = relay(stream_options={"include_usage": True})
    track.absorb(chunk(0, "a", "stop"))
    track.absorb(chunk(1, "b", "stop"))
    assert plan(track) == Refuse("unknown_usage")
    track.absorb(b'{"id": "x", "choices": [], "usage": {}}')
    assert plan(track) == Finish("stop")


def test_a_choice_that_was_broken_off_is_not_finished() -> None:
    """`abort` of one choice: nothing of that event counts, and no finish is claimed."""
    track = relay()
    track.absorb(chunk(0, "a", "stop"))
    with pytest.raises(EngineFault):
        track.absorb(chunk(1, "b", "abort"))
    assert track.finish_reason is None


def test_errors_are_never_output() -> None:
    """An empty chunk is held, an error event raised, garbage named."""
    track = relay()
    track.absorb(chunk(0, "a"))
    assert track.absorb(chunk(0, "")) == b""
    with pytest.raises(EngineFault):
        track.absorb(b'{"error": {"message": "x", "code": "500"}}')
    for garbage in (b"{", b"[]", b"{}", b'{"choices": [1]}'):
        with pytest.raises(MalformedEvent):
            track.absorb(garbage)

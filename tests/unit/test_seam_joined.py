"""What the seam's grid takes for equal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.seam.joined import Broken, differences, join, not_a_prefix, plain


def chunk(text: str = "", *, finish: str | None = None, name: str = "c-1", **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish} | more
    return json.dumps({"id": name, "created": 1, "model": "m", "object": "o", "choices": [choice]}).encode()


def test_how_output_is_divided_among_events_does_not_matter() -> None:
    """The engine groups tokens as its clients read them."""
    one = join([chunk("ab", token_ids=[1, 2], finish="stop"), b"[DONE]"])
    two = join([chunk("a", token_ids=[1]), chunk("b", token_ids=[2], finish="stop"), b"[DONE]"])
    assert differences(one.tree(), two.tree()) == []


@pytest.mark.parametrize(
    "events",
    [
        [chunk("a"), chunk("c", finish="stop"), b"[DONE]"],
        [chunk("a"), chunk("b", finish="length"), b"[DONE]"],
        [chunk("a"), chunk("b", finish="stop")],
        [chunk("a"), chunk("b", finish="stop"), b"[DONE]", b"[DONE]"],
        [chunk("a"), chunk("b", finish="stop", token_ids=[1]), b"[DONE]"],
        [chunk("a"), chunk("b", finish="stop", logprobs={"tokens": ["b"]}), b"[DONE]"],
    ],
    ids=["text", "finish", "no end", "two ends", "ids", "logprobs"],
)
def test_a_difference_is_seen(events: list[bytes]) -> None:
    """Whatever a client could notice."""
    expected = join([chunk("a"), chunk("b", finish="stop"), b"[DONE]"])
    assert differences(expected.tree(), join(events).tree())


@pytest.mark.parametrize(
    "events",
    [
        [chunk("a"), chunk("b", name="c-2")],
        [chunk("a", finish="stop"), chunk("b")],
        [b"[DONE]", chunk("a")],
    ],
    ids=["two names", "after the finish", "after the end"],
)
def test_what_no_engine_sends_is_broken(events: list[bytes]) -> None:
    """Two answers in one stream, or output where there can be none."""
    with pytest.raises(Broken):
        join(events).tree()


def test_a_part_must_begin_the_whole() -> None:
    """Before an error, too, nothing wrong may have been said."""
    whole = join([chunk("abc", token_ids=[1, 2, 3], finish="stop")])
    assert not_a_prefix(whole, join([chunk("ab", token_ids=[1, 2])])) == []
    assert not_a_prefix(whole, join([chunk("ac", token_ids=[1, 2])]))
    assert not_a_prefix(whole, join([chunk("ab", token_ids=[1, 3])]))


def test_ordinary_answers_are_compared_without_their_names() -> None:
    """Log probabilities may differ in their last bits."""
    left = {
        "id": 1,
        "choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.00001]}, "stop_reason": None}],
    }
    right = {"id": 2, "choices": [{"text": "a", "logprobs": {"token_logprobs": [-1.00002]}}]}
    assert differences(plain(left), plain(right)) == []
    right["choices"][0]["logprobs"]["token_logprobs"][0] = -1.01  # type: ignore[index]
    assert differences(plain(left), plain(right))

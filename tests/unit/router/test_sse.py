"""The splitter: bytes cut anywhere give the same events."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from segue_router.sse import SseSplitter, event

LIMIT = 4096
LINES = st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))
EVENTS = st.lists(LINES.filter(bool), min_size=1, max_size=6)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(EVENTS, st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_any_cut_gives_the_same_events(payloads: list[bytes], places: list[int], end: bytes) -> None:
    """Wherever the bytes are cut, with either line end, every payload comes out once and in order."""
    data = b"".join(b"data: " + payload + end + end for payload in payloads)
    splitter = SseSplitter(LIMIT)
    found = [payload for chunk in cut(data, places) for payload in splitter.feed(chunk)]
    assert found == payloads
    assert not splitter.unfinished
    assert not splitter.broken


@given(EVENTS, st.data())
def test_an_event_that_did_not_end_is_none(payloads: list[bytes], data: st.DataObject) -> None:
    """A stream cut off inside its last event gives all others, and says that it is unfinished."""
    whole = b"".join(map(event, payloads))
    last = event(payloads[-1])
    missing = data.draw(st.integers(1, len(last) - 1))
    splitter = SseSplitter(LIMIT)
    assert splitter.feed(whole[:-missing]) == payloads[:-1]
    assert splitter.unfinished


def test_comments_fields_and_several_data_lines() -> None:
    """As the specification has it: comments and other fields are skipped, data lines are joined."""
    splitter = SseSplitter(LIMIT)
    assert splitter.feed(b": ping\n\nevent: x\nid: 5\ndata:a\ndata: b\n\n: c\n\n") == [b"a\nb"]


def test_the_limit_counts_and_good_events_before_it_are_kept() -> None:
    """An endless event breaks the splitter instead of filling the memory."""
    splitter = SseSplitter(100)
    assert splitter.feed(event(b"ok") + b"data: " + b"x" * 200) == [b"ok"]
    assert splitter.broken
    assert splitter.feed(event(b"late")) == []
    many_lines = SseSplitter(100)
    many_lines.feed(b"data: 1234567890\n" * 20)
    assert many_lines.broken
    one_chunk = SseSplitter(100)
    assert one_chunk.feed(event(b"x" * 200)) == []
    assert one_chunk.broken

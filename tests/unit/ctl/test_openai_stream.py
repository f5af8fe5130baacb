"""The streaming client: what arrives in whatever pieces, and what counts as a failure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from segue_ctl.openai_stream import SseParser, StreamFailed, ask, read_event

EVENTS = [
    b'{"choices":[{"delta":{"content":"\xc3\xa9\xe2\x82\xac"},"token_ids":[1,2]}]}',
    b'{"choices":[{"delta":{"content":"b"},"token_ids":[3],"finish_reason":"length"}]}',
    b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}',
    b"[DONE]",
]


def _stream(line_end: bytes) -> bytes:
    return b": a comment" + 2 * line_end + b"".join(b"data: " + e + 2 * line_end for e in EVENTS)


@given(st.lists(st.integers(0, 400), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int], line_end: bytes) -> None:
    """A network may cut inside a line, a CRLF or a character; no event is lost, split or doubled."""
    data = _stream(line_end)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parser = SseParser()
    found = [event for a, b in pairwise(edges) for event in parser.feed(data[a:b])]
    assert found == EVENTS


def test_an_event_without_end_is_refused() -> None:
    """A server cannot make the client's memory grow without limit."""
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(StreamFailed, match="more than 100 bytes"):
        for _ in range(20):
            parser.feed(b"data: xxxxxxxxxx")


@pytest.mark.parametrize("data", [b"{", b"[1]", b'{"error": {"message": "worker died"}}', b'{"error": "x"}'])
def test_errors_and_nonsense_are_failures_not_output(data: bytes) -> None:
    """An error event is never taken for text."""
    with pytest.raises(StreamFailed):
        read_event(data, 0)


async def _serve(*pieces: bytes) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        assert body["stream"] is True
        response = web.StreamResponse(headers={"X-Segue-Seq": "s-1"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    await runner.cleanup()


async def test_an_answer_is_put_together_with_its_usage_and_headers() -> None:
    """Text, token ids, counts and the request's seq are what the server said."""
    async for url in _serve(_stream(b"\n")):
        async with aiohttp.ClientSession() as session:
            answer = await ask(session, url, {})
        assert (answer.text, answer.token_ids) == ("é€b", [1, 2, 3])
        assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (7, 3, "length")
        assert answer.headers["x-segue-seq"] == "s-1"
        assert len(answer.token_at_ns) == 3 and len(answer.itl_ms) == 2 and answer.ttft_ms > 0


async def test_a_stream_that_just_ends_is_a_failure() -> None:
    """End of file without [DONE] is a cut answer, whatever came before."""
    async for url in _serve(b"data: " + EVENTS[0] + b"\n\n"):
        async with aiohttp.ClientSession() as session:
            with pytest.raises(StreamFailed, match="without"):
                await ask(session, url, {})


async def test_a_server_that_is_not_there_is_a_failure_with_its_address() -> None:
    """The message says where nothing answered."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(StreamFailed, match=r"127\.0\.0\.1:9"):
            await ask(session, "http://127.0.0.1:9/v1/chat/completions", {})

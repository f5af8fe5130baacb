"""The cut proxy breaks where and how it was told: on it rests every statement of the seam's grid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from support.cut_proxy import After, Breaker, Cut, CutProxy, How, Meter, data_of

TOKENS = 5


def event(body: object) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def answer(tokens: int = TOKENS) -> list[bytes]:
    """A chat answer as vLLM streams it: role, one token an event, the last one with the finish, usage."""
    events = [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})]
    for token in range(tokens):
        finish = "length" if token == tokens - 1 else None
        choice = {"index": 0, "delta": {"content": "x"}, "token_ids": [token], "finish_reason": finish}
        events.append(event({"choices": [choice]}))
    return [*events, event({"choices": [], "usage": {}}), event(b"[DONE]")]


@asynccontextmanager
async def stage(names: str = "a") -> AsyncIterator[tuple[Breaker, list[CutProxy], aiohttp.ClientSession]]:
    """Proxies before one engine that sends its whole answer in one write."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(answer()))
        await response.write_eof()
        return response

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="well")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", generate)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    target = "http://{}:{}".format(*runner.addresses[0][:2])
    breaker = Breaker()
    proxies = [CutProxy(name, breaker, target) for name in names]
    for proxy in proxies:
        await proxy.__aenter__()
    try:
        async with aiohttp.ClientSession() as session:
            yield breaker, proxies, session
    finally:
        for proxy in proxies:
            await proxy.__aexit__()
        await runner.cleanup()


async def ask(session: aiohttp.ClientSession, proxy: CutProxy) -> tuple[bytes, bool]:
    """What arrives, and whether the connection broke."""
    got = bytearray()
    try:
        async with session.post(f"{proxy.url}/v1/chat/completions", json={"stream": True}) as response:
            async for chunk in response.content.iter_any():
                got += chunk
    except aiohttp.ClientError:
        return bytes(got), True
    return bytes(got), False


@pytest.mark.parametrize(
    ("after", "count", "passed"),
    [
        ("request", 0, 0),
        ("headers", 0, 0),
        ("role", 0, 1),
        ("tokens", 1, 2),
        ("tokens", 3, 4),
        ("tokens", 99, 5),
        ("events", 2, 2),
        ("before_finish", 0, 5),
        ("finish", 0, 6),
        ("usage", 0, 7),
    ],
)
async def test_exactly_the_events_before_the_cut_arrive(after: After, count: int, passed: int) -> None:
    """However many events come in one read of the engine's stream."""
    async with stage() as (breaker, (proxy,), session):
        breaker.arm(Cut(after, count))
        got, broke = await ask(session, proxy)
        assert broke
        assert got == b"".join(answer()[:passed])
        (asked,) = breaker.asked
        assert asked.cut
        assert [each + b"\n\n" for each in asked.events] == answer()[:passed]
        assert len(data_of(asked.events)) == passed


@pytest.mark.parametrize(
    ("how", "broke", "tail"),
    [
        ("reset", True, b""),
        ("eof", False, b""),
        ("error", False, b"[DONE]\n\n"),
        ("malformed", False, b"[DONE]\n\n"),
    ],
)
async def test_a_cut_looks_as_it_was_asked_to(how: How, broke: bool, tail: bytes) -> None:
    """A reset is an error for the reader; the others end the body properly."""
    async with stage() as (breaker, (proxy,), session):
        breaker.arm(Cut("tokens", 2, how))
        got, ended = await ask(session, proxy)
        good = b"".join(answer()[:3])
        assert ended == broke
        assert got.startswith(good)
        assert got.endswith(tail)
        assert (got == good) == (how in ("reset", "eof"))


async def test_silence_keeps_the_connection_open() -> None:
    """Nothing more comes, and nothing says so."""
    async with stage() as (breaker, (proxy,), session):
        breaker.arm(Cut("tokens", 2, "silence"))
        async with session.post(f"{proxy.url}/v1/chat/completions", json={"stream": True}) as response:
            good = b"".join(answer()[:3])
            assert await response.content.readexactly(len(good)) == good
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await response.content.readany()


async def test_a_dead_engine_takes_no_generation_until_another_one_dies() -> None:
    """It may still look healthy, or not; a new arming revives it."""
    async with stage("ab") as (breaker, (a, b), session):
        breaker.arm(Cut("tokens", 1), Cut("tokens", 2))
        await ask(session, a)
        assert await ask(session, a) == (b"", True)
        async with session.get(f"{a.url}/health") as response:
            assert response.status == 200
        assert await ask(session, b) == (b"".join(answer()[:3]), True)
        assert await ask(session, a) == (b"".join(answer()), False)
        assert [(each.engine, each.refused) for each in breaker.asked] == [
            ("a", False),
            ("a", True),
            ("b", False),
            ("a", False),
        ]
        breaker.arm(Cut("request"), whole_engine=True)
        await ask(session, a)
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{a.url}/health")
        breaker.arm()
        assert await ask(session, a) == (b"".join(answer()), False)


def passes(events: Sequence[bytes], meter: Meter) -> int:
    return next((i for i, each in enumerate(events) if not meter.lets_pass(each.strip())), len(events))


def test_several_choices_finish_only_with_the_last() -> None:
    """n=2: "before the finish" is before the event that finishes the second one."""
    events = [
        event({"choices": [{"index": i % 2, "text": "x", "finish_reason": "stop" if i in (1, 4) else None}]})
        for i in range(5)
    ]
    assert passes(events, Meter(Cut("before_finish"), choices=2)) == 4
    assert passes([*events, event({"choices": []})], Meter(Cut("finish"), choices=2)) == 5
    assert passes(events, Meter(Cut("tokens", 3), choices=2)) == 3

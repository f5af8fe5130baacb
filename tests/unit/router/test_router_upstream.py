"""Giving an attempt up: what came before counts, what comes after does not keep it alive."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol

from segue_router.errors import UpstreamFailure
from segue_router.upstream import Attempt


def attempt() -> tuple[Attempt, StreamReader]:
    """An attempt whose engine has answered, and what it streams."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    content = StreamReader(protocol, 1 << 16, loop=loop)
    found = Attempt(max_event_bytes=100)
    response: Any = SimpleNamespace(content=content, close=lambda: None)
    found.response = response
    return found, content


async def test_an_engine_that_streams_on_does_not_outrun_its_own_end() -> None:
    """The client is slow: whenever the router comes to read, more is there. Only the first of it counts."""
    one, content = attempt()
    content.feed_data(b"before")
    one.doom("drained", "the engine is being drained")
    assert await one.read_bytes() == b"before"
    content.feed_data(b"after")
    for _ in range(2):
        with pytest.raises(UpstreamFailure) as failure:
            await one.read_bytes()
        assert failure.value.cause == "drained"


async def test_who_waits_is_woken() -> None:
    """And bytes that came in the same moment are not lost."""
    one, content = attempt()
    reading = asyncio.create_task(one.read_bytes())
    await asyncio.sleep(0)
    content.feed_data(b"just in time")
    one.doom("stalled", "silent")
    assert await reading == b"just in time"
    with pytest.raises(UpstreamFailure):
        await one.read_bytes()


async def test_the_first_reason_counts() -> None:
    """Whatever else goes wrong with an attempt that was given up."""
    one, content = attempt()
    reading = asyncio.create_task(one.read_bytes())
    await asyncio.sleep(0)
    one.doom("daemon_dead", "its process ended")
    one.doom("stalled", "silent")
    content.set_exception(ConnectionResetError())
    with pytest.raises(UpstreamFailure) as failure:
        await reading
    assert failure.value.cause == "daemon_dead"

"""What the router asks engines beside generations leaves nothing open."""

from __future__ import annotations

import asyncio

import aiohttp

from segue_router.engine_client import EngineClient
from system.router.harness import Stage


async def test_a_burst_of_questions_leaves_no_connections(stage: Stage) -> None:
    """When an engine fails, all its streams ask at once whether it is well. Those connections do not stay:
    the probes would use them in turn, and none would ever be idle long enough to be closed."""
    engine = await stage.engine()
    engine.probe_s = 0.1
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = EngineClient(session, engine.url)
        assert all(await asyncio.gather(*(client.healthy(5_000) for _ in range(6))))
        assert not connector._conns

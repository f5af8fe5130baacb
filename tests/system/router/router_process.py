"""`segue-router` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp

from system.router.harness import DEADLINE_S, eventually


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Ask until the router is ready; the caller sets the deadline."""

    async def ready() -> bool:
        return (await session.get(url + "/readyz")).status == 200

    await eventually(ready, "the router is ready", timeout_s=60)


async def start_process(config: Path) -> tuple[asyncio.subprocess.Process, str]:
    """`segue-router` as a process; returns it and its URL once it listens."""
    process = await run_process(config)
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        line = (await process.stdout.readline()).decode()
    assert "listening on http://" in line
    return process, line.split()[-1]


async def run_process(config: Path, *more: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "segue_router.cli",
        "--config",
        str(config),
        *more,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )

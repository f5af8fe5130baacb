"""What a cluster waits for. Each condition returns an empty string once it holds, else what is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence

import aiohttp
import msgspec

from segue_core.messages.status import DaemonStatus, RouterStatus
from segue_ctl.waiting import get_json


async def answers(session: aiohttp.ClientSession, url: str) -> str:
    """`url` answers 200."""
    code, detail = await get_json(session, url)
    if code == 200:
        return ""
    return f"{url} answers {code}" if code else f"{url} does not answer: {detail}"


async def engine_ready(session: aiohttp.ClientSession, url: str, model: str) -> str:
    """An OpenAI-compatible engine is healthy and serves `model`."""
    missing = await answers(session, f"{url}/health")
    if missing:
        return missing
    code, body = await get_json(session, f"{url}/v1/models")
    served = [m.get("id") for m in body.get("data", [])] if code == 200 and isinstance(body, dict) else []
    return "" if model in served else f"{url}/v1/models does not list {model}"


async def daemon_status(session: aiohttp.ClientSession, url: str) -> DaemonStatus | str:
    """What a daemon says of itself, or why that is not known."""
    code, body = await get_json(session, f"{url}/status")
    if code != 200:
        return f"{url}/status answers {code or body}"
    try:
        return msgspec.convert(body, DaemonStatus)
    except msgspec.ValidationError as error:
        return f"{url}/status: {error}"


async def router_status(session: aiohttp.ClientSession, url: str) -> RouterStatus | str:
    """What a router says of itself, or why that is not known."""
    code, body = await get_json(session, f"{url}/status")
    if code != 200:
        return f"{url}/status answers {code or body}"
    try:
        return msgspec.convert(body, RouterStatus)
    except msgspec.ValidationError as error:
        return f"{url}/status: {error}"


async def engine_registered(session: aiohttp.ClientSession, url: str, group: int) -> str:
    """The daemon at `url` has a live engine that belongs to the process group `group`."""
    status = await daemon_status(session, url)
    if isinstance(status, str):
        return status
    if status.engine.state != "running":
        return f"the daemon says the engine is {status.engine.state} {status.engine.detail}".rstrip()
    if status.engine.pid and not _in_group(status.engine.pid, group):
        return f"the daemon still has the engine's earlier process {status.engine.pid}"
    return ""


async def daemon_linked(session: aiohttp.ClientSession, url: str, running: Sequence[str]) -> str:
    """The daemon at `url` is connected to all its peers among `running`."""
    status = await daemon_status(session, url)
    if isinstance(status, str):
        return status
    apart = [peer.peer for peer in status.peers if peer.peer in running and not peer.connected]
    return f"not connected to {', '.join(apart)}" if apart else ""


async def router_ready(session: aiohttp.ClientSession, url: str, engines: Sequence[str]) -> str:
    """The router at `url` has all of `engines` up."""
    status = await router_status(session, url)
    if isinstance(status, str):
        return status
    up = [engine.name for engine in status.engines if engine.state == "up"]
    missing = [name for name in engines if name not in up]
    return f"engines not up: {', '.join(missing)}" if missing else ""


def _in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False

"""Waiting for conditions: polled, with a deadline and a reason when it passes. Never a fixed sleep."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from segue_core.errors import SegueError
from segue_ctl.child import Child

_POLL_S = 0.05
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class ClusterError(SegueError):
    """A process of the cluster did not start, did not get ready in time, or ended; shows its last words."""


async def wait_for(
    what: str, check: Callable[[], Awaitable[str]], *, timeout_s: float, children: tuple[Child, ...] = ()
) -> None:
    """Wait until `check` returns an empty string; any other is what is still missing.

    Raises ClusterError after `timeout_s`, or at once when one of `children` has ended.
    """
    deadline = time.monotonic() + timeout_s
    while missing := await check():
        for child in children:
            if not child.alive:
                raise ClusterError(f"{child.name} {child.ended()} before {what}{_tail(child)}")
        if time.monotonic() > deadline:
            tails = "".join(_tail(child) for child in children)
            raise ClusterError(f"{what}: not within {timeout_s:.0f} s: {missing}{tails}")
        await asyncio.sleep(_POLL_S)


async def get_json(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    """Status code and decoded body of a GET; (0, reason) if nothing answered, body None if it is not JSON."""
    try:
        async with session.get(url, timeout=_PROBE_TIMEOUT) as answer:
            body = await answer.read()
            try:
                return answer.status, msgspec.json.decode(body)
            except msgspec.DecodeError:
                return answer.status, None
    except aiohttp.ClientSSLError as error:
        return 0, f"no TLS with it: {tls_problem(error)}"
    except aiohttp.ClientConnectorError as error:
        return 0, f"cannot connect: {os.strerror(error.os_error.errno or 0)}"
    except TimeoutError:
        return 0, f"no answer within {_PROBE_TIMEOUT.total:.0f} s"
    except (aiohttp.ClientError, OSError) as error:
        return 0, str(error) or type(error).__name__


def tls_problem(error: aiohttp.ClientSSLError) -> str:
    """Why there is no TLS, in words."""
    cause = getattr(error, "certificate_error", None) or error.__cause__ or error
    reason = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or str(cause)
    return f"{reason} (--ca FILE: the cluster's ca.crt)"


def _tail(child: Child) -> str:
    return f"\nthe end of {child.log_file}:\n{child.log_tail()}"

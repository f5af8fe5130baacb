"""Await a condition with a deadline; never sleep and hope."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, *, timeout_s: float = 15.0) -> T:
    """Poll until `condition()` is true; returns its value. Fails naming `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what} (last: {value!r})")
        time.sleep(0.005)


async def eventually(condition: Callable[[], Any], what: str, *, timeout_s: float = 15.0) -> None:
    """The same where a loop runs; `condition` may be asynchronous. For what tells nobody."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None

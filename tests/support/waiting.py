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
    value = last_of(condition, bool, timeout_s=timeout_s)
    assert value, f"not within {timeout_s} s: {what} (last: {value!r})"
    return value


def last_of(look: Callable[[], T], good: Callable[[T], object], *, timeout_s: float = 15.0) -> T:
    """What `look()` gives once that is `good`, or when time is up: for what tells nobody."""
    deadline = time.monotonic() + timeout_s
    while not good(value := look()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


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

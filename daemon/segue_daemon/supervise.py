"""Keeps a long-lived task alive: what it did not expect is logged once, and it starts again.

The one place where every exception is caught. A daemon whose accept loop or judge has died silently looks
healthy and protects nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()

RESTART_S = 0.5


async def supervise(what: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `run()` for ever. A cause is logged when it is not the one that was logged last."""
    logged = ""
    while True:
        try:
            await run()
        except Exception as error:
            cause = repr(error)
            if cause != logged:
                log.error("a task failed and starts again", task=what, exc_info=error)
                logged = cause
        await asyncio.sleep(RESTART_S)

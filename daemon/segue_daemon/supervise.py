"""Looks after tasks: none is forgotten, none ends silently, and those that must live start again.

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


class Tasks:
    """The tasks of one owner: an end that nobody expected is logged, and all are ended together."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task and keep it."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task failed", exc_info=task.exception())

    async def end(self) -> None:
        """Cancel all that run and wait until they are gone."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

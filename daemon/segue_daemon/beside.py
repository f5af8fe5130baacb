"""Work that may hang (a driver's), waited for without holding up the event loop, or the daemon's end.

Invariant: each call has a thread of its own that nobody joins; what came too late to be taken is dropped in
the way the caller says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def beside(name: str, work: Callable[[], T], drop: Callable[[T], object] = lambda _: None) -> T:
    """What `work` returns or raises, in a thread called `name`. If nobody waits for it any more, what it
    returns is given to `drop`, in whatever thread. Raises RuntimeError if there is no thread to be had."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T) -> None:
        if future.cancelled():
            drop(result)
        else:
            future.set_result(result)

    def fail(error: BaseException) -> None:
        if not future.cancelled():
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # whoever waits must hear of it
            _tell(loop, fail, error)
            return
        if not _tell(loop, deliver, result):
            drop(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:
            drop(future.result())
        raise


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[T], None], value: T) -> bool:
    """Have it called in the loop; False if the loop is closed: the daemon stops."""
    try:
        loop.call_soon_threadsafe(what, value)
    except RuntimeError:
        return False
    return True

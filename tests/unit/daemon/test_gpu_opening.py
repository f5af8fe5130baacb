"""Opening GPU memory beside the event loop, without a driver: who gets the pages, and how much may hang."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from segue_core.geometry import Geometry, Region
from segue_daemon import open_pages as opening
from segue_daemon.cuda.device_thread import MAX_STUCK, DeviceThread
from segue_daemon.cuda.errors import CudaError

GEOMETRY = Geometry(1, 1, (64,), (Region(0, 0, (1, 64), (64, 1), 1, ("block", "dim")),))


class SlowPages:
    """Opened once the test says so."""

    def __init__(self, geometry: Geometry, fds: Any) -> None:
        self.closed = threading.Event()
        MADE.append(self)
        assert GO.wait(20)

    def close(self) -> None:
        self.closed.set()


MADE: list[SlowPages] = []
GO = threading.Event()


async def test_pages_that_nobody_waits_for_any_more_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration that ends while its memory is opened leaves nothing mapped."""
    monkeypatch.setattr(opening, "open_pages", SlowPages)
    waiting = asyncio.create_task(opening.open_beside(GEOMETRY, ()))
    async with asyncio.timeout(20):
        while not MADE:  # noqa: ASYNC110  # made in a thread
            await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    GO.set()
    async with asyncio.timeout(20):
        while not MADE[0].closed.is_set():  # noqa: ASYNC110  # by a callback of the thread
            await asyncio.sleep(0)


def test_engines_that_hang_in_the_driver_are_limited_and_come_back() -> None:
    """A daemon whose driver hangs does not collect a thread for each attempt, and goes on once it is back."""
    back = threading.Event()
    threads = [DeviceThread("test") for _ in range(MAX_STUCK)]
    for thread in threads:
        with pytest.raises(CudaError, match="has not returned"):
            thread.run("open", back.wait, 0.001)
    with pytest.raises(CudaError, match=r"nvidia-smi.*restart segue-daemon"):
        DeviceThread("one more")
    for thread in threads:
        thread.end()
    back.set()
    while DeviceThread._all_stuck:
        threading.Event().wait(0.001)
    once_more = DeviceThread("test")
    assert once_more.run("open", lambda: 5, 20.0) == 5
    once_more.end()

"""GPU memory of this process that one engine may read: where copies of replica blocks lie (the GPU tier).

Made of one physical allocation with a descriptor, which the engine maps read only. A thread of its own makes
the driver's calls, so that a GPU that hangs costs the tier and nothing else. Invariants: `put` has returned
only when its bytes are on the GPU; whatever was taken is given back, whatever fails on the way; the memory
lives on in an engine that has mapped it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import structlog

from segue_daemon.arena import Bytes
from segue_daemon.cuda.device_thread import DeviceThread
from segue_daemon.cuda.driver import CudaError, load
from segue_daemon.cuda.pinned import PinnedBuffer

log = structlog.get_logger()

OPEN_TIMEOUT_S = 10.0
PUT_TIMEOUT_S = 2.0
NO_ROOM = "set a smaller `store.gpu_budget_bytes`, or have the engine leave more of the GPU free"


class _TierThread(DeviceThread):
    """One that hangs takes no engine's own memory a thread."""

    _all_stuck: ClassVar[set[DeviceThread]] = set()


class TierMemory:
    """`nbytes` on the GPU with that UUID. `room` is page-locked: what is to be put is written there first.
    All methods but `close` wait for the driver, up to a deadline: call them beside the event loop."""

    def __init__(self, gpu: str, nbytes: int, room_bytes: int, *, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        """Raises CudaError if the GPU has not that much; nothing is held then."""
        self.gpu = gpu
        self.nbytes = 0
        self.fd = -1
        self.released = threading.Event()
        """Set once all is given back."""
        self._undo: list[Callable[[], None]] = []
        self._thread = _TierThread("segue-gpu-tier")
        try:
            self.room = self._thread.run("make room", lambda: self._open(gpu, nbytes, room_bytes), timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, gpu: str, nbytes: int, room_bytes: int) -> Bytes:
        driver = load()
        device = driver.device(gpu)
        context = driver.retain_context(device)
        self._undo.append(lambda: driver.release_context(device))
        driver.make_current(context)
        self._stream: Any = driver.create_stream()
        self._undo.append(lambda: driver.destroy_stream(self._stream))
        buffer = PinnedBuffer(driver, room_bytes)
        self._undo.append(buffer.close)
        whole = driver.whole(nbytes, device)
        self._start = driver.reserve(whole)
        self._undo.append(lambda: driver.free_range(self._start, whole))
        self._map(driver, whole, device)
        self.nbytes = whole
        self._driver = driver
        self._room_at = buffer.address
        return buffer.array(lambda: None)

    def _map(self, driver: Any, whole: int, device: int) -> None:
        try:
            allocation = driver.create(whole, device)
        except CudaError as error:
            raise CudaError(error.call, error.name, hint=NO_ROOM) from error
        try:
            driver.map(self._start, whole, allocation)
            self._undo.append(lambda: driver.unmap(self._start, whole))
            driver.allow_writing(self._start, whole, device)
            self.fd = driver.export_fd(allocation)
            self._undo.append(self._close_fd)
        finally:
            with contextlib.suppress(CudaError):  # the mapping keeps it
                driver.release(allocation)

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)

    def put(self, offsets: Sequence[int], nbytes: int) -> None:
        """Copy what lies in `room`, pieces of `nbytes` one behind the other, to these offsets. Raises
        CudaError: what is there is not known then."""
        self._thread.run("copy to the tier", lambda: self._put(offsets, nbytes), PUT_TIMEOUT_S)

    def _put(self, offsets: Sequence[int], nbytes: int) -> None:
        try:
            for index, offset in enumerate(offsets):
                self._driver.put(self._start + offset, self._room_at + index * nbytes, nbytes, self._stream)
        finally:
            self._driver.synchronize(self._stream)

    @property
    def let_go(self) -> bool:
        """Whether nothing is held any more."""
        return self.released.is_set()

    def close(self) -> None:
        """Have everything given back, without waiting for the driver; safe to call twice."""
        self._thread.post(self._release)
        self._thread.end()

    def _release(self) -> None:
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # whatever fails, the rest is given back
                log.warning("the GPU tier was not let go cleanly", reason=str(error) or repr(error))
        self.released.set()

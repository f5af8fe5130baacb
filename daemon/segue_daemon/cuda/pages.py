"""An engine's KV pages on a GPU: mapped from its exported handles, gathered into page-locked host memory.

`CudaPages` is `Pages` for GPUs. The event loop calls it; a thread of its own (`device_thread`) makes the
driver calls and is waited for with a deadline. Invariants: a copy has returned only when its bytes are in
host memory; nothing is read outside the fragments of a validated geometry; after a driver error, a passed
deadline or `close` nothing is read at all, and nothing else of the daemon is touched by that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import structlog

from segue_core.errors import SegueError
from segue_core.geometry import Fragment, Geometry
from segue_daemon.arena import Bytes
from segue_daemon.cuda.device import EngineDevice
from segue_daemon.cuda.device_thread import DeviceThread
from segue_daemon.cuda.driver import CudaError
from segue_daemon.pages import PagesError, check_block, check_room

log = structlog.get_logger()

OPEN_TIMEOUT_S = 30.0
"""A first context on a large machine takes seconds."""
COPY_TIMEOUT_S = 2.0
"""One block; it takes less than a millisecond unless the GPU is lost. The event loop waits for it."""
PIN_TIMEOUT_S = 10.0
MAX_BUFFER_BYTES = 4 << 30
"""Page-locked memory for one engine: two blocks and a delta for each peer, far below this."""


class _Pieces(NamedTuple):
    """Parts of block 0: device addresses, how far the next block's are, and their sizes."""

    starts: tuple[int, ...]
    strides: tuple[int, ...]
    sizes: list[int]
    nbytes: int


class CudaPages:
    """Pages on one GPU; `fds` are the descriptors of the geometry's handles, in their order."""

    def __init__(
        self,
        geometry: Geometry,
        fds: Sequence[int],
        *,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        copy_timeout_s: float = COPY_TIMEOUT_S,
    ) -> None:
        """Open and map all handles. The descriptors stay the caller's. Raises CudaError or ProtocolError."""
        self.geometry = geometry
        self.failure = ""
        self.released = threading.Event()
        """Set once the memory of the engine is let go."""
        self._copy_timeout_s = copy_timeout_s
        self._closed = False
        self._device: EngineDevice | None = None
        self._pinned_bytes = 0
        self._slots: dict[tuple[int, int], _Pieces] = {}
        self._thread = DeviceThread("segue-gpu")
        try:
            self._bases = self._thread.run("map", lambda: self._open(fds), open_timeout_s)
            self._block = self._pieces(geometry.fragments)
            self._bounce = self._pinned(geometry.block_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, fds: Sequence[int]) -> tuple[int, ...]:
        self._device = EngineDevice(self.geometry, fds)
        return self._device.bases

    def _pieces(self, fragments: Sequence[Fragment]) -> _Pieces:
        return _Pieces(
            tuple(self._bases[f.handle] + f.offset for f in fragments),
            tuple(f.block_stride for f in fragments),
            [f.nbytes for f in fragments],
            sum(f.nbytes for f in fragments),
        )

    def buffer(self, nbytes: int) -> Bytes:
        """Page-locked memory; if the host has none to lock, ordinary memory with a stop on the way."""
        try:
            return self._pinned(nbytes)
        except (SegueError, OSError) as error:
            log.warning("no page-locked memory; copies take a second step", reason=str(error))
            return np.empty(nbytes, np.uint8)

    def _pinned(self, nbytes: int) -> Bytes:
        device = self._readable()
        if self._pinned_bytes + nbytes > MAX_BUFFER_BYTES:
            raise PagesError(f"one engine has {MAX_BUFFER_BYTES} bytes of page-locked memory at most")
        made = self._thread.run("page-lock", lambda: device.buffer(nbytes), PIN_TIMEOUT_S)
        self._pinned_bytes += nbytes

        def unused() -> None:
            self._pinned_bytes -= nbytes
            self._thread.post(lambda: device.drop(made))

        return made.array(unused)

    def _readable(self) -> EngineDevice:
        if self._closed or self._device is None:
            raise PagesError("the engine's GPU memory is closed")
        if self.failure:
            raise PagesError(self.failure)
        return self._device

    def copy_block(self, block: int, out: Bytes) -> None:
        self._copy(self._block, block, out)

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        pieces = self._slots.get((first, last))
        if pieces is None:
            runs = self.geometry.slot_runs(first, last)
            pieces = self._slots[first, last] = self._pieces([run.piece for run in runs])
        self._copy(pieces, block, out)
        return pieces.nbytes

    def _copy(self, pieces: _Pieces, block: int, out: Bytes) -> None:
        device = self._readable()
        check_block(self.geometry, block)
        check_room(out, pieces.nbytes)
        sources = [start + block * by for start, by in zip(pieces.starts, pieces.strides, strict=True)]
        host = int(out.ctypes.data)
        direct = any(buffer.holds(host, pieces.nbytes) for buffer in device.buffers)
        if not direct:
            host = int(self._bounce.ctypes.data)
        try:
            self._thread.run("copy", lambda: device.gather(host, sources, pieces.sizes), self._copy_timeout_s)
        except CudaError as error:
            self.failure = f"the engine's GPU memory cannot be read any more: {error}"
            raise PagesError(self.failure) from error
        if not direct:
            out[: pieces.nbytes] = self._bounce[: pieces.nbytes]

    def close(self) -> None:
        """Have the memory let go, without waiting for the driver; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._thread.post(self._release)
            self._thread.end()

    def _release(self) -> None:
        device, self._device = self._device, None
        try:
            if device is not None:
                device.close()
        finally:
            self.released.set()

"""An engine's KV pages on a GPU: mapped from its exported handles, gathered into page-locked host memory.

`CudaPages` is `Pages` for GPUs. The event loop calls it; a thread of its own (`device_thread`) makes the
driver calls and is waited for with a deadline. Invariants: a copy has returned only when its bytes are in
host memory; nothing is read outside the fragments of a validated geometry; after a driver error, a passed
deadline or `close` nothing is read at all, and nothing else of the daemon is touched by that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import structlog

from segue_core.errors import SegueError
from segue_core.framing import close_fds
from segue_core.geometry import Fragment, Geometry
from segue_daemon.arena import Bytes
from segue_daemon.cuda.device import EngineDevice, Pieces
from segue_daemon.cuda.device_thread import DeviceThread
from segue_daemon.cuda.driver import CudaError
from segue_daemon.pages import PagesError, check_block, check_room

log = structlog.get_logger()

OPEN_TIMEOUT_S = 30.0
"""A first context on a large machine takes seconds."""
COPY_TIMEOUT_S = 2.0
"""A block, or the blocks of a delta; milliseconds unless the GPU is lost. The event loop waits for it."""
CHUNK_BYTES = 4 << 20
"""Of a copy of several blocks, at least one block: while one chunk is worked on, the next one is copied."""
PIN_TIMEOUT_S = 2.0
"""Some tens of MiB. The event loop waits for it, too."""
MAX_BUFFER_BYTES = 4 << 30
"""Page-locked memory for one engine: a chunk, and two blocks and a delta for each peer, far below this."""


class _Parts(NamedTuple):
    """Parts of block 0: device addresses, how far the next block's are, and their sizes."""

    starts: tuple[int, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    def of(self, blocks: Sequence[int]) -> Pieces:
        """The same parts of these blocks."""
        parts = tuple(zip(self.starts, self.strides, strict=True))
        sources = [start + block * stride for block in blocks for start, stride in parts]
        return Pieces(sources, self.sizes * len(blocks), self.nbytes * len(blocks))


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
        self._slots: dict[tuple[int, int], _Parts] = {}
        self._thread = DeviceThread("segue-gpu")
        try:
            own = _duplicates(fds)
            self._bases = self._thread.run("map", lambda: self._open(own), open_timeout_s)
            self._block = self._parts(geometry.fragments)
            self._at_once = max(1, CHUNK_BYTES // geometry.block_bytes)
            self._bounce = self._pinned(self._at_once * geometry.block_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, fds: list[int]) -> tuple[int, ...]:
        try:
            self._device = EngineDevice(self.geometry, fds)
        finally:
            close_fds(fds)
        return self._device.bases

    def _parts(self, fragments: Sequence[Fragment]) -> _Parts:
        return _Parts(
            tuple(self._bases[f.handle] + f.offset for f in fragments),
            tuple(f.block_stride for f in fragments),
            tuple(f.nbytes for f in fragments),
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
        for _ in self.copy_blocks((block,), out):
            pass

    def copy_blocks(self, blocks: Sequence[int], out: Bytes) -> Iterator[int]:
        self._readable()
        for block in blocks:
            check_block(self.geometry, block)
        check_room(out, len(blocks) * self._block.nbytes)
        return self._copy(self._block, blocks, out)

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        self._readable()
        parts = self._slots.get((first, last))
        if parts is None:
            runs = self.geometry.slot_runs(first, last)
            parts = self._slots[first, last] = self._parts([run.piece for run in runs])
        check_block(self.geometry, block)
        check_room(out, parts.nbytes)
        for _ in self._copy(parts, (block,), out):
            pass
        return parts.nbytes

    def _copy(self, parts: _Parts, blocks: Sequence[int], out: Bytes) -> Iterator[int]:
        """Copy these parts of `blocks`; yields how many blocks are complete."""
        device, host = self._readable(), int(out.ctypes.data)
        chunks = [blocks[first : first + self._at_once] for first in range(0, len(blocks), self._at_once)]
        left_s = self._copy_timeout_s
        if any(buffer.holds(host, parts.nbytes * len(blocks)) for buffer in device.buffers):
            with contextlib.closing(self._gather(host, map(parts.of, chunks), left_s)) as copied:
                for done in copied:
                    yield min(done * self._at_once, len(blocks))
            return
        complete = 0
        for chunk in chunks:
            begun = time.monotonic()
            for _ in self._gather(int(self._bounce.ctypes.data), (parts.of(chunk),), left_s):
                nbytes = parts.nbytes * len(chunk)
                out[complete * parts.nbytes :][:nbytes] = self._bounce[:nbytes]
            left_s -= time.monotonic() - begun
            complete += len(chunk)
            yield complete

    def _gather(self, host: int, chunks: Iterable[Pieces], timeout_s: float) -> Generator[int, None, None]:
        """Copy to page-locked memory; yields how many chunks are there."""
        device = self._readable()
        try:
            yield from self._thread.each("copy", lambda: device.gather(host, chunks), timeout_s)
        except CudaError as error:
            self.failure = f"the engine's GPU memory cannot be read any more: {error}"
            raise PagesError(self.failure) from error

    @property
    def let_go(self) -> bool:
        return self.released.is_set()

    def close(self) -> None:
        """Have the memory let go, without waiting for the driver; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._thread.post(self._release)
            self._bounce = np.empty(0, np.uint8)  # what waits for its end knows these pages, and keeps them
            self._thread.end()

    def _release(self) -> None:
        device, self._device = self._device, None
        try:
            if device is not None:
                device.close()
        finally:
            self.released.set()


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Of descriptors that the thread may need longer than their owner has them. Raises OSError."""
    own: list[int] = []
    try:
        for fd in fds:
            own.append(os.dup(fd))
    except OSError:
        close_fds(own)
        raise
    return own

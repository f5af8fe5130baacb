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
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import structlog

from segue_core.errors import SegueError
from segue_core.framing import close_fds
from segue_core.geometry import Fragment, Geometry
from segue_daemon.arena import Bytes
from segue_daemon.cuda.device import Batch, EngineDevice
from segue_daemon.cuda.device_thread import DeviceThread
from segue_daemon.cuda.driver import CudaError
from segue_daemon.pages import PagesError, Piece, check_block, check_room, side_by_side

log = structlog.get_logger()

OPEN_TIMEOUT_S = 30.0
"""A first context on a large machine takes seconds."""
COPY_TIMEOUT_S = 2.0
"""All that is copied together; milliseconds unless the GPU is lost. The event loop waits for it."""
CHUNK_BYTES = 4 << 20
"""Of a copy of several pieces, at least one block: while one chunk is worked on, the next one is copied."""
BATCH_BYTES = CHUNK_BYTES
"""Small deltas are built up to here and go out together: a copy costs a way to the thread and back, and a
wait for the stream, whatever it brings."""
PIN_TIMEOUT_S = 2.0
"""Some tens of MiB. The event loop waits for it, too."""
MAX_BUFFER_BYTES = 4 << 30
"""Page-locked memory for one engine: a chunk, and for each peer a batch, a delta and two blocks, are far
below this."""


class _Parts(NamedTuple):
    """Parts of block 0: (device address, how far the next block's is) of each, their sizes, and where each
    lies once they stand one behind the other."""

    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


class _Copy(NamedTuple):
    """A piece that was checked."""

    piece: Piece
    parts: _Parts


def _batch(copies: Sequence[_Copy], hosts: Iterable[int]) -> Batch:
    """These copies, each to its host address."""
    targets: list[int] = []
    sources: list[int] = []
    sizes: list[int] = []
    for (piece, parts), host in zip(copies, hosts, strict=True):
        block = piece.block
        targets += [host + offset for offset in parts.offsets]
        sources += [start + block * stride for start, stride in parts.places]
        sizes += parts.sizes
    return Batch(targets, sources, sizes)


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
        self.gathers = True
        self.batch_bytes = BATCH_BYTES
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
        sizes = tuple(f.nbytes for f in fragments)
        *offsets, nbytes = accumulate(sizes, initial=0)
        places = tuple((self._bases[f.handle] + f.offset, f.block_stride) for f in fragments)
        return _Parts(places, sizes, tuple(offsets), nbytes)

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
        for _ in self.copy_pieces((Piece(block, out),)):
            pass

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        for _ in self.copy_pieces((Piece(block, out, (first, last)),)):
            pass
        return self._slot_parts(first, last).nbytes

    def copy_blocks(self, blocks: Sequence[int], out: Bytes) -> Generator[int, None, None]:
        return self.copy_pieces(side_by_side(self.geometry, blocks, out))

    def copy_pieces(self, pieces: Sequence[Piece]) -> Generator[int, None, None]:
        self._readable()
        copies = []
        for piece in pieces:
            parts = self._block if piece.slots is None else self._slot_parts(*piece.slots)
            check_block(self.geometry, piece.block)
            check_room(piece.out, parts.nbytes)
            copies.append(_Copy(piece, parts))
        return self._copy(copies)

    def _slot_parts(self, first: int, last: int) -> _Parts:
        parts = self._slots.get((first, last))
        if parts is None:
            runs = self.geometry.slot_runs(first, last)
            parts = self._slots[first, last] = self._parts([run.piece for run in runs])
        return parts

    def _copy(self, copies: list[_Copy]) -> Generator[int, None, None]:
        """Copy chunk by chunk; yields how many pieces are complete."""
        if not copies:
            return
        device, left_s = self._readable(), self._copy_timeout_s
        hosts = [int(copy.piece.out.ctypes.data) for copy in copies]
        chunks = list(_chunks(copies, len(self._bounce)))
        if all(device.locked(host, copy.parts.nbytes) for host, copy in zip(hosts, copies, strict=True)):
            batches = (_batch(copies[chunk], hosts[chunk]) for chunk in chunks)
            with contextlib.closing(self._gather(batches, left_s)) as copied:
                for done in copied:
                    yield chunks[done - 1].stop
            return
        for chunk in chunks:
            begun, some = time.monotonic(), copies[chunk]
            ends = list(accumulate((parts.nbytes for _, parts in some), initial=0))
            bounce = int(self._bounce.ctypes.data)
            for _ in self._gather((_batch(some, [bounce + end for end in ends[:-1]]),), left_s):
                for (piece, parts), at in zip(some, ends, strict=False):
                    piece.out[: parts.nbytes] = self._bounce[at : at + parts.nbytes]
            left_s -= time.monotonic() - begun
            yield chunk.stop

    def _gather(self, batches: Iterable[Batch], timeout_s: float) -> Generator[int, None, None]:
        """Copy to page-locked memory; yields how many batches are there."""
        device = self._readable()
        try:
            yield from self._thread.each("copy", lambda: device.gather(batches), timeout_s)
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


def _chunks(copies: Sequence[_Copy], most_bytes: int) -> Iterator[slice]:
    """Cut copies into runs of at most so many bytes, and at least one copy."""
    first = nbytes = 0
    for index, (_, parts) in enumerate(copies):
        if nbytes and nbytes + parts.nbytes > most_bytes:
            yield slice(first, index)
            first, nbytes = index, 0
        nbytes += parts.nbytes
    yield slice(first, len(copies))

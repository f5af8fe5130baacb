"""What one engine life takes of a GPU: context, mapping, stream, page-locked buffers.

Used in the device thread only. Invariant: whatever was taken is given back by `close`, whatever fails on the
way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import structlog

from segue_core.geometry import Geometry
from segue_daemon.cuda.driver import CudaError, load
from segue_daemon.cuda.mapping import DeviceMapping
from segue_daemon.cuda.pinned import PinnedBuffer

log = structlog.get_logger()


class Batch(NamedTuple):
    """Copies that are queued together: addresses of host and of device memory, and sizes."""

    targets: Sequence[int]
    sources: Sequence[int]
    sizes: Sequence[int]


class EngineDevice:
    """The GPU of one engine, its memory mapped. `bases[h]`: address of geometry handle h's first byte."""

    def __init__(self, geometry: Geometry, fds: Sequence[int]) -> None:
        """Raises CudaError or ProtocolError; nothing is held then."""
        self.buffers: list[PinnedBuffer] = []
        self.bases: tuple[int, ...] = ()
        self._driver = load()
        self._undo: list[Callable[[], None]] = []
        device = self._driver.device(geometry.gpu)
        context = self._driver.retain_context(device)
        self._undo.append(lambda: self._driver.release_context(device))
        try:
            self._driver.make_current(context)
            self._stream: Any = self._driver.create_stream()
            self._undo.append(lambda: self._driver.destroy_stream(self._stream))
            self._event: Any = self._driver.create_event()
            self._undo.append(lambda: self._driver.destroy_event(self._event))
            self._undo.append(self._close_buffers)
            mapping = DeviceMapping(self._driver, device, geometry, fds)
            self._undo.append(mapping.close)
            self.bases = tuple(mapping.bases)
        except BaseException:
            self.close()
            raise

    def buffer(self, nbytes: int) -> PinnedBuffer:
        """New page-locked memory."""
        made = PinnedBuffer(self._driver, nbytes)
        self.buffers.append(made)
        return made

    def locked(self, address: int, nbytes: int) -> bool:
        """Whether `nbytes` from `address` on are page-locked memory of this engine's."""
        return any(buffer.holds(address, nbytes) for buffer in self.buffers)

    def drop(self, buffer: PinnedBuffer) -> None:
        """Nobody uses `buffer` any more."""
        if buffer in self.buffers:
            self.buffers.remove(buffer)
            _try(buffer.close)

    def gather(self, batches: Iterable[Batch]) -> Iterator[int]:
        """Copy batch by batch to host memory. Yields how many batches are there, while the next one is on its
        way. Nothing is on its way any more when it ends, however it ends."""
        driver, stream, queued = self._driver, self._stream, 0
        try:
            for batch in batches:
                if queued:
                    driver.record(self._event, stream)
                driver.gather(batch.targets, batch.sources, batch.sizes, stream)
                if queued:
                    driver.wait_for(self._event)
                    yield queued
                queued += 1
            driver.synchronize(stream)
        except BaseException:
            with contextlib.suppress(CudaError):
                driver.synchronize(stream)
            raise
        if queued:
            yield queued

    def close(self) -> None:
        """Give everything back, the engine's memory first; safe to call twice."""
        self.bases = ()
        while self._undo:
            _try(self._undo.pop())

    def _close_buffers(self) -> None:
        while self.buffers:
            _try(self.buffers.pop().close)


def _try(step: Callable[[], None]) -> None:
    try:
        step()
    except CudaError as error:
        log.warning("something on the GPU was not let go cleanly", reason=str(error))

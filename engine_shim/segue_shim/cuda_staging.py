"""Page-locked memory in two halves: the GPU reads one while the other is filled.

For loads from a replica arena that cannot be page-locked itself: it is mapped read only, and not every driver
locks such memory. Owned by the loader, in the engine's thread. Invariant: a half is filled only when the
GPU has read what was in it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

from segue_shim.cuda_driver import CudaCallError, CudaDriver
from segue_shim.cuda_table import HOST_REGISTER_PORTABLE

HALVES = 2


class Staging:
    """Halves of `half_bytes`."""

    def __init__(self, driver: CudaDriver, half_bytes: int) -> None:
        """A context must be current. Raises CudaCallError; nothing is held then."""
        self._driver = driver
        self._half_bytes = half_bytes
        self._half = 0
        self._events: list[int] = []
        self._undo: list[Callable[[], None]] = []
        self._map = mmap.mmap(-1, HALVES * half_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        try:
            driver.register_host(self._address, HALVES * half_bytes, HOST_REGISTER_PORTABLE)
            self._undo.append(lambda: driver.unregister_host(self._address))
            for _ in range(HALVES):
                event = driver.create_event()
                self._events.append(event)
                self._undo.append(lambda event=event: driver.destroy_event(event))  # type: ignore[misc]
        except CudaCallError:
            self.close()
            raise

    def put(self, sources: Sequence[int], nbytes: int) -> list[int]:
        """Copies of `nbytes` at each of these addresses, in the half that is next; they fit."""
        assert len(sources) * nbytes <= self._half_bytes
        self._half = (self._half + 1) % HALVES
        self._driver.wait_for(self._events[self._half])
        start = self._address + self._half * self._half_bytes
        copies = [start + index * nbytes for index in range(len(sources))]
        for target, source in zip(copies, sources, strict=True):
            ctypes.memmove(target, source, nbytes)
        return copies

    def queued(self, stream: int) -> None:
        """The copies out of what was put last are queued in `stream`."""
        self._driver.record(self._events[self._half], stream)

    def close(self) -> None:
        """Nothing is read from it any more. Raises the first CudaCallError once all was tried."""
        first: CudaCallError | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except CudaCallError as error:
                first = first or error
        if first is not None:
            raise first

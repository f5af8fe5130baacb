"""Page-locked host memory that the GPU copies into, and out of which the link sends.

The memory lives as long as anybody refers to it; only the lock ends with `close`. So a view that outlives the
engine is a view of ordinary memory, never of nothing; and whoever lets its last view go need not say so.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import numpy as np

from segue_daemon.arena import Bytes
from segue_daemon.cuda.driver import Driver


class PinnedBuffer:
    """`nbytes` from `address` on, touched and page-locked. Made and closed in the device thread."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        """Raises CudaError if the memory cannot be locked, OSError if there is none."""
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._driver = driver
        self._map = mmap.mmap(-1, whole, flags=flags)
        self.nbytes = nbytes
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        driver.register_host(self.address, whole)
        self._locked = True

    def array(self, unused: Callable[[], object]) -> Bytes:
        """The memory, (nbytes,) uint8. `unused` is called when neither it nor a part of it is left."""
        made = np.frombuffer(self._map, np.uint8, self.nbytes)
        weakref.finalize(made, unused).atexit = False
        return made

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether `nbytes` from `address` on are locked here."""
        inside = self.address <= address and address + nbytes <= self.address + self.nbytes
        return self._locked and inside

    def close(self) -> None:
        """Unlock; safe to call twice. Raises CudaError."""
        if self._locked:
            self._locked = False
            self._driver.unregister_host(self.address)

"""The timeline: the number of the newest step whose kernels are complete, written by the GPU itself.

A page of shared host memory with one u64. The engine page-locks it and queues a write of each step's number
behind the step's kernels; the daemon only reads. So the daemon needs no driver call to know what is
complete, cannot hang on an engine that dies, and reads the truth from a dead engine's page too.

Invariant: the number never goes down, and all that the steps up to it wrote is in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from segue_core.errors import ProtocolError
from segue_core.shared_memory import check_sealed, seal_size, sealable_memory

TIMELINE_BYTES = mmap.PAGESIZE


class Timeline:
    """The engine's end: `fd` is passed on, `address` is where the GPU writes (page aligned)."""

    def __init__(self) -> None:
        self.fd = sealable_memory("segue-timeline")
        os.ftruncate(self.fd, TIMELINE_BYTES)
        seal_size(self.fd)
        self._map = mmap.mmap(self.fd, TIMELINE_BYTES)
        self._word = ctypes.c_uint64.from_buffer(self._map)
        self.address = ctypes.addressof(self._word)

    @property
    def step(self) -> int:
        """Newest complete step."""
        return int(self._word.value)

    @step.setter
    def step(self, step: int) -> None:
        self._word.value = step

    def close(self) -> None:
        """Close the descriptor; safe to call twice. The page stays as long as this object."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class TimelineView:
    """The daemon's end, mapped read only."""

    def __init__(self, fd: int) -> None:
        """Map the page at `fd`, which stays the caller's. Raises ProtocolError if it is none."""
        check_sealed(fd, "the timeline")
        if os.fstat(fd).st_size != TIMELINE_BYTES:
            raise ProtocolError(f"a timeline of {os.fstat(fd).st_size} bytes: expected {TIMELINE_BYTES}")
        self._map = mmap.mmap(fd, TIMELINE_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")

    @property
    def step(self) -> int:
        """Newest complete step."""
        return self._words[0]

    def close(self) -> None:
        """Unmap; safe to call twice."""
        self._words.release()
        self._map.close()

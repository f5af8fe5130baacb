"""The arena: one memfd, allocated and touched at start-up, that holds all replicas.

`ExtentAllocator` is the pure part: which bytes are taken. `Arena` is the memory. Engines map the same
memfd read only to load from it. Invariants: live extents never overlap and never leave the arena;
what was freed is joined with its neighbours, so a drained arena is one extent again.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from segue_core.errors import StartupError
from segue_core.shared_memory import read_only, seal_size, sealable_memory

ALIGNMENT = 64
Bytes = npt.NDArray[np.uint8]


class ExtentAllocator:
    """First fit over a sorted list of free extents; sizes are rounded up to `ALIGNMENT`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        self.used = 0
        self._offsets = [0] if self.capacity else []
        self._sizes = [self.capacity] if self.capacity else []

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, in whatever pieces."""
        return self.capacity - self.used

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free extent of at least `nbytes`, or None if there is none."""
        need = rounded(nbytes)
        for index, size in enumerate(self._sizes):
            if size >= need:
                offset = self._offsets[index]
                if size == need:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += need
                    self._sizes[index] -= need
                self.used += need
                return offset
        return None

    def extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every free extent, in order."""
        return list(zip(self._offsets, self._sizes, strict=True))

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate` returned for the same `nbytes`."""
        need = rounded(nbytes)
        index = bisect_left(self._offsets, offset)
        after = index < len(self._offsets) and self._offsets[index] == offset + need
        before = index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset
        assert index == len(self._offsets) or offset + need <= self._offsets[index], "freed twice"
        assert index == 0 or self._offsets[index - 1] + self._sizes[index - 1] <= offset, "freed twice"
        self.used -= need
        if before and after:
            self._sizes[index - 1] += need + self._sizes[index]
            del self._offsets[index], self._sizes[index]
        elif before:
            self._sizes[index - 1] += need
        elif after:
            self._offsets[index] = offset
            self._sizes[index] += need
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, need)


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment; at least one unit."""
    return max(ALIGNMENT, (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


class Arena:
    """The replica memory: `fd` can only be read and may be passed on; `bytes` is (capacity,) uint8."""

    def __init__(self, capacity: int) -> None:
        """Reserve and touch `capacity` bytes. Raises StartupError if the host has not that much."""
        memory = sealable_memory("segue-replicas")
        try:
            os.posix_fallocate(memory, 0, capacity)
            seal_size(memory)
            self._map = mmap.mmap(memory, capacity, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.fd = read_only(memory)
        except OSError as error:
            raise StartupError(
                f"store: cannot reserve {capacity} bytes for replicas: {error.strerror}",
                hint="set a smaller store.budget_bytes",
            ) from error
        finally:
            os.close(memory)
        self.capacity = capacity
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the host's memory that the arena takes."""
        return os.fstat(self.fd).st_blocks * 512

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the whole pages within a free extent to the host; they read as zeros until written again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Let the memory go (engines that map it keep their mapping)."""
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:  # a view is still referenced: the kernel frees it with the process
            return
        finally:
            os.close(self.fd)

"""An arena that shows where it was written: guard pages around it, and every byte accounted for.

`GuardedArena` is the daemon's own, mapped between two pages that nobody may touch: a write that runs out of
it ends the process at once. `WriteWatch` compares the arena before and after: a byte that changed outside of
the blocks that were asked for is a violation.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np

from fuzz.target import Violation
from segue_core.shared_memory import read_only, seal_size, sealable_memory
from segue_daemon.arena import Arena, Bytes
from segue_daemon.blocks import Block, BlockPool
from segue_daemon.store import ReplicaStore

PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class GuardedArena(Arena):
    """Of a whole number of pages."""

    def __init__(self, capacity: int) -> None:
        memory = sealable_memory("segue-replicas")
        os.ftruncate(memory, capacity)
        seal_size(memory)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._whole = capacity + 2 * PAGE
        self._start = _libc.mmap(None, self._whole, 0, private, -1, 0)
        flags, access = mmap.MAP_SHARED | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        inside = _libc.mmap(self._start + PAGE, capacity, access, flags, memory, 0)
        if FAILED in (self._start, inside):
            raise OSError(ctypes.get_errno(), "cannot map a guarded arena")
        self.fd = read_only(memory)
        os.close(memory)
        self.capacity = capacity
        self.bytes: Bytes = np.frombuffer((ctypes.c_uint8 * capacity).from_address(inside), dtype=np.uint8)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Nothing: that would change bytes."""

    def close(self) -> None:
        """Unmap it: whoever still has a view of it will notice."""
        self.bytes = np.empty(0, dtype=np.uint8)
        os.close(self.fd)
        _libc.munmap(self._start, self._whole)


class WriteWatch:
    """Looks at `memory`, the arena of `store`, from one `check` to the next."""

    def __init__(self, memory: Bytes, store: ReplicaStore) -> None:
        self._memory = memory
        self._before = memory.copy()
        self._asked: set[tuple[int, int]] = set()
        pool: BlockPool = store._pool
        given: Callable[[Block], Bytes] = pool.memory

        def note(block: Block) -> Bytes:
            self._asked.add((block.offset, block.nbytes))
            return given(block)

        pool.memory = note  # type: ignore[method-assign]

    def check(self) -> None:
        """Raise Violation if a byte changed that belonged to no block that was asked for."""
        changed = np.flatnonzero(self._memory != self._before)
        if len(changed):
            allowed = np.zeros(len(self._memory), dtype=bool)
            for offset, nbytes in self._asked:
                allowed[offset : offset + nbytes] = True
            strays = changed[~allowed[changed]]
            if len(strays):
                raise Violation(
                    f"{len(strays)} bytes were written outside of any block, the first at {strays[0]}"
                )
            self._before[changed] = self._memory[changed]
        self._asked.clear()

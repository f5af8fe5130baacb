"""Copies replica blocks from the daemon's arena into the engine's pages on a GPU.

What `loader` is for host memory: it owns the copy, not the decision. Invariants: nothing is read outside the
arena and nothing written outside the blocks named; the copies run behind what the engine has queued so far,
and all of them are complete when `copy` returns.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from segue_shim.cuda_driver import (
    HOST_REGISTER_PORTABLE,
    HOST_REGISTER_READ_ONLY,
    READ_ONLY_REGISTER_SUPPORTED,
    CudaCallError,
    CudaDriver,
)
from segue_shim.cuda_export import DeviceExport
from segue_shim.plan import check_load

if TYPE_CHECKING:
    from segue_shim.loader import Arena

logger = logging.getLogger("segue_shim")

BOUNCE_BYTES = 8 << 20
"""Page-locked memory for loads from an arena that cannot be page-locked itself."""
BATCH_BYTES = 64 << 20
"""Queued at once, so that the lists of pieces stay short."""


class CudaLoader:
    """Copies blocks into one engine's exported memory. `stream()` is the stream of the engine's kernels."""

    def __init__(self, driver: CudaDriver, export: DeviceExport, stream: Callable[[], int]) -> None:
        """A context must be current. Raises CudaCallError."""
        self._driver = driver
        self._geometry = export.geometry
        self._device = export.device
        self._context = driver.primary_context(export.device)
        self._stream = driver.create_stream()
        self._event = driver.create_event()
        self._engine_stream = stream
        self._targets = [
            (export.bases[f.handle] + f.offset, f.block_stride) for f in export.geometry.fragments
        ]
        self._sizes = [fragment.nbytes for fragment in export.geometry.fragments]
        self._bounce = 0
        self._bounce_map: mmap.mmap | None = None

    def prepare(self, arena: Arena) -> None:
        """Page-lock `arena`, in whatever thread, so that loads are direct. Without it they are only
        slower."""
        driver, address = self._driver, arena.address
        flags = HOST_REGISTER_PORTABLE
        try:
            driver.enter(self._context)
            if driver.attribute(READ_ONLY_REGISTER_SUPPORTED, self._device):
                flags |= HOST_REGISTER_READ_ONLY
            driver.register_host(address, arena.nbytes, flags)
        except CudaCallError as error:
            logger.info("segue: the replica arena is not page-locked, loads take a second step: %s", error)
            return
        arena.lock(lambda: self._unlock(address))

    def _unlock(self, address: int) -> None:
        try:
            self._driver.enter(self._context)
            self._driver.unregister_host(address)
        except CudaCallError as error:
            logger.warning("segue: the replica arena could not be unlocked: %s", error)

    def copy(self, arena: Arena, block_ids: Sequence[int], extents: Sequence[int]) -> int:
        """Fill block `block_ids[i]` from arena offset `extents[i]`; returns the bytes copied, all of them
        there.

        Raises ValueError if a block or an extent is out of bounds: nothing has been copied then. Raises
        CudaCallError: what the blocks hold is not known then.
        """
        check_load(self._geometry, arena.nbytes, block_ids, extents)
        self._driver.enter(self._context)
        self._driver.follow(self._stream, self._engine_stream(), self._event)
        block_bytes = self._geometry.block_bytes
        start = arena.address
        direct = arena.locked
        at_once = max(1, (BATCH_BYTES if direct else BOUNCE_BYTES) // block_bytes)
        try:
            for first in range(0, len(block_ids), at_once):
                sources = [start + extent for extent in extents[first : first + at_once]]
                if not direct:
                    sources = self._staged(sources)
                self._scatter(block_ids[first : first + at_once], sources)
                if not direct:
                    self._driver.synchronize(self._stream)  # the bounce buffer is filled again
        finally:
            self._driver.synchronize(self._stream)
        return len(block_ids) * block_bytes

    def _scatter(self, block_ids: Sequence[int], sources: Sequence[int]) -> None:
        targets = [at + block * stride for block in block_ids for at, stride in self._targets]
        pieces: list[int] = []
        for source in sources:
            for nbytes in self._sizes:
                pieces.append(source)
                source += nbytes
        self._driver.scatter(targets, pieces, self._sizes * len(block_ids), self._stream)

    def _staged(self, sources: Sequence[int]) -> list[int]:
        """Copies of the blocks at `sources` in page-locked memory."""
        block_bytes = self._geometry.block_bytes
        if self._bounce_map is None:
            room = max(BOUNCE_BYTES, block_bytes)
            made = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            address = ctypes.addressof(ctypes.c_char.from_buffer(made))
            self._driver.register_host(address, room, HOST_REGISTER_PORTABLE)
            self._bounce_map, self._bounce = made, address
        staged = [self._bounce + index * block_bytes for index in range(len(sources))]
        for target, source in zip(staged, sources, strict=True):
            ctypes.memmove(target, source, block_bytes)
        return staged

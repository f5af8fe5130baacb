"""Copies replica blocks from the daemon's arena, and its GPU tier, into the engine's pages on a GPU.

What `loader` is for host memory: it owns the copy, not the decision. Invariants: nothing is read outside the
arena or the tier and nothing written outside the blocks named; the copies run behind what the engine has
queued so far, and all of them are complete when `copy` returns.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from segue_shim.cuda_driver import CudaCallError, CudaDriver, give_back
from segue_shim.cuda_export import DeviceExport
from segue_shim.cuda_staging import Staging
from segue_shim.cuda_table import (
    HOST_REGISTER_PORTABLE,
    HOST_REGISTER_READ_ONLY,
    READ_ONLY_REGISTER_SUPPORTED,
)
from segue_shim.cuda_tier import Tier, TierError, split
from segue_shim.plan import check_load

if TYPE_CHECKING:
    from segue_shim.loader import Arena

logger = logging.getLogger("segue_shim")

STAGED_BYTES = 4 << 20
"""Of loads from an arena that cannot be page-locked itself: so much is copied while the GPU takes as much."""
BATCH_BYTES = 16 << 20
BATCH_COPIES = 4096
"""Queued in one call: bounds what is built for it, which is done while the GPU copies the batch before."""


class CudaLoader:
    """Copies blocks into one engine's exported memory. `stream()` is the stream of the engine's kernels."""

    def __init__(self, driver: CudaDriver, export: DeviceExport, stream: Callable[[], int]) -> None:
        """A context must be current. Raises CudaCallError."""
        self._driver = driver
        self._geometry = export.geometry
        self._device = export.device
        self._undo: list[Callable[[], None]] = []
        self._context = driver.primary_context(export.device)
        self._undo.append(lambda: driver.release_context(export.device))
        try:
            self._stream = driver.create_stream()
            self._undo.append(lambda: driver.destroy_stream(self._stream))
            self._event = driver.create_event()
            self._undo.append(lambda: driver.destroy_event(self._event))
        except CudaCallError:
            self.close()
            raise
        self._engine_stream = stream
        self._targets = [
            (export.bases[f.handle] + f.offset, f.block_stride) for f in export.geometry.fragments
        ]
        self._sizes = [fragment.nbytes for fragment in export.geometry.fragments]
        self._staging: Staging | None = None

    def close(self) -> None:
        """Nothing is loaded any more. Raises nothing."""
        give_back(self._undo, "what loads take of the GPU")

    def prepare(self, arena: Arena) -> None:
        """Page-lock `arena`, in whatever thread, so that loads are direct. Without it they are only
        slower."""
        driver, address = self._driver, arena.address
        flags = HOST_REGISTER_PORTABLE
        try:
            self._enter()
            if driver.attribute(READ_ONLY_REGISTER_SUPPORTED, self._device):
                flags |= HOST_REGISTER_READ_ONLY
            driver.register_host(address, arena.nbytes, flags)
        except CudaCallError as error:
            logger.info(
                "segue: the replica arena is not page-locked, loads take a second step: %s: %s",
                error.call,
                error.name,
            )
            return
        arena.lock(lambda: self._unlock(address))

    def map_tier(self, fd: int, number: int, nbytes: int) -> Tier:
        """Map the daemon's GPU tier, in whatever thread. Raises CudaCallError."""
        return Tier(self._driver, self._device, self._enter, fd, number, nbytes)

    def _enter(self) -> None:
        self._driver.enter(self._context)

    def _unlock(self, address: int) -> None:
        try:
            self._enter()
            self._driver.unregister_host(address)
        except CudaCallError as error:
            logger.warning("segue: the replica arena could not be unlocked: %s: %s", error.call, error.name)

    def copy(self, arena: Arena, block_ids: Sequence[int], extents: Sequence[int]) -> int:
        """Fill block `block_ids[i]` from extent `extents[i]` (see `segue_core.extents`); returns the bytes
        copied, all of them there.

        Raises ValueError if a block or an extent is out of bounds: nothing has been copied then. Raises
        TierError if the tier cannot be read, CudaCallError for anything else: what the blocks hold is not
        known then.
        """
        (blocks, offsets), (blocks_in_tier, extents_in_tier) = split(block_ids, extents)
        check_load(self._geometry, arena.nbytes, blocks, offsets)
        with arena.tier_lock if blocks_in_tier else contextlib.nullcontext():
            copies = self._copies_of(arena, blocks_in_tier, extents_in_tier)
            self._enter()
            self._driver.follow(self._stream, self._engine_stream(), self._event)
            try:
                if blocks_in_tier and arena.tier is not None:
                    self._copy_from_tier(arena.tier, blocks_in_tier, copies)
                self._copy_from_arena(arena, blocks, offsets)
            finally:
                self._driver.synchronize(self._stream)
        return len(block_ids) * self._geometry.block_bytes

    def _copies_of(self, arena: Arena, blocks: Sequence[int], extents: Sequence[int]) -> list[int]:
        """Addresses in the tier. Raises ValueError if one of them is not in it."""
        if not blocks:
            return []
        if arena.tier is None:
            raise ValueError(f"{len(blocks)} blocks of a GPU tier that is not mapped")
        check_load(self._geometry, self._geometry.block_bytes, blocks, [0] * len(blocks))
        return arena.tier.addresses(extents, self._geometry.block_bytes)

    def _copy_from_tier(self, tier: Tier, blocks: Sequence[int], sources: Sequence[int]) -> None:
        at_once = self._at_once(BATCH_BYTES)
        try:
            for first in range(0, len(blocks), at_once):
                batch = slice(first, first + at_once)
                self._scatter(blocks[batch], sources[batch], on_device=True)
        except CudaCallError as error:
            raise TierError(tier.number, error) from error

    def _copy_from_arena(self, arena: Arena, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        staging = None if arena.locked or not blocks else self._staged()
        at_once = self._at_once(BATCH_BYTES if staging is None else STAGED_BYTES)
        for first in range(0, len(blocks), at_once):
            sources = [arena.address + offset for offset in offsets[first : first + at_once]]
            if staging is not None:
                sources = staging.put(sources, self._geometry.block_bytes)
            self._scatter(blocks[first : first + at_once], sources)
            if staging is not None:
                staging.queued(self._stream)

    def _at_once(self, nbytes: int) -> int:
        """How many blocks one batch copies, of at most `nbytes` if a block is no larger."""
        return max(1, min(nbytes // self._geometry.block_bytes, BATCH_COPIES // len(self._sizes)))

    def _staged(self) -> Staging:
        if self._staging is None:
            made = Staging(self._driver, max(STAGED_BYTES, self._geometry.block_bytes))
            self._undo.append(made.close)
            self._staging = made
        return self._staging

    def _scatter(self, block_ids: Sequence[int], sources: Sequence[int], *, on_device: bool = False) -> None:
        targets = [at + block * stride for block in block_ids for at, stride in self._targets]
        pieces: list[int] = []
        for source in sources:
            for nbytes in self._sizes:
                pieces.append(source)
                source += nbytes
        self._driver.scatter(targets, pieces, self._sizes * len(block_ids), self._stream, on_device=on_device)

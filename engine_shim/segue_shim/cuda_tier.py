"""The daemon's GPU tier, mapped into the engine: GPU memory with copies of replica blocks, read only.

Opened in the registrar's thread, read by the loader in the engine's. Invariants: an extent of another tier,
or one that is not inside, is refused before anything is copied; whatever was taken is given back by `close`,
or at once if opening fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from segue_core.extents import is_in_tier, tier_of
from segue_shim.cuda_driver import CudaCallError, CudaDriver, give_back

logger = logging.getLogger("segue_shim")

TIER = "the daemon's GPU tier"


class TierError(Exception):
    """Nothing can be loaded from tier `number`; all else may go on."""

    def __init__(self, number: int, error: CudaCallError) -> None:
        super().__init__(f"the GPU tier cannot be loaded from: {error.call}: {error.name}")
        self.number = number


class Tier:
    """Tier `number`, of `nbytes` bytes."""

    def __init__(
        self, driver: CudaDriver, device: int, enter: Callable[[], None], fd: int, number: int, nbytes: int
    ) -> None:
        """Map what `fd` names, which stays the caller's. `enter()` makes the device's context current. Raises
        CudaCallError; nothing is held then."""
        self.number = number
        self.nbytes = nbytes
        self._enter = enter
        self._undo: list[Callable[[], None]] = []
        enter()
        try:
            allocation = driver.import_fd(fd)
            try:
                self.address = driver.reserve(nbytes)
                self._undo.append(lambda: driver.free_range(self.address, nbytes))
                driver.map(self.address, nbytes, allocation)
                self._undo.append(lambda: driver.unmap(self.address, nbytes))
                driver.allow_reading(self.address, nbytes, device)
            finally:
                driver.release(allocation)  # the mapping keeps it
        except CudaCallError:
            give_back(self._undo, TIER)
            raise

    def close(self) -> None:
        """Nothing is loaded from it any more. Safe to call twice; raises nothing."""
        try:
            self._enter()
        except CudaCallError as error:
            logger.warning("segue: %s: not given back: %s: %s", TIER, error.call, error.name)
            return
        give_back(self._undo, TIER)

    def addresses(self, extents: Sequence[int], block_bytes: int) -> list[int]:
        """Where blocks lie. Raises ValueError for an extent that is not one of this tier."""
        found = []
        for extent in extents:
            number, offset = tier_of(extent)
            if number != self.number or offset + block_bytes > self.nbytes:
                raise ValueError(
                    f"extent {offset} of tier {number}; tier {self.number} has {self.nbytes} bytes"
                )
            found.append(self.address + offset)
        return found


def split(block_ids: Sequence[int], extents: Sequence[int]) -> tuple[tuple[list[int], list[int]], ...]:
    """((blocks, extents) in the arena, (blocks, extents) in a tier)."""
    parts: tuple[tuple[list[int], list[int]], ...] = ([], []), ([], [])
    for block, extent in zip(block_ids, extents, strict=True):
        blocks, places = parts[is_in_tier(extent)]
        blocks.append(block)
        places.append(extent)
    return parts

"""What a registered engine shares with its daemon: the journal ring, its doorbell, the replica arena.

Made by the registrar's thread, handed over once, used by the engine's thread only.
"""

from __future__ import annotations

import contextlib
import os

from segue_core.ring import Ring
from segue_core.shared_memory import seal_size, sealable_memory
from segue_shim.loader import Arena


class Channel:
    """One registration's shared memory. `arena` is there once the daemon has answered."""

    def __init__(self, ring_bytes: int) -> None:
        self.ring_fd = sealable_memory("segue-journal")
        try:
            self.ring = Ring(self.ring_fd, create=ring_bytes)
            seal_size(self.ring_fd)
            self.doorbell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(self.ring_fd)
            raise
        self.arena: Arena | None = None

    def append(self, payload: bytes) -> bool:
        """Write one record and wake the daemon if it sleeps; False if there was no room."""
        written = self.ring.append(payload)
        if self.ring.doorbell_wanted():
            # It would block if the counter were full: then it rings already.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self.doorbell_fd, 1)
        return written

    def close(self) -> None:
        """Unmap the ring and close its descriptors. The daemon keeps its own."""
        self.ring.close()
        os.close(self.ring_fd)
        os.close(self.doorbell_fd)
        if self.arena is not None:
            self.arena.close()
        self.arena = None

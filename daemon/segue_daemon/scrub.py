"""How fast sealed blocks are looked through for changes in memory. Pure: no I/O, no clock.

A token bucket: `rate` bytes a second, at most `burst` of them in one tick, so that looking never holds up
anything else for long. A block larger than what is left is checked all the same, and the debt is paid by not
checking for a while. Invariant: over any time t at most `rate * t + burst` bytes and one block are looked at.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_TICK_BYTES = 8 << 20
"""Under a millisecond of hashing."""


class Scrubber:
    """Decides how many blocks are checked now."""

    def __init__(self, *, bytes_per_s: int, burst: int = MAX_TICK_BYTES) -> None:
        """`bytes_per_s` 0: nothing is ever checked."""
        self._rate = bytes_per_s
        self._burst = burst
        self._allowance = 0.0
        self._last_ns: int | None = None
        self.scrubbed_bytes = 0

    def tick(self, now_ns: int, sealed_blocks: int, check: Callable[[], int]) -> None:
        """Spend what is due. `check` looks at the block whose turn it is and returns its bytes; none of the
        `sealed_blocks` is looked at twice in a tick."""
        elapsed_ns = now_ns - self._last_ns if self._last_ns is not None else 0
        self._last_ns = now_ns
        self._allowance = min(self._burst, self._allowance + self._rate * elapsed_ns / 1e9)
        for _ in range(sealed_blocks):
            if self._allowance <= 0:
                return
            nbytes = check()
            if not nbytes:
                return
            self._allowance -= nbytes
            self.scrubbed_bytes += nbytes

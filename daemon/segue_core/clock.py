"""Time, passed in: time-outs, leases and ages use a monotonic clock, never the wall clock.

CLOCK_MONOTONIC is one clock for all processes of a host, so deadlines may be handed
from a daemon to the engine beside it (not across hosts).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The host's CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class ManualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ms(self, milliseconds: float) -> None:
        """Move on by `milliseconds`; negative values are refused."""
        if milliseconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now_ns += int(milliseconds * 1e6)

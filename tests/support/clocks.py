"""Clocks that are passed in, so that no test sleeps for a pause to be over."""

from __future__ import annotations

from segue_core.clock import ManualClock, MonotonicClock


class AdvancedClock(ManualClock):
    """Runs as the host's clock does, ahead of it by whatever it was advanced: for code whose deadlines are
    the sockets' as well."""

    def __init__(self) -> None:
        super().__init__()
        self._host = MonotonicClock()

    def now_ns(self) -> int:
        return super().now_ns() + self._host.now_ns()

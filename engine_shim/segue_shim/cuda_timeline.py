"""The engine's end of the timeline: the GPU says itself which step is complete.

See `segue_core.timeline`. Invariant: a step's number is written by the stream that its kernels are in,
behind them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from segue_core.errors import GeometryError
from segue_core.timeline import TIMELINE_BYTES, Timeline
from segue_shim.cuda_driver import CudaCallError, CudaDriver
from segue_shim.cuda_table import CAN_WRITE_VALUE_64, HOST_REGISTER_MAPPED, HOST_REGISTER_PORTABLE


class GpuTimeline:
    """Made once an engine life. `stream()` is the stream of the step's kernels; a context must be current."""

    def __init__(self, driver: CudaDriver, device: int, stream: Callable[[], int]) -> None:
        """Raises GeometryError if this GPU cannot write it, CudaCallError."""
        if not driver.attribute(CAN_WRITE_VALUE_64, device):
            raise GeometryError("this GPU or its driver has no 64-bit stream memory operations")
        self._driver = driver
        self._stream = stream
        self._timeline = Timeline()
        flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED
        self._locked = False
        try:
            driver.register_host(self._timeline.address, TIMELINE_BYTES, flags)
            self._locked = True
            self._pointer = driver.device_pointer(self._timeline.address)
        except BaseException:
            with contextlib.suppress(CudaCallError):
                self.close()
            raise

    def close(self) -> None:
        """Nobody marks a step any more; safe to call twice. Raises CudaCallError; the descriptor is closed
        then, too."""
        locked, self._locked = self._locked, False
        try:
            if locked:
                self._driver.unregister_host(self._timeline.address)
        finally:
            self._timeline.close()

    @property
    def fd(self) -> int:
        """The shared page; stays open as long as the engine lives."""
        return self._timeline.fd

    def mark(self, step: int) -> None:
        """All kernels of `step` are queued: have its number written behind them."""
        self._driver.write_value(self._stream(), self._pointer, step)

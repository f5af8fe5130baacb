"""The engine's end of the timeline: the GPU says itself which step is complete.

See `segue_core.timeline`. Invariant: a step's number is written by the stream that its kernels are in,
behind them.
"""

from __future__ import annotations

from collections.abc import Callable

from segue_core.errors import GeometryError
from segue_core.timeline import TIMELINE_BYTES, Timeline
from segue_shim.cuda_driver import (
    CAN_WRITE_VALUE_64,
    HOST_REGISTER_MAPPED,
    HOST_REGISTER_PORTABLE,
    CudaDriver,
)


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
        driver.register_host(self._timeline.address, TIMELINE_BYTES, flags)
        self._pointer = driver.device_pointer(self._timeline.address)

    @property
    def fd(self) -> int:
        """The shared page; stays open as long as the engine lives."""
        return self._timeline.fd

    def mark(self, step: int) -> None:
        """All kernels of `step` are queued: have its number written behind them."""
        self._driver.write_value(self._stream(), self._pointer, step)

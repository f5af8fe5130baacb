"""What an engine with its KV cache on a GPU needs beyond the exporter: exported memory, timeline, loader.

Knows addresses and no torch (see `cuda_tensors`). Made once an engine life, kept as
long as it lives: handles and the timeline must outlast every daemon that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue_core.errors import GeometryError
from segue_shim.cuda_driver import CudaCallError, CudaDriver
from segue_shim.cuda_export import DeviceTensor, export_tensors
from segue_shim.cuda_loader import CudaLoader
from segue_shim.cuda_timeline import GpuTimeline


class CudaSide:
    """One engine rank's GPU. `fds` go to the daemon: the timeline's first, the memory's as they are."""

    def __init__(
        self,
        tensors: Sequence[DeviceTensor],
        *,
        device: int,
        stream: Callable[[], int],
        num_blocks: int,
        block_size: int,
        axes: tuple[str, ...] | None = None,
    ) -> None:
        """`device`: ordinal in this process; `stream()`: of the engine's kernels. Raises GeometryError."""
        try:
            driver = CudaDriver()
            driver.call("cuInit", 0)
            driver.enter(driver.primary_context(device))
            self._timeline = GpuTimeline(driver, device, stream)
            export = export_tensors(driver, tensors, num_blocks=num_blocks, block_size=block_size, axes=axes)
            self.loader = CudaLoader(driver, export, stream)
        except CudaCallError as error:
            raise GeometryError(f"the KV cache on GPU {device} cannot be shared: {error}") from error
        self.geometry = export.geometry
        self.memory_fds = export.fds
        self.timeline_fd = self._timeline.fd

    def mark(self, step: int) -> None:
        """All kernels of `step` are queued. Raises CudaCallError."""
        self._timeline.mark(step)

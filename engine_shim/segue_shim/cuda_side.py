"""What an engine with its KV cache on a GPU needs beyond the exporter: exported memory, timeline, loader.

Knows addresses and no torch (see `cuda_tensors`). Made once an engine life, kept as long as it lives: handles
and the timeline must outlast every daemon that has them. Only the memory may go and come back, under the same
addresses (an engine that sleeps): `withdraw` before, `share` after. Invariants: between the two nothing here
keeps the memory from going; what was taken is given back if sharing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue_core.errors import GeometryError
from segue_core.framing import close_fds
from segue_core.geometry import Geometry
from segue_shim.cuda_driver import CudaCallError, CudaDriver, give_back
from segue_shim.cuda_export import DeviceTensor, export_tensors
from segue_shim.cuda_loader import CudaLoader
from segue_shim.cuda_timeline import GpuTimeline
from segue_shim.regions import Axes

STAYING = 2
"""What is not given back while the memory is away: context and timeline."""


class CudaSide:
    """One engine rank's GPU. `fds` go to the daemon: the timeline's first, the memory's as they are."""

    geometry: Geometry
    loader: CudaLoader

    def __init__(
        self,
        tensors: Sequence[DeviceTensor],
        *,
        device: int,
        stream: Callable[[], int],
        num_blocks: int,
        block_size: int,
        axes: Axes = None,
    ) -> None:
        """`device`: ordinal in this process; `stream()`: of the engine's kernels. Raises GeometryError."""
        self.memory_fds: tuple[int, ...] = ()
        self._tensors = tuple(tensors)
        self._device = device
        self._stream = stream
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._axes = axes
        self._undo: list[Callable[[], None]] = []
        self._identity: int | None = None
        try:
            self._begin()
        except CudaCallError as error:
            self.close()
            raise self._not_shared(error) from error
        except BaseException:
            self.close()
            raise
        self.timeline_fd = self._timeline.fd

    def _begin(self) -> None:
        driver = self._driver = CudaDriver()
        driver.call("cuInit", 0)
        self._context = driver.primary_context(self._device)
        self._undo.append(lambda: driver.release_context(self._device))
        driver.enter(self._context)
        self._timeline = GpuTimeline(driver, self._device, self._stream)
        self._undo.append(self._timeline.close)
        self._share()

    def _share(self) -> None:
        driver = self._driver
        export = export_tensors(
            driver,
            self._tensors,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            axes=self._axes,
        )
        self.memory_fds = export.fds
        self.loader = CudaLoader(driver, export, self._stream)
        self._undo.append(self.loader.close)
        self.geometry = export.geometry
        self._identity = self._found()

    def _found(self) -> int | None:
        """Which memory is behind the tensors; None where the driver does not say."""
        try:
            return self._driver.identity(self._tensors[0].address)
        except CudaCallError:
            return None

    def _not_shared(self, error: CudaCallError) -> GeometryError:
        return GeometryError(f"the KV cache on GPU {self._device} cannot be shared: {error}")

    @property
    def moved(self) -> bool:
        """Whether the engine has other memory under its addresses now than was exported: what a daemon has
        mapped is not the KV cache any more. One call of the driver, made before each step."""
        return self._identity is not None and self._found() != self._identity

    def withdraw(self) -> None:
        """The memory is about to go: keep nothing of it. What is registered must have been let go before."""
        fds = list(self.memory_fds)
        self.memory_fds = ()
        self._identity = None
        close_fds(fds)

    def share(self) -> None:
        """The memory is back: export what is there now. Raises GeometryError; nothing is exported then."""
        self.withdraw()
        try:
            self._driver.enter(self._context)
            going, self._undo = self._undo[STAYING:], self._undo[:STAYING]
            give_back(going, "the exported memory")
            self._share()
        except CudaCallError as error:
            self.withdraw()
            raise self._not_shared(error) from error
        except BaseException:
            self.withdraw()
            raise

    def mark(self, step: int) -> None:
        """All kernels of `step` are queued. Raises CudaCallError."""
        self._timeline.mark(step)

    def close(self) -> None:
        """Give everything back. Raises nothing: what the driver keeps, it keeps until the engine ends."""
        self.withdraw()
        give_back(self._undo, "what is shared of the GPU")

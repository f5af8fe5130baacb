"""Opens an engine's exported pages, on a host or on a GPU, as its geometry says.

The one place that chooses. The GPU's modules, and with them the driver, are loaded only for an engine that
needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from segue_core.errors import ProtocolError, SegueError
from segue_core.geometry import Geometry
from segue_daemon.pages import HostPages, Pages


def open_pages(geometry: Geometry, fds: Sequence[int]) -> Pages:
    """The pages of a validated geometry; `fds` are those of its handles and stay the caller's.

    Raises ProtocolError with what to do, if the memory cannot be mapped.
    """
    if not geometry.gpu:
        return HostPages(geometry, list(fds))
    from segue_daemon.cuda.driver import CudaError
    from segue_daemon.cuda.pages import CudaPages

    try:
        return CudaPages(geometry, fds)
    except CudaError as error:
        raise ProtocolError(f"the KV cache on {geometry.gpu} cannot be mapped: {error}") from error
    except SegueError as error:
        raise ProtocolError(f"the KV cache on {geometry.gpu} cannot be read: {error}") from error


def warm_up(geometry: Geometry) -> Callable[[], None]:
    """Make the GPU's context in the calling thread, before the event loop has to wait for it; the result
    gives it back. Problems show when the pages are opened."""
    if geometry.gpu:
        from segue_daemon.cuda.driver import CudaError, load

        try:
            driver = load()
            device = driver.device(geometry.gpu)
            driver.retain_context(device)
        except CudaError:
            return lambda: None

        def give_back() -> None:
            with contextlib.suppress(CudaError):
                driver.release_context(device)

        return give_back
    return lambda: None

"""Opens an engine's exported pages, on a host or on a GPU, as its geometry says.

The one place that chooses. The GPU's modules, and with them the driver, are loaded only for an engine that
needs them. Invariant: the event loop never waits for a driver that opens memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from segue_core.errors import ProtocolError, SegueError
from segue_core.geometry import Geometry
from segue_daemon.beside import beside
from segue_daemon.pages import HostPages, Pages

log = structlog.get_logger()

LET_GO_S = 2.0
"""An engine whose memory is about to go waits for the daemon, but not for a GPU that is stuck."""
LET_GO_POLL_S = 0.005
NO_DESCRIPTORS = "start the daemon with a higher `ulimit -n`, above twice the engine's physical allocations"


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
    except OSError as error:
        raise ProtocolError(
            f"the KV cache on {geometry.gpu} cannot be mapped: {error}", hint=NO_DESCRIPTORS
        ) from error


async def open_beside(geometry: Geometry, fds: Sequence[int]) -> Pages:
    """What `open_pages` opens on a GPU, while the event loop goes on; a driver that hangs costs this engine
    its protection, after the deadlines of `CudaPages`. The descriptors must stay open meanwhile."""

    def work() -> Pages:
        try:
            return open_pages(geometry, fds)
        except SegueError:
            raise
        except Exception as error:
            log.exception("opening an engine's GPU memory failed", gpu=geometry.gpu)
            raise ProtocolError(f"the KV cache on {geometry.gpu} cannot be opened: {error!r}") from error

    return await beside("segue-gpu-open", work, lambda pages: pages.close())


class Held(Protocol):
    """Memory of a GPU that was closed, and that its driver may not have given up yet."""

    @property
    def let_go(self) -> bool:
        """Whether nothing of it is held any more."""
        ...


async def let_go(held: Held, gpu: str) -> None:
    """Return once nothing of it is held any more, or after `LET_GO_S`."""
    deadline = asyncio.get_running_loop().time() + LET_GO_S
    while not held.let_go:
        if asyncio.get_running_loop().time() > deadline:
            log.warning("the GPU keeps memory that was let go", gpu=gpu)
            return
        await asyncio.sleep(LET_GO_POLL_S)

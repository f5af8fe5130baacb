"""An engine's exported GPU memory, mapped into this process.

Runs in the device thread. Opens each handle once, and undoes all it did in `close`, in reverse, whatever
fails on the way. Invariant: every byte that the geometry may name is mapped when the constructor has
returned, or nothing is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from segue_core.errors import ProtocolError
from segue_core.geometry import Geometry
from segue_core.memory_handle import MemoryHandle
from segue_daemon.cuda.driver import CudaError, Driver


class DeviceMapping:
    """`bases[h]`: device address of geometry handle h's first byte."""

    def __init__(self, driver: Driver, device: int, geometry: Geometry, fds: Sequence[int]) -> None:
        """Map all handles of a validated geometry, in the current context. The descriptors stay the caller's.

        Raises CudaError, or ProtocolError if memory is smaller than was said.
        """
        self._driver = driver
        self._device = device
        self._undo: list[Callable[[], None]] = []
        self._ipc: dict[bytes, int] = {}
        self.bases: list[int] = []
        remaining = list(fds)
        try:
            for handle in geometry.handles:
                own, remaining = remaining[: handle.fd_count], remaining[handle.fd_count :]
                start = self._map_ipc(handle) if handle.kind == "cuda_ipc" else self._map_vmm(handle, own)
                self.bases.append(start + handle.offset)
        except BaseException:
            with contextlib.suppress(CudaError):  # the first one says why
                self.close()
            raise

    def _map_ipc(self, handle: MemoryHandle) -> int:
        driver = self._driver
        address = self._ipc.get(handle.token)
        if address is None:
            address = self._ipc[handle.token] = opened = driver.open_ipc(handle.token)
            self._undo.append(lambda: driver.close_ipc(opened))
        base, nbytes = driver.range_of(address)
        if base + nbytes - address < handle.pieces[0]:
            raise ProtocolError(
                f"exported GPU memory has {base + nbytes - address} bytes, its handle says {handle.pieces[0]}"
            )
        return address

    def _map_vmm(self, handle: MemoryHandle, fds: Sequence[int]) -> int:
        driver = self._driver
        total = sum(handle.pieces)
        start = driver.reserve(total)
        self._undo.append(lambda: driver.free_range(start, total))
        at = start
        for fd, nbytes in zip(fds, handle.pieces, strict=True):
            self._map_piece(at, nbytes, fd)
            at += nbytes
        driver.allow_reading(start, total, self._device)
        return start

    def _map_piece(self, address: int, nbytes: int, fd: int) -> None:
        driver = self._driver
        allocation: Any = driver.import_fd(fd)
        try:
            driver.map(address, nbytes, allocation)
        except CudaError:
            with contextlib.suppress(CudaError):
                driver.release(allocation)
            raise
        self._undo.append(lambda: driver.unmap(address, nbytes))
        driver.release(allocation)  # the mapping keeps it

    def close(self) -> None:
        """Unmap everything; safe to call twice. Raises the first CudaError once all was tried."""
        first: CudaError | None = None
        self.bases = []
        while self._undo:
            try:
                self._undo.pop()()
            except CudaError as error:
                first = first or error
        if first is not None:
            raise first

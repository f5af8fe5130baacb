"""GPU memory of both kinds that engines have, for a process that has no engine (see `cuda_probe`).

Owns the driver calls that only this needs. What is allocated stays until the process ends.
"""

from __future__ import annotations

from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_ulonglong
from typing import Any

from segue_core.messages.probe import ShareKind
from segue_shim.cuda_driver import CudaDriver
from segue_shim.cuda_table import (
    ENTRY_POINTS,
    LOCATION_DEVICE,
    POSIX_FD,
    READ_WRITE,
    AccessDescriptor,
    AllocationLocation,
    AllocationProperties,
)

OFFSET = 64 << 10
"""KV tensors seldom begin where their allocation does."""
PINNED_ALLOCATION = 1
"""Of cuda.h's CUmemAllocationType."""


PROBE_ENTRY_POINTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuDriverGetVersion": (2020, (POINTER(c_int),)),
    "cuDeviceGetCount": (2000, (POINTER(c_int),)),
    "cuDeviceGetName": (2000, (c_char_p, c_int, c_int)),
    "cuDeviceTotalMem": (3020, (POINTER(c_size_t), c_int)),
    "cuMemAlloc": (3020, (POINTER(c_uint64), c_size_t)),
    "cuMemcpyHtoD": (3020, (c_uint64, c_char_p, c_size_t)),
    "cuMemCreate": (10020, (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_ulonglong)),
}


class ProbeDriver(CudaDriver):
    """The shim's driver, with a few more calls."""

    entry_points = ENTRY_POINTS | PROBE_ENTRY_POINTS

    def version(self) -> int:
        """The newest CUDA that the driver has, such as 12080."""
        found = c_int()
        self.call("cuDriverGetVersion", byref(found))
        return found.value

    def count(self) -> int:
        """GPUs that this process sees."""
        found = c_int()
        self.call("cuDeviceGetCount", byref(found))
        return found.value

    def write(self, address: int, data: bytes) -> None:
        """Copy `data` to the GPU; it is there when this returns."""
        self.call("cuMemcpyHtoD", address, data, len(data))

    def shareable(self, kind: ShareKind, nbytes: int) -> int:
        """The address of at least `nbytes` of the first GPU's memory, of this kind."""
        if kind == "cuda_ipc":
            address = c_uint64()
            self.call("cuMemAlloc", byref(address), nbytes)
            return address.value
        return self._virtual(nbytes)

    def _virtual(self, nbytes: int) -> int:
        """Two physical allocations side by side, as expandable segments are."""
        place = AllocationLocation(LOCATION_DEVICE, 0)
        wanted = AllocationProperties(type=PINNED_ALLOCATION, requested_handle_types=POSIX_FD, location=place)
        granule = self.granularity(wanted)
        piece = -(-nbytes // (2 * granule)) * granule
        address = self.reserve(2 * piece)
        for start in (address, address + piece):
            handle = c_uint64()
            self.call("cuMemCreate", byref(handle), piece, byref(wanted), 0)
            self.map(start, piece, handle.value)
            self.release(handle.value)  # the mapping keeps it
        self.call("cuMemSetAccess", address, 2 * piece, byref(AccessDescriptor(place, READ_WRITE)), 1)
        return address

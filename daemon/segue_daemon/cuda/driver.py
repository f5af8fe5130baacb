"""The CUDA driver as the daemon uses it: the only place that imports cuda-python.

Typed, thin wrappers of the calls that we make; each raises `CudaError` with the call, the driver's name for
what went wrong, and what to do. Holds no state of an engine. Every call lets go of the interpreter lock
while it is in the driver. The current context is a thread's own: `make_current` first, in each thread.

Invariants: nothing is imported or initialised before `load`, so the daemon runs without the extra; no call
queues a wait on another process, or runs Python in a driver's thread.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from segue_core.memory_handle import uuid_text
from segue_daemon.cuda.errors import ENDS_CONTEXT, HINTS, LostGpuError
from segue_daemon.cuda.errors import CudaError as CudaError

DEVICE_HIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
HOST_REGISTER_PORTABLE = 1
NON_BLOCKING = 1
DISABLE_TIMING = 2
LAZY_PEER_ACCESS = 1
BATCH_COPIES = 4096
"""Most copies in one call: bounds what is built for it."""
READ_ONLY, READ_WRITE = 1, 3
"""Access to mapped memory (CUmemAccess_flags)."""
UNSUPPORTED = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE", "NOT_IN_THIS_DRIVER")


class Driver:
    """The calls. Addresses and handles are plain ints; sizes are bytes."""

    def __init__(self) -> None:
        """Raises CudaError without cuda-python, without a driver, or without a GPU."""
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise CudaError("cuda-python", "NOT_INSTALLED") from error
        self._success = self._cuda.CUresult.CUDA_SUCCESS
        self._posix_fd = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._batch = True
        self._lost: dict[int, str] = {}
        self._here = threading.local()
        for name in DEVICE_HIDING:
            os.environ.pop(name, None)  # the engine's GPU is found by its UUID among all that are here
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # cuda-python's own: the library is not there
            raise CudaError("cuInit", "NO_DRIVER") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of one call: None, a value, or a tuple of them."""
        function = getattr(self._cuda, name, None)
        if function is None:
            raise CudaError(name, "NOT_IN_THIS_DRIVER")
        try:
            status, *values = function(*arguments)
        except RuntimeError as error:
            if type(error).__name__ != "FunctionNotFoundError":
                raise
            raise CudaError(name, "NOT_IN_THIS_DRIVER") from error
        except ValueError as error:  # cuda-python does not know the number that the driver answered
            raise CudaError(name, str(error)) from error
        if status != self._success:
            failure = CudaError(name, str(getattr(status, "name", status)))
            self._note(failure)
            raise failure
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def _note(self, error: CudaError) -> None:
        """Remember which GPU this process has lost by an error."""
        device = getattr(self._here, "device", None)
        if device is not None and error.name in ENDS_CONTEXT:
            self._lost.setdefault(device, f"{error.call}: {error.name}")

    def _give_back(self, name: str, *arguments: Any) -> None:
        """A call that lets something go, made once more if it fails: that may have been another's failure."""
        try:
            self._call(name, *arguments)
        except CudaError as error:
            try:
                self._call(name, *arguments)
            except CudaError:
                raise error from None

    # -- devices and contexts -----------------------------------------------------------------

    def uuids(self) -> list[str]:
        """UUIDs of the GPUs (or MIG instances) that this process may use, by ordinal."""
        count = int(self._call("cuDeviceGetCount"))
        found = [self._call("cuDeviceGetUuid", self._call("cuDeviceGet", n)) for n in range(count)]
        return [uuid_text(bytes(uuid.bytes)) for uuid in found]

    def device(self, uuid: str) -> int:
        """The device with this UUID. Raises CudaError that names those that are here."""
        here = self.uuids()
        digits = uuid.partition("-")[2]
        for ordinal, found in enumerate(here):
            if found.partition("-")[2] == digits:
                return int(self._call("cuDeviceGet", ordinal))
        error = CudaError(f"the engine's GPU {uuid} is not among {', '.join(here)}", "not here")
        error.hint = HINTS["CUDA_ERROR_INVALID_DEVICE"]
        raise error

    def retain_context(self, device: int) -> Any:
        """The device's primary context; one `release_context` for each. From now on this thread serves the
        device. Raises LostGpuError after a fault that no process survives."""
        if device in self._lost:
            raise LostGpuError(self.uuids()[device], self._lost[device])
        self._here.device = device
        return self._call("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: int) -> None:
        """Give the primary context back."""
        self._give_back("cuDevicePrimaryCtxRelease", device)

    def make_current(self, context: Any) -> None:
        """From now on this thread's calls are in `context`."""
        self._call("cuCtxSetCurrent", context)

    # -- memory of another process --------------------------------------------------------------

    def open_ipc(self, token: bytes) -> int:
        """Map what an IPC handle names; the address of its first byte."""
        handle = self._cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), token, len(token))
        return int(self._call("cuIpcOpenMemHandle", handle, LAZY_PEER_ACCESS))

    def close_ipc(self, address: int) -> None:
        """Unmap what `open_ipc` returned."""
        self._give_back("cuIpcCloseMemHandle", address)

    def range_of(self, address: int) -> tuple[int, int]:
        """(first byte, bytes) of the allocation at `address`."""
        base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def import_fd(self, fd: int) -> Any:
        """The physical allocation that a descriptor names. The descriptor stays the caller's."""
        return self._call("cuMemImportFromShareableHandle", fd, self._posix_fd)

    def release(self, allocation: Any) -> None:
        """Give up a physical allocation; mappings of it stay."""
        self._give_back("cuMemRelease", allocation)

    def reserve(self, nbytes: int) -> int:
        """A range of addresses."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def free_range(self, address: int, nbytes: int) -> None:
        """Give a reserved range back."""
        self._give_back("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, allocation: Any) -> None:
        """Put `allocation` at `address` of a reserved range."""
        self._call("cuMemMap", address, nbytes, 0, allocation, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take mapped memory out of a range."""
        self._give_back("cuMemUnmap", address, nbytes)

    def allow_reading(self, address: int, nbytes: int, device: int) -> None:
        """Let `device` read mapped memory; and write it, where the driver knows no less."""
        try:
            self._set_access(address, nbytes, device, READ_ONLY)
        except CudaError as error:
            if error.name not in UNSUPPORTED:
                raise
            self._set_access(address, nbytes, device, READ_WRITE)

    def allow_writing(self, address: int, nbytes: int, device: int) -> None:
        """Let `device` read and write mapped memory."""
        self._set_access(address, nbytes, device, READ_WRITE)

    def _set_access(self, address: int, nbytes: int, device: int, flags: int) -> None:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self._cuda.CUmemAccess_flags(flags)
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    # -- memory for another process ------------------------------------------------------------------

    def create(self, nbytes: int, device: int) -> Any:
        """Physical memory of which a descriptor can be had: at least `nbytes`, see `whole`."""
        return self._call("cuMemCreate", nbytes, self._exportable(device), 0)

    def whole(self, nbytes: int, device: int) -> int:
        """`nbytes` rounded up to what can be created."""
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(self._call("cuMemGetAllocationGranularity", self._exportable(device), least))
        return -(-nbytes // unit) * unit

    def _exportable(self, device: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = self._posix_fd
        return properties

    def export_fd(self, allocation: Any) -> int:
        """A descriptor of physical memory; the caller closes it."""
        return int(self._call("cuMemExportToShareableHandle", allocation, self._posix_fd, 0))

    # -- copies -----------------------------------------------------------------------------------

    def register_host(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that copies to it go at full speed and need no staging."""
        self._call("cuMemHostRegister", address, nbytes, HOST_REGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        """The memory is ordinary again."""
        self._give_back("cuMemHostUnregister", address)

    def create_stream(self) -> Any:
        """A stream that waits for no other."""
        return self._call("cuStreamCreate", NON_BLOCKING)

    def destroy_stream(self, stream: Any) -> None:
        """What is queued in it still runs."""
        self._give_back("cuStreamDestroy", stream)

    def synchronize(self, stream: Any) -> None:
        """Wait until the stream is empty. May hang with the GPU: only in a thread that may."""
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> Any:
        """An event of this process."""
        return self._call("cuEventCreate", DISABLE_TIMING)

    def destroy_event(self, event: Any) -> None:
        """It is not needed any more."""
        self._give_back("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """`event` stands for what is queued in `stream` now."""
        self._call("cuEventRecord", event, stream)

    def wait_for(self, event: Any) -> None:
        """Wait until what `event` stands for is done. May hang with the GPU: only in a thread that may."""
        self._call("cuEventSynchronize", event)

    def put(self, address: int, host: int, nbytes: int, stream: Any) -> None:
        """Queue a copy of page-locked host memory to device memory."""
        self._call("cuMemcpyHtoDAsync", address, host, nbytes, stream)

    def gather(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> None:
        """Queue copies of device memory (`sources`) to host memory (`targets`).

        Few calls where the driver has batches. Sources are read in stream order, never before.
        """
        for first in range(0, len(sizes), BATCH_COPIES):
            part = slice(first, first + BATCH_COPIES)
            self._copy_to_host(targets[part], sources[part], sizes[part], stream)

    def _copy_to_host(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> None:
        if self._batch and len(sources) > 1:
            try:
                self._gather_batch(targets, sources, sizes, stream)
            except CudaError as error:
                if error.name not in ("NOT_IN_THIS_DRIVER", "CUDA_ERROR_NOT_SUPPORTED"):
                    raise
                self._batch = False
            else:
                return
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            self._call("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def _gather_batch(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> None:
        pointer = self._cuda.CUdeviceptr
        order = self._cuda.CUmemcpySrcAccessOrder
        attributes = self._cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        count = len(sizes)
        self._call(
            "cuMemcpyBatchAsync",
            [pointer(target) for target in targets],
            [pointer(source) for source in sources],
            list(sizes),
            count,
            [attributes],
            [0],
            1,
            stream,
        )


_loading = threading.Lock()
_loaded: Driver | None = None


def load() -> Driver:
    """The driver of this process, initialised at the first call; safe from any thread. Raises CudaError."""
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = Driver()
        return _loaded

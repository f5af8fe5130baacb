"""The CUDA driver as the shim uses it: typed calls of the libcuda that the engine has loaded.

Through ctypes, so that the engine's environment needs nothing more, and so that each call lets go of the
interpreter lock. Entry points are asked for with the version that introduced their arguments
(`cuGetProcAddress`). Invariant: a call that fails raises `CudaCallError`; a thread that has a context keeps
it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, ClassVar, NamedTuple

from segue_core.errors import SegueError
from segue_shim.cuda_table import (
    ENTRY_POINTS,
    EVENT_DISABLE_TIMING,
    GRANULARITY_MINIMUM,
    IN_STREAM_ORDER,
    LOCATION_DEVICE,
    POINTER_BUFFER_ID,
    POINTER_DEVICE_ORDINAL,
    POSIX_FD,
    READ_ONLY,
    READ_WRITE,
    STREAM_NON_BLOCKING,
    AccessDescriptor,
    AllocationLocation,
    AllocationProperties,
    CopyAttributes,
    IpcHandle,
)

logger = logging.getLogger("segue_shim")

LIBRARY = "libcuda.so.1"
MISSING = "this driver does not have it"
WHAT_TO_DO = "start the engine again to have it protected; if it stays so, see docs/gpu.md"


class CudaCallError(SegueError):
    """A driver call failed: `call` and the driver's `name` for what went wrong."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}", hint=WHAT_TO_DO)
        self.call = call
        self.name = name


def give_back(undo: list[Callable[[], None]], what: str) -> None:
    """Take each step of `undo`, the last one first; one that fails is logged, and the others are taken."""
    while undo:
        try:
            undo.pop()()
        except CudaCallError as error:
            logger.warning("segue: %s: not given back: %s: %s", what, error.call, error.name)


class Range(NamedTuple):
    """Device memory: the address of its first byte, and bytes."""

    base: int
    nbytes: int


class CudaDriver:
    """The calls. Addresses, streams and handles are plain ints."""

    entry_points: ClassVar = ENTRY_POINTS

    def __init__(self) -> None:
        """Raises CudaCallError without a driver."""
        try:
            library = ctypes.CDLL(LIBRARY)
            lookup = library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise CudaCallError(LIBRARY, "there is no NVIDIA driver for CUDA 12 or later") from error
        lookup.argtypes = (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int))
        self._lookup = lookup
        self._functions: dict[str, Any] = {}
        self._batch = True

    def _function(self, name: str) -> Any:
        found = self._functions.get(name)
        if found is None:
            version, arguments = self.entry_points[name]
            address = c_void_p()
            status = self._lookup(name.encode(), byref(address), version, 0, None)
            if status or not address.value:
                raise CudaCallError(name, MISSING)
            found = self._functions[name] = ctypes.CFUNCTYPE(c_int, *arguments)(address.value)
        return found

    def call(self, name: str, *arguments: Any) -> None:
        """One call by name; the arguments are as in ENTRY_POINTS. Raises CudaCallError."""
        status = self._function(name)(*arguments)
        if status:
            raise CudaCallError(name, self._name_of(status))

    def _name_of(self, status: int) -> str:
        text = c_char_p()
        try:
            known = self._function("cuGetErrorName")(status, byref(text)) == 0 and text.value
        except CudaCallError:
            known = None
        return known.decode() if known else f"error {status}"

    def insist(self, name: str, *arguments: Any) -> None:
        """A call that lets something go or waits for it, made once more if it fails: that may have been
        another's failure. Raises the first one's."""
        try:
            self.call(name, *arguments)
        except CudaCallError as error:
            try:
                self.call(name, *arguments)
            except CudaCallError:
                raise error from None

    # -- device and context -------------------------------------------------------------------

    def device_of(self, address: int) -> int:
        """Ordinal of the device that the memory at `address` is on."""
        ordinal = c_int()
        self.call("cuPointerGetAttribute", byref(ordinal), POINTER_DEVICE_ORDINAL, address)
        return ordinal.value

    def uuid(self, device: int) -> bytes:
        """16 bytes that name the GPU (or MIG instance) on any process's side."""
        text = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid", text, device)
        return text.raw

    def attribute(self, number: int, device: int) -> int:
        """A device attribute."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, device)
        return value.value

    def primary_context(self, device: int) -> int:
        """The primary context, held from now on."""
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Give up what `primary_context` returned."""
        self.insist("cuDevicePrimaryCtxRelease", device)

    def enter(self, context: int) -> None:
        """Make `context` current in this thread, unless one is."""
        current = c_void_p()
        self.call("cuCtxGetCurrent", byref(current))
        if not current.value:
            self.call("cuCtxSetCurrent", context)

    # -- export -------------------------------------------------------------------------------

    def range_of(self, address: int) -> Range:
        """The allocation that `address` lies in."""
        base, nbytes = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange", byref(base), byref(nbytes), address)
        return Range(base.value, nbytes.value)

    def identity(self, address: int) -> int:
        """Which memory is at `address`: a number that no other memory of this process ever has."""
        number = c_uint64()
        self.call("cuPointerGetAttribute", byref(number), POINTER_BUFFER_ID, address)
        return number.value

    def ipc_handle(self, address: int) -> bytes:
        """The 64 bytes by which another process opens the allocation at `address`."""
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def retain(self, address: int) -> int | None:
        """The physical allocation mapped at `address`, to be released; None if it is not of that kind."""
        handle = c_uint64()
        try:
            self.call("cuMemRetainAllocationHandle", byref(handle), address)
        except CudaCallError as error:
            if error.name in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"):
                return None
            raise
        return handle.value

    def release(self, handle: int) -> None:
        """Give up what `retain` or `import_fd` returned."""
        self.insist("cuMemRelease", handle)

    def properties(self, handle: int) -> AllocationProperties:
        """How a physical allocation was made."""
        found = AllocationProperties()
        self.call("cuMemGetAllocationPropertiesFromHandle", byref(found), handle)
        return found

    def granularity(self, properties: AllocationProperties) -> int:
        """Bytes of which sizes and addresses of such allocations are multiples."""
        nbytes = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(nbytes), byref(properties), GRANULARITY_MINIMUM)
        return nbytes.value

    def export_fd(self, handle: int) -> int:
        """A descriptor of a physical allocation; the caller closes it."""
        fd = c_int(-1)
        self.call("cuMemExportToShareableHandle", byref(fd), handle, POSIX_FD, 0)
        return fd.value

    # -- memory of the daemon -----------------------------------------------------------------

    def import_fd(self, fd: int) -> int:
        """The physical allocation that a descriptor names; to be released. The descriptor stays."""
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), fd, POSIX_FD)
        return handle.value

    def reserve(self, nbytes: int) -> int:
        """A range of addresses."""
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def free_range(self, address: int, nbytes: int) -> None:
        """Give a reserved range back."""
        self.insist("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put a physical allocation at `address` of a reserved range."""
        self.call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take mapped memory out of a range."""
        self.insist("cuMemUnmap", address, nbytes)

    def allow_reading(self, address: int, nbytes: int, device: int) -> None:
        """Let `device` read mapped memory; and write it, where the driver knows no less."""
        access = AccessDescriptor(AllocationLocation(LOCATION_DEVICE, device), READ_ONLY)
        try:
            self.call("cuMemSetAccess", address, nbytes, byref(access), 1)
        except CudaCallError as error:
            if error.name not in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"):
                raise
            access.flags = READ_WRITE
            self.call("cuMemSetAccess", address, nbytes, byref(access), 1)

    # -- host memory, streams, copies ---------------------------------------------------------

    def register_host(self, address: int, nbytes: int, flags: int) -> None:
        """Page-lock host memory."""
        self.call("cuMemHostRegister", address, nbytes, flags)

    def unregister_host(self, address: int) -> None:
        """The memory is ordinary again."""
        self.insist("cuMemHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        """Where the GPU sees page-locked host memory."""
        pointer = c_uint64()
        self.call("cuMemHostGetDevicePointer", byref(pointer), address, 0)
        return pointer.value

    def write_value(self, stream: int, pointer: int, value: int) -> None:
        """Queue a write of 8 bytes; whoever reads the new value sees all that was queued before it."""
        self.call("cuStreamWriteValue64", stream, pointer, value, 0)

    def create_stream(self) -> int:
        """A stream that waits for no other."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), STREAM_NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """What is queued in it still runs."""
        self.insist("cuStreamDestroy", stream)

    def destroy_event(self, event: int) -> None:
        """It is not needed any more."""
        self.insist("cuEventDestroy", event)

    def create_event(self) -> int:
        """An event of this process."""
        event = c_void_p()
        self.call("cuEventCreate", byref(event), EVENT_DISABLE_TIMING)
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        """`event` stands for what is queued in `stream` now."""
        self.call("cuEventRecord", event, stream)

    def wait_for(self, event: int) -> None:
        """Wait until what `event` stands for is done; nothing if it was never recorded."""
        self.call("cuEventSynchronize", event)

    def follow(self, stream: int, other: int, event: int) -> None:
        """What is queued in `stream` from now on runs after what `other` has now."""
        self.record(event, other)
        self.call("cuStreamWaitEvent", stream, event, 0)

    def scatter(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        stream: int,
        *,
        on_device: bool = False,
    ) -> None:
        """Queue copies of page-locked host memory, or of memory `on_device`, to device memory; in one call
        where the driver has batches."""
        count = len(sizes)
        if self._batch and count > 1:
            attributes, first = CopyAttributes(source_access_order=IN_STREAM_ORDER), c_size_t(0)
            addresses, lengths = c_uint64 * count, (c_size_t * count)(*sizes)
            arrays = addresses(*targets), addresses(*sources), lengths
            try:
                self.call("cuMemcpyBatchAsync", *arrays, count, byref(attributes), byref(first), 1, stream)
            except CudaCallError as error:
                if error.name not in (MISSING, "CUDA_ERROR_NOT_SUPPORTED"):
                    raise
                self._batch = False
            else:
                return
        single = "cuMemcpyDtoDAsync" if on_device else "cuMemcpyHtoDAsync"
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            self.call(single, target, source, nbytes, stream)

    def synchronize(self, stream: int) -> None:
        """Wait until the stream is empty, even if something in it has failed, and that is raised."""
        self.insist("cuStreamSynchronize", stream)

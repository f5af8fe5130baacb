"""What a child process of the tests can do with the driver: any call by name, and what needs several.

Results travel as the name of the error and the values as numbers or bytes. Handles are 64 bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any

from cuda.bindings import driver

from support.cuda_double import Control
from support.cuda_process import WithDescriptors

HANDLE_BYTES = 64
POSIX = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NO_HANDLE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
ARGUMENT_STRUCTS = {
    "cuIpcOpenMemHandle": driver.CUipcMemHandle,
    "cuIpcOpenEventHandle": driver.CUipcEventHandle,
}
mappings: list[mmap.mmap] = []
control: Control | None = None


def steer() -> Control:
    """The control of the double, which the first call of the driver has loaded."""
    global control
    control = control or Control()
    return control


def plain(value: Any) -> Any:
    """A result in a form that travels."""
    if isinstance(value, driver.CUipcMemHandle | driver.CUipcEventHandle):
        return ctypes.string_at(value.getPtr(), HANDLE_BYTES)
    if isinstance(value, driver.CUuuid):
        return bytes(value.bytes)
    if isinstance(value, bytes):
        return value
    return int(value)


def cu(name: str, *arguments: Any) -> list[Any]:
    """Call an entry point: the error's name, then its values."""
    given = list(arguments)
    if name == "cuDeviceGetAttribute":
        given[0] = driver.CUdevice_attribute(given[0])
    for at, argument in enumerate(given):
        if isinstance(argument, bytes) and name in ARGUMENT_STRUCTS:
            given[at] = ARGUMENT_STRUCTS[name]()
            ctypes.memmove(given[at].getPtr(), argument, HANDLE_BYTES)
    error, *values = getattr(driver, name)(*given)
    return [error.name, *([] if error else map(plain, values))]


def start(ordinal: int = 0) -> list[Any]:
    """Initialise, and make the primary context of a device current; a stream of its own."""
    for name, arguments in (
        ("cuInit", [0]),
        ("cuDevicePrimaryCtxRetain", [ordinal]),
    ):
        result = cu(name, *arguments)
        if result[0] != "CUDA_SUCCESS":
            return result
    cu("cuCtxSetCurrent", result[1])
    return cu("cuStreamCreate", 1)


def in_thread(name: str, *arguments: Any) -> list[Any]:
    """The same call in a new thread, which has no current context."""
    results: list[list[Any]] = []
    thread = threading.Thread(target=lambda: results.append(cu(name, *arguments)))
    thread.start()
    thread.join()
    return results[0]


def in_fork(name: str, *arguments: Any) -> list[Any]:
    """The same call in a child that was forked after initialisation."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, cu(name, *arguments)[0].encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        return [answer.read().decode()]


def let_go_during(name: str, *arguments: Any) -> list[Any]:
    """A call that waits for held streams, which another Python thread lets go: ends only without the GIL."""
    waits = threading.Event()

    def let_go() -> None:
        waits.wait()
        steer().let_go()

    thread = threading.Thread(target=let_go)
    thread.start()
    waits.set()
    result = cu(name, *arguments)
    thread.join()
    return result


# --- host memory ----------------------------------------------------------------------------------


def host_memory(size: int, writable: bool = True) -> int:
    """The address of fresh host memory, not pinned."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    mappings.append(mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, prot=protection))
    if writable:
        return ctypes.addressof(ctypes.c_char.from_buffer(mappings[-1]))
    return mapped_at(size)


def mapped_at(size: int) -> int:
    """Where a read-only mapping of that size lies, which gives no buffer that could tell."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, permissions = line.split()[:2]
            first, last = (int(end, 16) for end in where.split("-"))
            if permissions == "r--s" and last - first == size:
                return first
    raise AssertionError("the mapping is not there")


def read(address: int, size: int) -> bytes:
    """Bytes of host memory."""
    return ctypes.string_at(address, size)


def write(address: int, data: bytes) -> None:
    """Set bytes of host memory."""
    ctypes.memmove(address, data, len(data))


# --- what takes structures ------------------------------------------------------------------------


def batch(pieces: list[list[int]], stream: int, order: int = 1, first: int = 0) -> list[Any]:
    """One batch of copies, each [destination, source, bytes], all with one order of reading the source."""
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder(order)
    destinations, sources, sizes = (list(column) for column in zip(*pieces, strict=True))
    try:
        (error,) = driver.cuMemcpyBatchAsync(
            [driver.CUdeviceptr(at) for at in destinations],
            [driver.CUdeviceptr(at) for at in sources],
            sizes,
            len(pieces),
            [attributes],
            [first],
            1,
            stream,
        )
    except RuntimeError:
        return ["missing"]  # how the bindings say that the driver has no such function
    return [error.name]


def create(size: int, exportable: bool = True, ordinal: int = 0) -> list[Any]:
    """Physical memory, with a descriptor or without."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = POSIX if exportable else NO_HANDLE
    return cu("cuMemCreate", size, properties, 0)


def grant(address: int, size: int, flags: int, ordinal: int = 0) -> list[Any]:
    """Give a device access to mapped memory: 1 to read, 3 to write too."""
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags(flags)
    return cu("cuMemSetAccess", address, size, [access], 1)


def map_whole(handle: int, size: int, flags: int = 3) -> int:
    """Reserve addresses, map physical memory there, give access; where."""
    (_, address) = cu("cuMemAddressReserve", size, 0, 0, 0)
    assert cu("cuMemMap", address, size, 0, handle, 0) == ["CUDA_SUCCESS"]
    assert grant(address, size, flags) == ["CUDA_SUCCESS"]
    return int(address)


def unmap_whole(address: int, size: int) -> list[Any]:
    """The opposite of `map_whole`."""
    unmapped = cu("cuMemUnmap", address, size)
    return unmapped if unmapped != ["CUDA_SUCCESS"] else cu("cuMemAddressFree", address, size)


def export_descriptor(handle: int) -> WithDescriptors:
    """The descriptor of physical memory."""
    error, *values = cu("cuMemExportToShareableHandle", handle, POSIX, 0)
    return WithDescriptors(error, values)


def import_descriptor(descriptors: list[int]) -> list[Any]:
    """Physical memory of another process, from its descriptor."""
    result = cu("cuMemImportFromShareableHandle", descriptors[0], POSIX)
    for fd in descriptors:
        os.close(fd)
    return result


def handle_types(address: int) -> list[Any]:
    """What may be exported of the memory at a bare pointer, by a retained handle and by the pointer."""
    (_, handle) = cu("cuMemRetainAllocationHandle", address)
    error, properties = driver.cuMemGetAllocationPropertiesFromHandle(handle)
    cu("cuMemRelease", handle)
    asked = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    return [
        error.name,
        int(properties.requestedHandleTypes),
        int(driver.cuPointerGetAttribute(asked, address)[1]),
    ]


def attributes(address: int, names: list[str]) -> list[int]:
    """Attributes of a pointer, one call for all."""
    asked = [getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}") for name in names]
    _, values = driver.cuPointerGetAttributes(len(asked), asked, address)
    return [int(value) for value in values]


# --- the double -----------------------------------------------------------------------------------


def fail(failures: str) -> None:
    """Inject errors from now on."""
    steer().fail(failures)


def hold(after_bytes: int = 0) -> None:
    """Let streams stand still after so many bytes."""
    steer().hold(after_bytes)


def let_go() -> None:
    """Let them work again."""
    steer().let_go()


def calls(entry_point: str) -> int:
    """How often it was called."""
    return steer().calls(entry_point)


def counts() -> dict[str, int]:
    """What this process holds."""
    return steer().counts()

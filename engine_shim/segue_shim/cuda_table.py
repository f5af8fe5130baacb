"""Of cuda.h what the shim uses: entry points with their arguments, structures, numbers. Plain data.

Each entry point has the CUDA version whose interface is meant: that is how it is asked for.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

POSIX_FD = 1
GRANULARITY_MINIMUM = 0
HOST_REGISTER_PORTABLE, HOST_REGISTER_MAPPED, HOST_REGISTER_READ_ONLY = 1, 2, 8
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
CAN_WRITE_VALUE_64 = 122
READ_ONLY_REGISTER_SUPPORTED = 113
POINTER_BUFFER_ID, POINTER_DEVICE_ORDINAL = 7, 9
IN_STREAM_ORDER = 1
LOCATION_DEVICE, READ_ONLY, READ_WRITE = 1, 1, 3
"""Numbers of cuda.h: of CUdevice_attribute, CUpointer_attribute, CUmemcpySrcAccessOrder, CUmemLocationType,
CUmemAccess_flags."""


class AllocationLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", AllocationLocation),
        ("windows_metadata", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescriptor(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", AllocationLocation), ("flags", c_int))


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", c_int),
        ("source_hint", AllocationLocation),
        ("target_hint", AllocationLocation),
        ("flags", c_uint),
    )


ENTRY_POINTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuInit": (2000, (c_uint,)),
    "cuCtxGetCurrent": (4000, (POINTER(c_void_p),)),
    "cuCtxSetCurrent": (4000, (c_void_p,)),
    "cuDeviceGet": (2000, (POINTER(c_int), c_int)),
    "cuDeviceGetAttribute": (2000, (POINTER(c_int), c_int, c_int)),
    "cuDeviceGetUuid": (11040, (c_char_p, c_int)),
    "cuDevicePrimaryCtxRetain": (7000, (POINTER(c_void_p), c_int)),
    "cuDevicePrimaryCtxRelease": (11000, (c_int,)),
    "cuGetErrorName": (6000, (c_int, POINTER(c_char_p))),
    "cuPointerGetAttribute": (4000, (c_void_p, c_int, c_uint64)),
    "cuMemGetAddressRange": (3020, (POINTER(c_uint64), POINTER(c_size_t), c_uint64)),
    "cuIpcGetMemHandle": (4010, (POINTER(IpcHandle), c_uint64)),
    "cuMemRetainAllocationHandle": (11000, (POINTER(c_uint64), c_void_p)),
    "cuMemGetAllocationPropertiesFromHandle": (10020, (POINTER(AllocationProperties), c_uint64)),
    "cuMemGetAllocationGranularity": (10020, (POINTER(c_size_t), POINTER(AllocationProperties), c_int)),
    "cuMemExportToShareableHandle": (10020, (c_void_p, c_uint64, c_int, c_ulonglong)),
    "cuMemRelease": (10020, (c_uint64,)),
    "cuMemImportFromShareableHandle": (10020, (POINTER(c_uint64), c_void_p, c_int)),
    "cuMemAddressReserve": (10020, (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong)),
    "cuMemAddressFree": (10020, (c_uint64, c_size_t)),
    "cuMemMap": (10020, (c_uint64, c_size_t, c_size_t, c_uint64, c_ulonglong)),
    "cuMemUnmap": (10020, (c_uint64, c_size_t)),
    "cuMemSetAccess": (10020, (c_uint64, c_size_t, POINTER(AccessDescriptor), c_size_t)),
    "cuMemHostRegister": (6050, (c_void_p, c_size_t, c_uint)),
    "cuMemHostUnregister": (4000, (c_void_p,)),
    "cuMemHostGetDevicePointer": (3020, (POINTER(c_uint64), c_void_p, c_uint)),
    "cuMemcpyHtoDAsync": (3020, (c_uint64, c_void_p, c_size_t, c_void_p)),
    "cuMemcpyDtoDAsync": (3020, (c_uint64, c_uint64, c_size_t, c_void_p)),
    "cuMemcpyBatchAsync": (
        13000,
        (
            POINTER(c_uint64),
            POINTER(c_uint64),
            POINTER(c_size_t),
            c_size_t,
            POINTER(CopyAttributes),
            POINTER(c_size_t),
            c_size_t,
            c_void_p,
        ),
    ),
    "cuStreamCreate": (2000, (POINTER(c_void_p), c_uint)),
    "cuStreamDestroy": (4000, (c_void_p,)),
    "cuStreamSynchronize": (2000, (c_void_p,)),
    "cuStreamWaitEvent": (3020, (c_void_p, c_void_p, c_uint)),
    "cuStreamWriteValue64": (11070, (c_void_p, c_uint64, c_uint64, c_uint)),
    "cuEventCreate": (2000, (POINTER(c_void_p), c_uint)),
    "cuEventDestroy": (4000, (c_void_p,)),
    "cuEventRecord": (2000, (c_void_p, c_void_p)),
    "cuEventSynchronize": (2000, (c_void_p,)),
}

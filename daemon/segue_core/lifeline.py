"""The lifeline: the kernel says that a process was killed, before it has torn its memory down.

A socket closes only after the kernel has freed the dead process's memory: 0.07 to 0.3 s for an engine
on a CPU host. A *robust mutex* is broken much earlier: the kernel walks a dying thread's list of held
robust mutexes first of all, sets FUTEX_OWNER_DIED in each and wakes who waits there (see "robust
futexes" in the kernel's documentation). So a thread of the engine holds one, in shared memory, and the
daemon waits on its futex word: under a millisecond from SIGKILL, whatever the engine's size.

The engine's side uses pthread mutexes (the robust list belongs to the C library). The daemon's side maps
the page read only and makes bare futex calls, so that neither side can damage the other. Linux and
glibc; elsewhere `hold` returns False and the socket's end is the notice, as before.

Invariant: `wait_broken` reports a broken lifeline only if the holding thread is gone without letting go.
Whether its whole process is dying is asked separately (`exiting`): a thread may end alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from pathlib import Path

from segue_core.errors import ProtocolError
from segue_core.shared_memory import check_sealed, seal_size, sealable_memory

PAGE_BYTES = 4096
FUTEX_WAITERS = 0x8000_0000
FUTEX_OWNER_DIED = 0x4000_0000
FUTEX_TID_MASK = 0x3FFF_FFFF
FUTEX_WAIT = 0
PF_EXITING = 0x4
SIGKILL_MASK = 1 << (9 - 1)
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
WAIT_SLICE_S = 0.5


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Lifeline:
    """The engine's end. Create, pass `fd` on, `hold` from the thread that lives as long as the engine."""

    def __init__(self) -> None:
        self.fd = sealable_memory("segue-lifeline")
        os.ftruncate(self.fd, PAGE_BYTES)
        seal_size(self.fd)
        self._map = mmap.mmap(self.fd, PAGE_BYTES)
        self._word = ctypes.c_uint32.from_buffer(self._map)
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._word))
        self._holder = 0

    def hold(self) -> bool:
        """Take the mutex in the calling thread; False if this platform has no lifelines."""
        if platform.machine() not in SYS_FUTEX or platform.libc_ver()[0] != "glibc":
            return False
        libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(64)
        failed = (
            libc.pthread_mutexattr_init(attributes)
            or libc.pthread_mutexattr_setpshared(attributes, 1)
            or libc.pthread_mutexattr_setrobust(attributes, 1)
            or libc.pthread_mutex_init(self._mutex, attributes)
            or libc.pthread_mutex_lock(self._mutex)
        )
        if failed:
            return False
        self._holder = threading.get_ident()
        # Somebody waits, always: the daemon cannot say so itself, it may only read.
        self._word.value |= FUTEX_WAITERS
        return True

    def let_go(self) -> None:
        """Give the mutex back (from the thread that holds it) and unmap. It must come before the holding
        thread ends or the memory goes: the C library keeps a pointer to a held robust mutex."""
        if self._holder == threading.get_ident():
            ctypes.CDLL(None).pthread_mutex_unlock(self._mutex)
            self._holder = 0
        if self._holder or self._map.closed:
            return
        del self._word
        self._map.close()
        os.close(self.fd)


class LifelineWatch:
    """The daemon's end, over a descriptor that it does not keep."""

    def __init__(self, fd: int) -> None:
        """Map the page read only. Raises ProtocolError if `fd` is not a page of a fixed size."""
        check_sealed(fd, "the lifeline")
        if os.fstat(fd).st_size < PAGE_BYTES:
            raise ProtocolError("a lifeline is one page")
        self._map = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        self._libc = ctypes.CDLL(None, use_errno=True)
        # The address of a read-only buffer: ctypes' from_buffer wants a writable one.
        self._view = memoryview(self._map)
        self._address = _address_of(self._view)
        self.stopped = False
        self.broken = False

    def wait_broken(self) -> bool:
        """Block until the lifeline breaks (True), is let go, or `stopped` is set (False). Call it in a
        thread of its own; the interpreter lock is free meanwhile."""
        futex = SYS_FUTEX.get(platform.machine())
        try:
            while futex is not None and not self.stopped:
                word = int.from_bytes(self._view[:4], "little")
                if word & FUTEX_OWNER_DIED:
                    self.broken = True
                    return True
                if not word & FUTEX_TID_MASK:
                    return False
                slice_ = _Timespec(0, int(WAIT_SLICE_S * 1e9))
                self._libc.syscall(
                    ctypes.c_long(futex),
                    ctypes.c_void_p(self._address),
                    ctypes.c_int(FUTEX_WAIT),
                    ctypes.c_uint32(word),
                    ctypes.byref(slice_),
                    None,
                    0,
                )
            return False
        finally:
            self._view.release()
            self._map.close()


def _address_of(view: memoryview) -> int:
    """Where a buffer lies, read only or not (the buffer protocol's `buf`)."""
    holder = (ctypes.c_char * PAGE_SIZE_OF_PY_BUFFER)()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
    get(view, holder, 0)
    address = ctypes.c_void_p.from_buffer(holder).value
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(holder))
    assert address is not None
    return address


PAGE_SIZE_OF_PY_BUFFER = 256
"""More than sizeof(Py_buffer) on any platform."""


def exiting(pid: int) -> bool:
    """Whether process `pid` is on its way out: gone, exiting, or with a SIGKILL that it cannot escape.

    A killed process's main thread may take 10 ms until it runs again and starts to exit; the pending
    signal is visible at once.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    if fields[0] in "ZX" or int(fields[6]) & PF_EXITING:
        return True
    pending = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & SIGKILL_MASK for mask in pending)

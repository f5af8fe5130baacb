"""What this machine gives a process: looked up, and tried where that can be done. No judgement.

Changes nothing. Invariant: whatever cannot be found out is None (or empty), never an exception.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from segue_core.errors import SegueError
from segue_core.shared_memory import check_sealed, read_only, seal_size, sealable_memory
from segue_ctl.doctor_lifeline import try_lifeline

T = TypeVar("T")

PACKAGES = {
    "cuda": "cuda-bindings",
    "keys": "cryptography",
    "uvloop": "uvloop",
    "torch": "torch",
    "vllm": "vllm",
}
"""Optional ones, by what they are for here."""
SHM = Path("/dev/shm")  # noqa: S108 - looked at, not used
LOCKED_TRIAL_BYTES = 16 << 20
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Machine:
    """The facts. Sizes in bytes; `UNLIMITED` for limits that are none."""

    python: tuple[int, int, int]
    system: str
    release: str
    libc: str
    packages: dict[str, str]
    cpus: int
    usable_cpus: int
    cpu_quota: float | None
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit: int | None
    """Of the control group."""
    memory_charged: int | None
    """What it has used of that."""
    shm_bytes: int | None
    shm_free_bytes: int | None
    memfd_error: str
    """Why memory cannot be sealed; empty: it can."""
    lifeline_ms: float | None
    open_files: tuple[int, int]
    """(soft, hard) limit."""
    locked_memory: tuple[int, int]
    lock_error: str
    """Why `LOCKED_TRIAL_BYTES` cannot be page-locked; empty: they can."""
    first_process: str
    """Name of process 1 in this PID namespace."""
    host_name: str


def look(*, lifeline_timeout_s: float = 5.0) -> Machine:
    """Look, and try."""
    shm = _or_none(lambda: os.statvfs(SHM))
    memory = meminfo(_or_none(lambda: Path("/proc/meminfo").read_text()) or "")
    limit, charged = _group_memory()
    return Machine(
        python=sys.version_info[:3],
        system=platform.system(),
        release=platform.release(),
        libc=" ".join(filter(None, platform.libc_ver())),
        packages={name: found for name, package in PACKAGES.items() if (found := _version(package))},
        cpus=os.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        memory_limit=limit,
        memory_charged=charged,
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        memfd_error=_try_sealing(),
        lifeline_ms=try_lifeline(lifeline_timeout_s),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        lock_error=_try_locking(),
        first_process=(_or_none(lambda: Path("/proc/1/comm").read_text()) or "").strip(),
        host_name=socket.gethostname(),
    )


def meminfo(text: str) -> dict[str, int]:
    """The lines of /proc/meminfo that count bytes."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if len(parts) == 2 and parts[1] == "kB" and parts[0].isdigit():
            found[name] = int(parts[0]) << 10
    return found


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (OSError, ValueError, IndexError):
        return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _group_file(*names: str) -> str:
    """The content of the first of these files that is there, in either generation of control groups."""
    for name in names:
        if text := _or_none(lambda name=name: Path("/sys/fs/cgroup", name).read_text()):  # type: ignore[misc]
            return str(text).strip()
    return ""


def _group_memory() -> tuple[int | None, int | None]:
    """(limit, used) of this control group as a container sees it."""
    limit = _group_file("memory.max", "memory/memory.limit_in_bytes")
    used = _group_file("memory.current", "memory/memory.usage_in_bytes")
    bounded = limit.isdigit() and int(limit) < 1 << 60  # the older generation writes a huge number for none
    return (int(limit) if bounded else None), (int(used) if used.isdigit() else None)


def _cpu_quota() -> float | None:
    """CPUs that the control group may use; None: no limit."""
    quota, _, period = _group_file("cpu.max").partition(" ")
    if not quota:
        quota = _group_file("cpu/cpu.cfs_quota_us")
        period = _group_file("cpu/cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def _try_sealing() -> str:
    """Make, seal and pass on memory as daemon and shim do."""
    try:
        fd = sealable_memory("segue-doctor")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            seal_size(fd)
            check_sealed(fd, "memory")
            os.close(read_only(fd))
        finally:
            os.close(fd)
    except (OSError, SegueError) as error:
        return str(error)
    return ""


def _try_locking() -> str:
    """Page-lock some memory, and let it go."""
    memory = mmap.mmap(-1, LOCKED_TRIAL_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if libc.mlock(address, ctypes.c_size_t(LOCKED_TRIAL_BYTES)):
        return os.strerror(ctypes.get_errno())
    libc.munlock(address, ctypes.c_size_t(LOCKED_TRIAL_BYTES))
    return ""

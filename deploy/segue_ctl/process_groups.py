"""Process groups: who is in one, which shared memory it holds, and how to end it for good.

An engine is several processes; what is killed, stopped and cleaned up is always the group that its
leader started in. Reads /proc (Linux). Never touches a group that the caller did not name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_SHM = Path("/dev/shm")  # noqa: S108 - where the kernel keeps POSIX shared memory
# What Python's multiprocessing names its shared memory and its semaphores.
_NAMES = ("psm_*", "sem.mp-*")
_POLL_S = 0.02


def members(pgid: int) -> list[int]:
    """Pids of the group's processes that are still alive (zombies are not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) == pgid and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def cpu_ticks(pgid: int) -> int:
    """CPU time that the group's live processes have used, in clock ticks."""
    total = 0
    for pid in members(pgid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def shared_memory(pgid: int) -> set[Path]:
    """The shared-memory files that the group has mapped; after SIGKILL nobody else removes them.

    Compared by inode: a semaphore is mapped under a temporary name that is gone by then.
    """
    inodes: set[int] = set()
    for pid in members(pgid):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
            if len(fields) == 6 and fields[5].startswith(f"{_SHM}/"):
                inodes.add(int(fields[4]))
    found = set()
    for file in (file for name in _NAMES for file in _SHM.glob(name)) if inodes else ():
        with contextlib.suppress(OSError):
            if file.stat().st_ino in inodes:
                found.add(file)
    return found


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove what a dead group left behind."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def signal_group(pgid: int, number: signal.Signals) -> None:
    """Send `number` to every process of the group; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def end_groups(pgids: Iterable[int], *, grace_s: float) -> None:
    """SIGTERM to all groups, SIGKILL to what is left after `grace_s`, then remove their shared memory."""
    groups = list(pgids)
    leftovers = {file for pgid in groups for file in shared_memory(pgid)}
    for pgid in groups:
        signal_group(pgid, signal.SIGTERM)
        signal_group(pgid, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
    wait_gone(groups, timeout_s=grace_s)
    for pgid in groups:
        leftovers |= shared_memory(pgid)  # what one that was still starting has made meanwhile
        signal_group(pgid, signal.SIGKILL)
    wait_gone(groups, timeout_s=5.0)
    remove_shared_memory(leftovers)


def wait_gone(pgids: Iterable[int], *, timeout_s: float) -> bool:
    """Wait until no process of the groups is alive; False after `timeout_s`."""
    left = list(pgids)
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pgid for pgid in left if members(pgid)]
        if not left:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)

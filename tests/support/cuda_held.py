"""What a process with the CUDA double holds: the driver's objects, descriptors, threads, device memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from support.cuda_double import Control

SETTLED_S = 7.0


def held() -> dict[str, int]:
    """All of it that is not nothing, by name."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:cuda-double")
    found = Control().counts() | {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mapped": mapped,
    }
    found.pop("double_opens", None)  # it counts what happened
    return found


def left_behind(before: dict[str, int]) -> dict[str, int]:
    """What is held beyond `before`, once that is nothing or some seconds are over: much is let go without
    being waited for."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        now = held()
        more = {name: now[name] - before.get(name, 0) for name in now if now[name] > before.get(name, 0)}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.005)  # threads and driver tell nobody

"""What a process with the CUDA double holds: the driver's objects, descriptors, threads, device memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from support.cuda_double import Control
from support.waiting import last_of

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

    def more() -> dict[str, int]:
        now = held()
        return {name: now[name] - before.get(name, 0) for name in now if now[name] > before.get(name, 0)}

    return last_of(more, lambda found: not found, timeout_s=SETTLED_S)

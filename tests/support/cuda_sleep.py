"""An engine on the driver's double that sleeps: its KV memory goes and comes back under the same addresses.

For the programs of children; `conformance.pages_engine` has made the memory, of kind `cuda_vmm`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from conformance import pages_engine
from conformance.pages_engine import LAYER_BYTES, PIECES, checked, state
from segue_shim import vllm_sleep
from support.waiting import last_of


class SleepyWorker:
    """What vLLM's GPU worker does with memory, under its names."""

    def sleep(self, level: int = 1) -> list[int]:
        """[how much of the memory this process has afterwards, how much others have before]."""
        held = sum(held_of_device(pid) for pid in state["others"])
        memory_goes()
        return [held_of_device(os.getpid()), held]

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            memory_goes()

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            memory_comes()


def content_after(times: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the pages hold once the memory has come back so often."""
    return pages_engine.content() + np.uint8(times)


def memory_goes() -> None:
    """Unmap it: without another holder it is freed."""
    from cuda.bindings import driver

    at = state["memory"]
    for nbytes in PIECES:
        checked(driver.cuMemUnmap(at, nbytes))
        at += nbytes


def memory_comes() -> None:
    """New memory at the same addresses; each time each byte is one more than before."""
    from cuda.bindings import driver

    pages_engine.back(state["memory"], state["properties"], driver)
    state["times"] = state.get("times", 0) + 1
    for layer, values in enumerate(content_after(state["times"])):
        checked(driver.cuMemcpyHtoD(state["start"] + layer * LAYER_BYTES, values.ctypes.data, LAYER_BYTES))


def held_of_device(pid: int) -> int:
    """Mappings and descriptors of device memory that a process has."""
    folder = Path(f"/proc/{pid}")
    links = [os.readlink(fd) for fd in (folder / "fd").iterdir() if os.path.lexists(fd)]
    return sum("memfd:cuda-double" in line for line in [*(folder / "maps").read_text().splitlines(), *links])


def may_sleep(others: list[int]) -> None:
    """Have the exporter follow the worker's sleep; `others`: processes that must hold nothing then."""
    state["others"] = others
    vllm_sleep.WATCH.tell(state["exporter"].suspend, state["exporter"].resume)
    vllm_sleep.install(SleepyWorker)
    state["worker"] = SleepyWorker()


def sleep(level: int) -> list[int]:
    """Go to sleep; see SleepyWorker."""
    found: list[int] = state["worker"].sleep(level)
    return found


def wake_up(tags: list[str] | None = None) -> None:
    """Wake up, or only a part of it."""
    state["worker"].wake_up(tags)


def exchange() -> None:
    """Other memory comes under the same addresses, and nobody is told."""
    memory_goes()
    memory_comes()


def end() -> int:
    """The engine shuts down and frees its memory, but its process goes on; how much of it is still held."""
    state["exporter"].close()
    memory_goes()
    return held_of_device(os.getpid())


def idle_until_registered() -> bool:
    """Run empty steps, as an engine does without requests, until a daemon has taken this engine in."""
    from segue_shim.exporter import IDLE

    exporter = state["exporter"]

    def step() -> bool:
        exporter.begin(IDLE)
        exporter.commit()
        return bool(exporter.registered)

    return last_of(step, bool)

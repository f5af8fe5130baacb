"""Runs of the simulation beside all other tests, in processes that give way to them.

Owns these processes. Most other tests wait for something most of the time: what they leave of the processors
is enough for thousands of seeds. Knows nothing of tests. Invariant: what a run finds follows from its seeds,
wherever it runs.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

MAX_PROCESSES = 2
NICE = 10
"""A tenth of a processor where others want it too."""


class Beside:
    """`start` what is to run, then ask for each `result`; in the end `close`."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: there is nobody to give way to."""
        self._pool = ProcessPoolExecutor(
            max_workers=min(MAX_PROCESSES, len(os.sched_getaffinity(0))),
            mp_context=get_context("spawn"),
            initializer=_begin,
            initargs=(0 if alone else NICE,),
        )
        self._runs: dict[tuple[Any, ...], Future[Any]] = {}

    def start(self, run: Callable[..., Any], *values: Any) -> None:
        """Have `run(*values)` done some time."""
        if (run, *values) not in self._runs:
            self._runs[run, *values] = self._pool.submit(run, *values)

    def result(self, run: Callable[..., Any], *values: Any) -> Any:
        """What came of it, once it has; raises what it raised."""
        self.start(run, *values)
        return self._runs[run, *values].result()

    def close(self) -> None:
        """What has not begun is left out."""
        self._pool.shutdown(cancel_futures=True)


def _begin(nice: int) -> None:
    """In each process: warnings are errors, as in tests, and it ends when whoever started it has."""
    os.nice(nice)
    warnings.simplefilter("error")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)

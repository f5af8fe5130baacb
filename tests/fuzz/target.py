"""What a target is, and what is looked at whatever the target: unexpected errors, growth, open files.

Invariant: input that is wrong may be refused, logged, or cost its own connection; nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import structlog

from fuzz.mutate import Mutator


class Violation(Exception):
    """Hostile input did what it must not."""


class Target(ABC):
    """One way in. A world of it is made from its mutator's seed alone, so that it can be made again."""

    name = ""
    world_frames = 10_000
    """Frames after which a new world begins."""

    def __init__(self, mutate: Mutator) -> None:
        self.mutate = mutate
        self.rng = mutate.rng

    async def start(self) -> None:
        """Set the world up."""
        return

    @abstractmethod
    async def feed(self) -> int:
        """Feed some frames and wait until they were taken; how many. Raises Violation."""

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Everything that is kept: name to (its size, its limit)."""
        return {}

    def effects(self) -> dict[str, int]:
        """What must have happened in a whole world: frames that nobody understands find nothing."""
        return {}

    async def stop(self) -> None:
        """Take the world down."""
        return


def demand(holds: object, what: str) -> None:
    """Raise Violation unless `holds`."""
    if not holds:
        raise Violation(what)


class Watchdog:
    """Collects what must not happen: errors in the log, exceptions that nobody caught."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._handler = _Collector(self.seen)

    def __enter__(self) -> Watchdog:
        self._before = structlog.get_config()
        structlog.configure(
            processors=[self._note],
            wrapper_class=structlog.BoundLogger,
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        structlog.configure(**self._before)
        logging.getLogger().removeHandler(self._handler)

    def _note(self, _: Any, level: str, event: dict[str, Any]) -> str:
        cause = event.get("exc_info")
        if level in ("error", "critical", "exception") and cause:  # without one it is a word to people
            self.seen.append(f"{event['event']}: {cause!r}")
        raise structlog.DropEvent

    def on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear of exceptions that end up in `loop`."""
        loop.set_exception_handler(lambda _, context: self.seen.append(f"{context}"))

    def check(self) -> None:
        """Raise Violation with the first of them."""
        if self.seen:
            raise Violation(self.seen[0])


class _Collector(logging.Handler):
    def __init__(self, seen: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        where = "".join(traceback.format_tb(cause.__traceback__)[-4:]) if cause else ""
        self._seen.append(f"{record.name}: {record.getMessage()}: {cause!r}\n{where}")


def resident_bytes() -> int:
    """Of this process, after what can be collected was."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """File descriptors of this process, after what can be collected was: a map has one of its own."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def check_sizes(target: Target) -> None:
    """Raise Violation if something outgrew its limit."""
    for name, (size, limit) in target.sizes().items():
        demand(0 <= size <= limit, f"{name}: {size} of at most {limit}")

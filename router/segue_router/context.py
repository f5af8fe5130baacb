"""What every request handler needs, made once at start-up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from segue_router.engines import Registry
from segue_router.metrics import Metrics
from segue_router.settings import RouterSettings
from segue_router.stories import Stories


class Running(Protocol):
    """A request that is being served."""

    def stop(self) -> None:
        """End it with an honest error, soon."""
        ...


@dataclass
class Context:
    """One router. `data`: connections to engines, `control`: to daemons and for probes."""

    settings: RouterSettings
    registry: Registry
    data: aiohttp.ClientSession
    control: aiohttp.ClientSession
    metrics: Metrics
    stories: Stories
    running: set[Running] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    background: set[asyncio.Task[bool]] = field(default_factory=set)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.idle.set()

    def begin(self, request: Running) -> None:
        """It is being served."""
        self.running.add(request)
        self.idle.clear()

    def end(self, request: Running) -> None:
        """It is over."""
        self.running.discard(request)
        if not self.running:
            self.idle.set()

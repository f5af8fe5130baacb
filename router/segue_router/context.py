"""What every request handler needs, made once at start-up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from segue_router.conversations import Conversations
from segue_router.engine import Engine
from segue_router.engines import Registry
from segue_router.errors import ClientError
from segue_router.metrics import Metrics
from segue_router.settings import RouterSettings
from segue_router.stories import Stories


class Running(Protocol):
    """A request that is being served."""

    def stop(self) -> None:
        """End it with an honest error, soon."""
        ...

    def is_on(self, engine: Engine) -> bool:
        """Whether it waits for an answer of `engine`, or is on its way there."""
        ...

    async def move_away(self, engine: Engine) -> bool:
        """Let another engine go on with it, once that has caught up; returns whether it moves.

        False: it cannot be continued, or nobody could; it stays where it is, unharmed.
        """
        ...


@dataclass
class Context:
    """One router. `data`: connections to engines, `control`: for probes of engines."""

    settings: RouterSettings
    registry: Registry
    data: aiohttp.ClientSession
    control: aiohttp.ClientSession
    metrics: Metrics
    stories: Stories
    conversations: Conversations
    running: set[Running] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    background: set[asyncio.Task[bool]] = field(default_factory=set)
    admitted: int = 0
    """Requests between their headers and the end of their answer."""
    stopping: bool = False
    """Nothing new is accepted; what runs may go on, also elsewhere."""
    cutting_off: bool = False
    """The grace time is over: nothing goes on."""

    def __post_init__(self) -> None:
        self.idle.set()

    @contextmanager
    def admission(self) -> Iterator[None]:
        """A request is taken in, and let go at the end. Raises ClientError (503) if there is no room."""
        if self.stopping:
            raise ClientError(503, "the router is shutting down", code="router_stopping", kind="server_error")
        limit = self.settings.limits.max_active
        if self.admitted >= limit:
            raise ClientError(
                503, f"{limit} requests are being served already", code="overloaded", kind="server_error"
            )
        self.admitted += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.admitted -= 1
            if not self.admitted:
                self.idle.set()

    def begin(self, request: Running) -> None:
        """It is read and is being served. Raises ClientError (503) if that comes too late."""
        if self.cutting_off:
            raise ClientError(503, "the router is shutting down", code="router_stopping", kind="server_error")
        self.running.add(request)

    def end(self, request: Running) -> None:
        """It is over."""
        self.running.discard(request)

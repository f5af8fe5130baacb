"""Drain: an engine is emptied on purpose. It gets nothing new, and what runs on it moves to others.

Owns which engines are being emptied, and which of their requests were asked to leave. It moves nothing by
itself: a request knows how (`Running.move_away`). Invariants: none is asked twice at the same time, and no
more than `at_once` of an engine's together; one that cannot move is left alone until it ends or is asked
again; a drain lasts until `undrain`, whoever watches it or stops watching. It is the memory of this process:
a router that was restarted drains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import structlog
from msgspec.structs import replace

from segue_core.messages.status import DrainProgress
from segue_router.context import Context, Running
from segue_router.engine import Engine
from segue_router.engines import supervise
from segue_router.upstream import now_ms

log = structlog.get_logger()
PROGRESS_S = 1.0
"""Whoever watches a drain hears of it at least this often."""


class Roll:
    """Who is to be asked to leave one engine, and what they answered. Pure: events and `now_ms` in."""

    def __init__(self, *, at_once: int, retry_ms: int) -> None:
        self.moved = 0
        self._at_once = at_once
        self._retry_ms = retry_ms
        self._asked: set[Running] = set()
        self._leaving: set[Running] = set()
        self._stays: dict[Running, float] = {}
        """Who cannot move, and when to ask again."""

    def due(self, here: Sequence[Running], now_ms: float) -> list[Running]:
        """Whom of those who are `here` to ask now. Those who left are forgotten."""
        self._leaving.intersection_update(here)
        for gone in self._stays.keys() - set(here):
            del self._stays[gone]
        open_to = [request for request in here if request not in self._asked and request not in self._leaving]
        due = [request for request in open_to if self._stays.get(request, now_ms) <= now_ms]
        found = due[: max(0, self._at_once - len(self._asked))]
        self._asked.update(found)
        return found

    def answered(self, request: Running, now_ms: float, *, moves: bool) -> None:
        """`request` was asked. One that cannot move is asked again after a while."""
        self._asked.discard(request)
        if moves:
            self.moved += 1
            self._leaving.add(request)
            self._stays.pop(request, None)
        else:
            self._stays[request] = now_ms + self._retry_ms

    def wait_ms(self, now_ms: float) -> float | None:
        """How long until somebody is to be asked again; None: until something changes."""
        times = [at for request, at in self._stays.items() if request not in self._asked]
        if not times or len(self._asked) >= self._at_once:
            return None
        return max(0.0, min(times) - now_ms)

    def staying(self, here: Iterable[Running]) -> int:
        """How many of those who are `here` said that they cannot move."""
        return sum(request in self._stays for request in here)


class Drain:
    """Of one engine, from `drain` to `undrain`."""

    def __init__(self, context: Context, engine: Engine) -> None:
        self.ended = ""
        """Why nobody needs to watch any longer; empty while it lasts."""
        self._context = context
        self._engine = engine
        settings = context.settings.drain
        self._move_s = settings.move_ms / 1000
        self._roll = Roll(at_once=settings.at_once, retry_ms=settings.retry_ms)
        self._answered = asyncio.Event()
        self._moves: set[asyncio.Task[None]] = set()
        self._loop = asyncio.create_task(supervise(self._run))

    @property
    def progress(self) -> DrainProgress:
        """How far it is."""
        here = self._here()
        return DrainProgress(
            engine=self._engine.name,
            active=len(here),
            moved=self._roll.moved,
            staying=self._roll.staying(here),
            done=not here,
        )

    async def follow(self, wait_ms: float) -> AsyncIterator[DrainProgress]:
        """How far it is: now, at every change, and every second. The last one is done, or says why not."""
        deadline = now_ms() + wait_ms
        last: DrainProgress | None = None
        while True:
            now, progress = now_ms(), self.progress
            ended = self.ended or ("the router is shutting down" if self._context.stopping else "")
            if now >= deadline:
                ended = ended or f"not empty within {wait_ms / 1000:g} s; the drain goes on"
            if ended and not progress.done:
                progress = replace(progress, detail=ended)
            yield progress
            if progress.done or ended:
                return
            last = progress
            until = min(deadline, now + PROGRESS_S * 1000)
            while self.progress == last and not self.ended and (left := until - now_ms()) > 0:
                await self._next_change(left)

    async def stop(self, why: str) -> None:
        """The engine may be used again (or the router goes): nobody else is asked to leave."""
        self.ended = why
        tasks = [self._loop, *self._moves]
        for task in tasks:
            task.cancel()
        self._tell()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _here(self) -> list[Running]:
        return [request for request in self._context.running if request.is_on(self._engine)]

    async def _run(self) -> None:
        while True:
            now = now_ms()
            for request in self._roll.due(self._here(), now):
                move = asyncio.create_task(self._move(request))
                self._moves.add(move)
                move.add_done_callback(self._moves.discard)
            await self._next_change(self._roll.wait_ms(now))

    async def _move(self, request: Running) -> None:
        moves = False
        try:
            async with asyncio.timeout(self._move_s):
                moves = await request.move_away(self._engine)
        except TimeoutError:
            log.info("a request could not be moved in time", engine=self._engine.name)
        except Exception:  # whatever is wrong with one request, the others are moved
            log.exception("a request could not be moved", engine=self._engine.name)
        self._roll.answered(request, now_ms(), moves=moves)
        self._context.metrics.drained(moves=moves)
        self._tell()

    def _tell(self) -> None:
        self._answered.set()
        self._answered = asyncio.Event()

    async def _next_change(self, wait_ms: float | None) -> None:
        """Returns when a request comes to the engine, leaves it or answers, or after `wait_ms`."""
        waits = [
            asyncio.ensure_future(event.wait()) for event in (self._engine.attempts.changed, self._answered)
        ]
        try:
            await asyncio.wait(
                waits,
                timeout=None if wait_ms is None else wait_ms / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()


class Drains:
    """All of one router."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._drains: dict[str, Drain] = {}

    def drain(self, engine: Engine) -> Drain:
        """Begin to empty `engine`, or go on with that."""
        running = self._drains.get(engine.name)
        if running is not None:
            return running
        engine.draining = True
        log.info("draining", engine=engine.name, requests=len(engine.attempts))
        drain = self._drains[engine.name] = Drain(self._context, engine)
        return drain

    async def undrain(self, engine: Engine) -> None:
        """Let `engine` serve again; nothing happens if it does."""
        drain = self._drains.pop(engine.name, None)
        if drain is None:
            return
        engine.draining = False
        log.info("no longer draining", engine=engine.name)
        self._context.registry.changed()
        await drain.stop("it was undrained")

    async def close(self) -> None:
        """The router stops."""
        for drain in self._drains.values():
            await drain.stop("the router is shutting down")

"""The engines: how they are, and which of their streams have to be given up.

Owns the tasks that look at engines (probes), listen to their daemons (watch) and look for streams that
stand still (tick). Policy is in `health`; this file carries events to it and acts on its verdicts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import structlog

from segue_router.daemons import DaemonClient
from segue_router.engine import Engine
from segue_router.errors import UpstreamFailure
from segue_router.health import is_stalled, stands_still
from segue_router.settings import RouterSettings, TimeoutSettings
from segue_router.upstream import now_ms

log = structlog.get_logger()
WATCH_RETRY_S = 0.2
MAX_KNOWN_DEFECTS = 100
OBSERVER_PAUSE_MS = 1_000
"""A tick this late means that the router itself was stopped or starved."""


class Registry:
    """All engines. `wait_for_change` wakes whoever hopes for one of them."""

    def __init__(
        self,
        settings: RouterSettings,
        control: aiohttp.ClientSession,
        *,
        clock_ms: Callable[[], float] = now_ms,
    ) -> None:
        self.engines = [Engine(each, control) for each in settings.engines]
        self._by_name = {engine.name: engine for engine in self.engines}
        self._timeouts: TimeoutSettings = settings.timeouts
        self._clock_ms = clock_ms
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __getitem__(self, name: str) -> Engine:
        return self._by_name[name]

    @property
    def ready(self) -> bool:
        """Whether any engine can serve."""
        return any(engine.health.state != "down" for engine in self.engines)

    def serving(self, model: str) -> list[Engine]:
        """The engines that have `model`, in whatever state."""
        return [engine for engine in self.engines if engine.serves(model)]

    def start(self) -> None:
        """Begin to look at the engines."""
        for engine in self.engines:
            self._run(partial(self._probe_for_ever, engine))
            if engine.daemon is not None:
                self._run(partial(self._watch_for_ever, engine, engine.daemon))
        self._run(self._tick_for_ever)

    def _run(self, loop: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(_supervise(loop)))

    async def stop(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def changed(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, seconds: float) -> None:
        """Returns at the next change of any engine, or after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def failed(self, engine: Engine, failure: UpstreamFailure) -> None:
        """An attempt failed there. A probe follows at once: it tells a reset from a death."""
        before = engine.health.state
        now = self._clock_ms()
        if failure.refused:
            engine.health.refused(str(failure))
        elif failure.cause != "stalled":
            engine.health.reset(str(failure))
        elif stands_still(
            engine.health, progressed_ms=engine.progressed_ms, now_ms=now, stall_ms=self._timeouts.stall_ms
        ):
            engine.health.stalled(now)
        engine.look.set()
        self._note(engine, before)

    def _note(self, engine: Engine, before: str) -> None:
        state = engine.health.state
        if state != before:
            say = log.info if state == "up" else log.warning
            say("engine is " + state, engine=engine.name, reason=engine.health.detail)
            self.changed()

    async def _probe_for_ever(self, engine: Engine) -> None:
        while True:
            before = engine.health.state
            began = self._clock_ms()
            look = await engine.client.look(self._timeouts.health_ms, self._timeouts.connect_ms)
            now = self._clock_ms()
            if look.problem:
                engine.health.probe_failed(
                    now, look.problem, refused=look.refused, progressed_ms=engine.progressed_ms
                )
            else:
                engine.models = look.models
                engine.health.probe_ok(now, began_ms=began)
            self._note(engine, before)
            if not look.problem:
                self.changed()  # a good answer matters to those who wait to retry, whatever the state was
            try:
                async with asyncio.timeout(self._timeouts.health_interval_ms / 1000):
                    await engine.look.wait()
            except TimeoutError:
                pass
            engine.look.clear()

    async def _watch_for_ever(self, engine: Engine, daemon: DaemonClient) -> None:
        while True:
            async for status in daemon.watch():
                before = engine.health.state
                known = engine.health.daemon_state
                ended = engine.health.daemon_said(status, self._clock_ms())
                if ended:
                    self._doom(engine, "daemon_dead", status.detail or "the engine's process ended")
                elif status.state == "stalled":
                    self._doom(engine, "stalled", status.detail or "the engine stands still")
                if status.state != known:
                    engine.look.set()
                self._note(engine, before)
            await asyncio.sleep(WATCH_RETRY_S)

    def _doom(self, engine: Engine, cause: Any, detail: str) -> None:
        for attempt in tuple(engine.attempts):
            attempt.doom(cause, f"its daemon says: {detail}")

    async def _tick_for_ever(self) -> None:
        tick_ms = min(100, max(10, self._timeouts.stall_ms // 20))
        due = self._clock_ms() + tick_ms
        while True:
            await asyncio.sleep(tick_ms / 1000)
            now = self._clock_ms()
            if now - due > OBSERVER_PAUSE_MS:
                log.warning("the router itself stood still", for_ms=int(now - due))
                for engine in self.engines:
                    for attempt in engine.attempts:
                        attempt.forgive(now)
            due = now + tick_ms
            for engine in self.engines:
                self._give_up_stalled(engine, now)

    def _give_up_stalled(self, engine: Engine, now: float) -> None:
        limits = self._timeouts
        for attempt in tuple(engine.attempts):
            wait = attempt.wait
            if wait is None or now - wait.silent_since_ms < min(limits.stall_ms, limits.first_token_ms):
                continue
            if is_stalled(
                wait,
                engine.health,
                progressed_ms=engine.progressed_ms,
                now_ms=now,
                stall_ms=limits.stall_ms,
                first_token_ms=limits.first_token_ms,
            ):
                attempt.doom("stalled", f"silent for {int(now - wait.silent_since_ms)} ms")


async def _supervise(loop: Callable[[], Awaitable[None]]) -> None:
    """Keep `loop` running: a defect in it must not end the watch over the engines."""
    known: set[str] = set()
    while True:
        try:
            await loop()
        except Exception as error:
            if repr(error) not in known and len(known) < MAX_KNOWN_DEFECTS:
                known.add(repr(error))
                log.exception("watching the engines failed; going on")
        await asyncio.sleep(WATCH_RETRY_S)

"""The engines: how they are, and which of their streams have to be given up.

Owns which engines are offered, and the tasks that look at engines (probes), listen to their daemons (watch)
and look for streams that stand still (tick). Policy is in `health`; this file carries events to it and acts
on its verdicts.
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
from segue_router.errors import Cause, ClientError, UpstreamFailure
from segue_router.health import Observer, is_behind, is_stalled, should_ask, stands_still
from segue_router.settings import RouterSettings, TimeoutSettings
from segue_router.upstream import Attempt, now_ms

log = structlog.get_logger()
WATCH_RETRY_S = 0.2
MAX_KNOWN_DEFECTS = 100
OBSERVER_PAUSE_MS = 1_000
"""A tick this late (or half of `stall_ms`) means that the router itself was stopped or starved."""
ON_PURPOSE: frozenset[Cause] = frozenset({"drained", "router_stopping"})
MAX_QUESTIONS = 64
"""Daemons asked about silent streams at the same time; the others are asked at a later tick."""


class Registry:
    """All engines. `wait_for_change` wakes whoever hopes for one of them.

    Invariant: an engine that is being drained is not among those that are offered (`serving`, `open`).
    """

    def __init__(
        self,
        settings: RouterSettings,
        control: aiohttp.ClientSession,
        daemons: aiohttp.ClientSession | None = None,
        *,
        clock_ms: Callable[[], float] = now_ms,
    ) -> None:
        """`control` is for engines, `daemons` for their daemons (None: the same)."""
        self.engines = [Engine(each, control, daemons) for each in settings.engines]
        self._by_name = {engine.name: engine for engine in self.engines}
        self._timeouts: TimeoutSettings = settings.timeouts
        self._clock_ms = clock_ms
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._questions: set[asyncio.Task[None]] = set()
        timeouts = settings.timeouts
        self._tick_ms = min(100, max(10, timeouts.stall_ms // 20))
        self._observer = Observer(
            beat_ms=self._tick_ms,
            pause_ms=min(OBSERVER_PAUSE_MS, max(self._tick_ms, timeouts.stall_ms // 2)),
            together_ms=2 * (timeouts.health_interval_ms + timeouts.health_ms),
            patience_ms=timeouts.failover_ms,
        )

    def __getitem__(self, name: str) -> Engine:
        return self._by_name[name]

    def find(self, name: str) -> Engine | None:
        """The engine of that name, if there is one."""
        return self._by_name.get(name)

    @property
    def ready(self) -> bool:
        """Whether any engine can serve."""
        return any(engine.health.state != "down" for engine in self.open)

    @property
    def open(self) -> list[Engine]:
        """The engines that are not being drained, in whatever state."""
        return [engine for engine in self.engines if not engine.draining]

    def having(self, model: str) -> list[Engine]:
        """Those that have `model`, in whatever state, also those that are being drained."""
        return [engine for engine in self.engines if engine.serves(model)]

    def serving(self, model: str) -> list[Engine]:
        """Those of them that are not being drained."""
        return [engine for engine in self.having(model) if not engine.draining]

    def check_open(self, model: str) -> None:
        """Raise ClientError (503) if `model` is served, but only where nothing new is admitted."""
        names = [engine.name for engine in self.having(model)]
        if names and not self.serving(model):
            raise ClientError(
                503,
                f"every engine that serves {model or 'this'} is being drained ({', '.join(names)}); "
                "`seguectl undrain ENGINE` lets one serve again",
                code="draining",
                kind="server_error",
            )

    def start(self) -> None:
        """Begin to look at the engines."""
        for engine in self.engines:
            self._run(partial(self._probe_for_ever, engine))
            if engine.daemon is not None:
                self._run(partial(self._watch_for_ever, engine, engine.daemon))
        self._run(self._tick_for_ever)

    def _run(self, loop: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(supervise(loop)))

    async def stop(self) -> None:
        """Stop looking."""
        tasks = [*self._tasks, *self._questions]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        """An attempt failed there. A probe follows at once: it tells a reset from a death.

        Nobody is blamed for a time-out that passed while the router slept, nor for what is done on purpose.
        """
        if failure.cause in ON_PURPOSE:
            return
        before = engine.health.state
        now = self._clock_ms()
        if failure.refused:
            engine.health.refused(str(failure))
        elif failure.cause == "connect" and self._observer.slept(now - OBSERVER_PAUSE_MS, now):
            log.info("not blamed: the router itself stood still", engine=engine.name, reason=str(failure))
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
            if look.silent and self._observer.slept(began, now):
                continue  # it was the router that did not listen
            self._observer.probed(engine.name, now, silent=look.silent)
            if look.problem:
                engine.health.probe_failed(
                    now,
                    look.problem,
                    refused=look.refused,
                    progressed_ms=engine.progressed_ms,
                    doubtful=self._observer.doubts(now),
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
        self._observer.beat(self._clock_ms())
        while True:
            await asyncio.sleep(self._tick_ms / 1000)
            now = self._clock_ms()
            if paused_ms := self._observer.beat(now):
                log.warning("the router itself stood still", for_ms=int(paused_ms))
                for engine in self.engines:
                    for attempt in engine.attempts:
                        attempt.forgive(now)
            if self._observer.doubts(now):
                continue  # no engine answers: nobody could take over, and they may all be well
            for engine in self.engines:
                self._give_up_stalled(engine, now)

    def _give_up_stalled(self, engine: Engine, now: float) -> None:
        limits = self._timeouts
        for attempt in tuple(engine.attempts):
            wait = attempt.wait
            if wait is None or now - wait.silent_since_ms < min(limits.stall_ms / 2, limits.first_token_ms):
                continue
            asked = engine.daemon is not None and attempt.delivered and len(self._questions) < MAX_QUESTIONS
            if asked and should_ask(wait, asked_ms=attempt.asked_ms, now_ms=now, stall_ms=limits.stall_ms):
                self._ask(engine, attempt, now)
            if is_stalled(
                wait,
                engine.health,
                progressed_ms=engine.progressed_ms,
                now_ms=now,
                stall_ms=limits.stall_ms,
                lone_stall_ms=limits.lone_stall_ms,
                first_token_ms=limits.first_token_ms,
            ):
                attempt.doom("stalled", f"silent for {int(now - wait.silent_since_ms)} ms")

    def _ask(self, engine: Engine, attempt: Attempt, now: float) -> None:
        """How far is the engine with this silent stream? Its daemon knows."""
        assert engine.daemon is not None
        attempt.asked_ms = now
        question = asyncio.create_task(self._compare(engine.daemon, attempt))
        self._questions.add(question)
        question.add_done_callback(self._questions.discard)

    async def _compare(self, daemon: DaemonClient, attempt: Attempt) -> None:
        before = attempt.wait
        known: dict[str, int] = {}
        for seq in tuple(attempt.delivered):
            status = await daemon.sequence(seq, self._timeouts.probe_ms)
            if status is not None and status.role == "owner":
                known[seq] = status.known
        if before is not None and attempt.wait == before and is_behind(attempt.delivered, known):
            attempt.behind_since_ms = self._clock_ms()


async def supervise(loop: Callable[[], Awaitable[None]]) -> None:
    """Keep `loop` running: a defect in it must not end what watches over engines or empties them."""
    known: set[str] = set()
    while True:
        try:
            await loop()
        except Exception as error:
            if repr(error) not in known and len(known) < MAX_KNOWN_DEFECTS:
                known.add(repr(error))
                log.exception("looking after the engines failed; going on")
        await asyncio.sleep(WATCH_RETRY_S)

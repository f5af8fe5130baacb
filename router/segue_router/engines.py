"""The engines: who they are, how they are, and what runs on them.

Owns the tasks that look at engines (probes), listen to their daemons (watch) and look for streams that
stand still (tick). Policy is in `health`; this file carries events to it and acts on its verdicts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import msgspec
import structlog

from segue_core.messages.status import RouterEngine
from segue_router.daemons import DaemonClient
from segue_router.errors import UpstreamFailure
from segue_router.health import EngineHealth, is_stalled
from segue_router.settings import EngineSettings, RouterSettings, TimeoutSettings
from segue_router.upstream import Attempt, now_ms

log = structlog.get_logger()
MAX_MODELS = 1_024
MAX_MODELS_BYTES = 4 << 20
WATCH_RETRY_S = 0.2
MAX_KNOWN_DEFECTS = 100
OBSERVER_PAUSE_MS = 1_000
"""A tick this late means that the router itself was stopped or starved."""


class Engine:
    """One engine and its daemon."""

    def __init__(self, settings: EngineSettings, control: aiohttp.ClientSession) -> None:
        self.settings = settings
        self.name = settings.name
        self.url = settings.url.rstrip("/")
        self.health = EngineHealth()
        self.daemon = DaemonClient(control, settings.daemon) if settings.daemon else None
        self.models: dict[str, dict[str, Any]] = {}
        self.attempts: set[Attempt] = set()
        self.progressed_ms = float("-inf")
        self.look = asyncio.Event()

    def serves(self, model: str) -> bool:
        """Whether it has `model`; every engine serves a request that names none."""
        return not model or model == self.settings.model or model in self.models

    def model_names(self) -> list[str]:
        """The models it is known to serve."""
        return list(self.models) or [name for name in (self.settings.model,) if name]

    def max_model_len(self, model: str) -> int | None:
        """The longest context of `model` there (vLLM's `max_model_len`), if it says so."""
        card = self.models.get(model) if model else next(iter(self.models.values()), None)
        length = card.get("max_model_len") if card else None
        return length if isinstance(length, int) else None

    @property
    def fingerprint(self) -> str:
        """What its KV bytes can be exchanged with; empty: unknown."""
        status = self.health.last_status
        return status.fingerprint if status else ""

    def progressed(self) -> None:
        """One of its streams advanced."""
        self.progressed_ms = now_ms()
        self.health.token()

    def status(self) -> RouterEngine:
        """As `/status` shows it."""
        return RouterEngine(
            name=self.name,
            url=self.url,
            model=", ".join(self.model_names()),
            state=self.health.state,
            active=len(self.attempts),
            daemon=self.settings.daemon or "",
            daemon_state=self.health.daemon_state,
            failures=self.health.failures,
            detail=self.health.detail,
        )


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
        self._control = control
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

    async def answers(self, engine: Engine, timeout_ms: int) -> bool:
        """Whether the engine's `/health` is good right now."""
        timeout = aiohttp.ClientTimeout(total=timeout_ms / 1000)
        try:
            async with self._control.get(f"{engine.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def failed(self, engine: Engine, failure: UpstreamFailure) -> None:
        """An attempt failed there. A probe follows at once: it tells a reset from a death."""
        before = engine.health.state
        if failure.refused:
            engine.health.refused(str(failure))
        elif failure.cause == "stalled":
            engine.health.stalled(self._clock_ms())
        else:
            engine.health.reset(str(failure))
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
            problem, refused = await self._probe(engine)
            now = self._clock_ms()
            if problem:
                engine.health.probe_failed(now, problem, refused=refused, progressed_ms=engine.progressed_ms)
            else:
                engine.health.probe_ok(now)
            self._note(engine, before)
            if not problem:
                self.changed()  # a good answer matters to those who wait to retry, whatever the state was
            try:
                async with asyncio.timeout(self._timeouts.health_interval_ms / 1000):
                    await engine.look.wait()
            except TimeoutError:
                pass
            engine.look.clear()

    async def _probe(self, engine: Engine) -> tuple[str, bool]:
        """(what is wrong, whether the connection was refused); empty when all is well."""
        timeout = aiohttp.ClientTimeout(
            total=self._timeouts.health_ms / 1000, sock_connect=self._timeouts.connect_ms / 1000
        )
        try:
            async with self._control.get(f"{engine.url}/health", timeout=timeout) as response:
                if response.status != 200:
                    return f"/health answers {response.status}", False
            async with self._control.get(f"{engine.url}/v1/models", timeout=timeout) as response:
                if response.status != 200:
                    return f"/v1/models answers {response.status}", False
                found = _model_cards(await _at_most(response, MAX_MODELS_BYTES))
        except aiohttp.ClientConnectorError as error:
            return f"cannot connect: {error}", True
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"no answer to a probe: {type(error).__name__} {error}".rstrip(), False
        if found is None:
            return "/v1/models answers something else than a list of models", False
        engine.models = found
        return "", False

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


async def _at_most(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, cut at `limit` bytes (and then not JSON any more)."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body[:limit])


def _model_cards(raw: bytes) -> dict[str, dict[str, Any]] | None:
    """Model id to card from an answer of `/v1/models`; None if it is not one."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    cards = body.get("data") if isinstance(body, dict) else None
    if not isinstance(cards, list):
        return None
    return {
        card["id"]: card
        for card in cards[:MAX_MODELS]
        if isinstance(card, dict) and isinstance(card.get("id"), str)
    }

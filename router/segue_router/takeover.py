"""Which engine a request goes to, and goes on at: the I/O around `choose`.

Owns what one request knows about engines: which failed it, which are busy, its epoch. Invariants: a
request never goes back to an engine that failed it, unless that engine came back since, or once more after
a bare reset or for want of any other; to one that is being drained only for want of any other that is well;
the epoch only grows, and daemons hear of it before the next engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from segue_core.messages.request import Replication, SegueParams, choice_seq
from segue_core.messages.status import Exact, PromoteRequest
from segue_router.choose import rank_for_resume
from segue_router.context import Context
from segue_router.daemons import DaemonClient, Superseded
from segue_router.engine import Engine
from segue_router.errors import Cause, UpstreamFailure
from segue_router.holders import ask, held_by
from segue_router.origin import Origin
from segue_router.resume import Progress, Target
from segue_router.seam import MAX_GIVEN_BACK, SEAM_IDS, ends_together
from segue_router.turn import Turn
from segue_router.upstream import now_ms

BUSY_RETRY_MS = 250
ALMOST_TOKENS = 64
"""A replica so little behind catches up while its daemon is promoted."""
CATCH_UP_POLL_S = 0.02
FENCE_TIMEOUT_MS = 2_000
RETRYABLE_THERE: frozenset[Cause] = frozenset({"stream_eof", "connect"})
"""Failures after which the same engine may be asked again: the network may be at fault."""


@dataclass(frozen=True, slots=True)
class Failed:
    """When, how and how often an engine failed this request in one of its lives. `transient`: each time the
    network may have been at fault."""

    recoveries: int
    at_ms: float
    transient: bool
    times: int


class Takeover:
    """Of one request."""

    def __init__(
        self, context: Context, seq: str, model: str, turn: Turn, replication: Replication = "normal"
    ) -> None:
        self.epoch = 1
        self.watermark = 0
        self.origin = Origin(model)
        self._context = context
        self._seq = seq
        self._model = model
        self._turn = turn
        self._replication: Replication = replication
        self._failed: dict[str, Failed] = {}
        self._busy: set[str] = set()
        self._retry_same = context.settings.failover.retry_same_engine_once
        self._asked_same = True
        self._last: Engine | None = None
        self._wrote: Engine | None = None
        self._chosen: Engine | None = None
        self._needed = self._wanted = frozenset[Exact]()

    def params(self, engine: Engine) -> SegueParams | None:
        """What the engine's shim is told; None where there is no daemon beside it."""
        if engine.daemon is None:
            return None
        resume = self.epoch > 1 or self._turn.asks(engine)
        return SegueParams(seq=self._seq, epoch=self.epoch, resume=resume, replication=self._replication)

    async def first(self) -> Engine | None:
        """The engine a new request starts on."""
        return await self._turn.start(self._usable())

    def busy(self, engine: Engine) -> None:
        """It answered 429 or 503: no failure, but not now."""
        self._busy.add(engine.name)

    def failed(self, engine: Engine, failure: UpstreamFailure) -> None:
        """It failed this request."""
        health = engine.health
        transient = failure.cause in RETRYABLE_THERE and not failure.refused
        before = self._failed.get(engine.name)
        times = before.times + 1 if before is not None and before.recoveries == health.recoveries else 1
        transient = transient and (times == 1 or (before is not None and before.transient))
        self._failed[engine.name] = Failed(health.recoveries, now_ms(), transient, times)
        self._last = engine
        self._asked_same = not self._retry_same

    def must_continue(self, needed: frozenset[Exact], wanted: frozenset[Exact]) -> None:
        """The answer can only go on at engines that continue `needed` exactly (empty: anywhere), and best
        at those that continue `wanted`."""
        self._needed, self._wanted = needed, wanted

    def anywhere(self, engine: Engine, wanted: frozenset[Exact]) -> Target:
        """What the best engine there is, or will be in a moment, could do for the answer that `engine` cannot
        go on with."""
        engines = self._context.registry.having(self._model)
        able = any(wanted <= other.exact_again for other in engines)
        return replace(self.origin.target(engine), exact=wanted if able else frozenset())

    async def give_back(self, engine: Engine, progress: Progress, headers: Mapping[str, str]) -> int | None:
        """How many delivered ids have text that the client has not got, by the tokenizer of `engine`.

        None: it cannot be known. An engine that does not tell is believed where it hardly can be otherwise:
        the last event was one token with text. Raises UpstreamFailure if nothing is heard of it.
        """
        ids = progress.delivered_ids
        if not ids or not progress.text_may_lag:
            return 0
        deadline = now_ms() + self._context.settings.timeouts.health_ms
        for count in range(min(MAX_GIVEN_BACK, len(ids) - 1) + 1):
            end = len(ids) - count
            text = await engine.client.text_of(
                ids[max(0, end - SEAM_IDS) : end], self.origin.model, headers, deadline - now_ms()
            )
            if text is None:
                return 0 if count == 0 and progress.single else None
            if ends_together(text, progress.recent_text, whole=len(ids) <= SEAM_IDS):
                return count
        return None

    def has_other(self, engine: Engine, needed: frozenset[Exact]) -> bool:
        """Whether an engine other than `engine` is well and could go on with the answer."""
        return any(needed <= other.exact for other in self._others(engine))

    async def caught_up(self, engine: Engine, progress: Callable[[], Progress | None]) -> None:
        """Returns once a replica elsewhere is within ALMOST_TOKENS of what `engine` has delivered, or when
        that takes too long, or is over (no `progress`). Where one has no daemon, or the client wants no
        replica, everything is computed again: there is nothing to wait for."""
        if self._replication == "off":
            return
        timeouts = self._context.settings.timeouts
        deadline = now_ms() + timeouts.failover_ms
        while engine.daemon and now_ms() < deadline and not self._context.cutting_off:
            others = [other.daemon for other in self._others(engine) if other.daemon]
            now = progress()
            if now is None or not others:
                return
            seq, tokens = next(iter(self._names(now).items()))
            held = await asyncio.gather(*(held_by(daemon, seq, timeouts.probe_ms) for daemon in others))
            if any(status and status.watermark >= tokens - ALMOST_TOKENS for status in held):
                return
            await asyncio.sleep(CATCH_UP_POLL_S)

    def _others(self, engine: Engine) -> list[Engine]:
        return [other for other in self._usable() if other is not engine and other.health.state == "up"]

    def next_epoch(self, engine: Engine) -> None:
        """`engine` wrote; whoever writes on does so under a higher epoch."""
        self.epoch += 1
        self._wrote = engine

    def fence(self, engine: Engine, progress: Progress) -> None:
        """Tell the failed engine's daemon that its epoch is over; in the background, with a deadline.

        Only once the next engine's daemon was promoted: until then what the old daemon still has to ship
        is welcome there.
        """
        if engine.daemon is None:
            return
        for seq in self._names(progress):
            task = asyncio.create_task(engine.daemon.fence(seq, self.epoch, FENCE_TIMEOUT_MS))
            self._context.background.add(task)
            task.add_done_callback(self._context.background.discard)

    async def next(self, progress: Progress, *, patience_ms: float, begun: bool) -> Engine | None:
        """The engine to go on at; waits up to `patience_ms` for one. None: there is none.

        begun: it is no new request any more, and goes on at an engine that is being drained rather than end.
        """
        registry = self._context.registry
        deadline = now_ms() + patience_ms
        self._goes_to(None)
        while not self._context.cutting_off:
            engine = await self._same_engine_at_once()
            if engine is None:
                engine = await self._best(self._usable(), progress)
            if engine is None or engine.health.state == "down":
                engine = await self._best(self._last_resorts(begun=begun), progress) or engine
            if engine is not None:
                self._goes_to(engine)
                return engine
            left = deadline - now_ms()
            if left <= 0:
                return None
            await registry.wait_for_change(min(left, BUSY_RETRY_MS) / 1000)
            if patience_ms:
                self._busy.clear()
        return None

    def arrived(self) -> None:
        """The request is at the engine that `next` found, or goes nowhere."""
        self._goes_to(None)

    def _goes_to(self, engine: Engine | None) -> None:
        """Until it is there, others that choose take it into account."""
        if self._chosen is not None:
            self._chosen.expected.discard(self)
        self._chosen = engine
        if engine is not None:
            engine.expected.add(self)

    async def promote(self, engine: Engine, progress: Progress) -> None:
        """Fence older writers at the engine's daemon and learn how much of the KV can be loaded there."""
        self.watermark = 0
        daemon = engine.daemon
        if daemon is None:
            return
        wanted = self._names(progress)
        wait_ms = 0 if self._has_it_itself(engine) else self._context.settings.timeouts.promote_wait_ms
        for _ in range(2):
            try:
                loadable = await asyncio.gather(
                    *(self._promote(daemon, *each, wait_ms) for each in wanted.items())
                )
            except Superseded:
                held = await daemon.sequence(next(iter(wanted)), self._context.settings.timeouts.probe_ms)
                self.epoch = max(self.epoch, held.epoch if held else 0) + 1
                continue
            self.watermark = min(loadable)
            return

    def _has_it_itself(self, engine: Engine) -> bool:
        """Whether `engine` goes on with what it wrote in the same life: nobody ships that to its daemon."""
        failed = self._failed.get(engine.name)
        same_life = failed is not None and failed.recoveries == engine.health.recoveries
        return engine is self._wrote and same_life

    async def _promote(self, daemon: DaemonClient, seq: str, want: int, wait_ms: int) -> int:
        timeouts = self._context.settings.timeouts
        request = PromoteRequest(self.epoch, want, wait_ms if want else 0)
        promoted = await daemon.promote(seq, request, timeouts.probe_ms)
        return min(promoted.watermark, want) if promoted is not None else 0

    def _names(self, progress: Progress) -> dict[str, int]:
        """The sequences of the choices that go on, and how many tokens' KV each needs."""
        prompt = len(progress.prompt_ids or ())
        return {
            choice_seq(self._seq, index): max(0, prompt + len(choice.ids) - 1)
            for index, choice in enumerate(progress.choices)
            if choice.finish_reason is None
        } or {self._seq: 0}

    def _usable(self) -> list[Engine]:
        return [
            engine
            for engine in self._context.registry.serving(self._model)
            if engine.name not in self._busy and self._may_use(engine) and self._can_continue(engine)
        ]

    def _can_continue(self, engine: Engine) -> bool:
        return self._needed <= engine.exact and self.origin.fits(engine)

    def _may_use(self, engine: Engine) -> bool:
        failed = self._failed.get(engine.name)
        return failed is None or engine.health.recoveries > failed.recoveries

    async def _same_engine_at_once(self) -> Engine | None:
        """The engine that failed last, once more, after a bare reset: its KV is still there.

        Its daemon must say that it lives, and so must the engine itself: a killed process is gone for its
        clients a tenth of a second before the kernel has torn down its memory and its daemon can know.
        """
        engine = self._retryable()
        if engine is None or not self._can_continue(engine):
            return None
        self._asked_same = True
        daemon = engine.health.daemon(now_ms())
        if daemon is None or daemon.state != "running":
            return None
        if not await engine.client.healthy(self._context.settings.timeouts.probe_ms):
            return None
        return engine

    def _last_resorts(self, *, begun: bool) -> list[Engine]:
        """For want of any other that is well: engines that failed this request once, or only by connections
        that broke (`max_moves` bounds how often), and have answered a probe since; and, for what has begun,
        those that are being drained."""
        registry = self._context.registry
        engines = registry.having(self._model) if begun else registry.serving(self._model)
        return [
            engine
            for engine in engines
            if engine.name not in self._busy
            and self._can_continue(engine)
            and (self._may_use(engine) or self._is_well_again(engine))
        ]

    def _is_well_again(self, engine: Engine) -> bool:
        failed, health = self._failed[engine.name], engine.health
        forgivable = failed.times == 1 or failed.transient
        return forgivable and health.state != "down" and health.probed_ok_ms > failed.at_ms

    def _retryable(self) -> Engine | None:
        engine = self._last
        if engine is None or engine.draining or self._asked_same:
            return None
        failed = self._failed[engine.name]
        return engine if failed.transient and failed.times == 1 else None

    async def _best(self, engines: Sequence[Engine], progress: Progress) -> Engine | None:
        able = [other for other in engines if self._wanted <= other.exact and other.health.state == "up"]
        engines = able or engines
        if len(engines) < 2:
            return engines[0] if engines else None
        if not progress.begun and self._turn.known:  # nobody has anything of it yet, but of the turn before
            return await self._turn.start(engines)
        timeout_ms = self._context.settings.timeouts.probe_ms
        seq, tokens = next(iter(self._names(progress).items()))
        ranked = rank_for_resume(
            await ask(engines, seq, timeout_ms),
            tokens=tokens + 1,
            fingerprint=self._wrote.fingerprint if self._wrote else "",
        )
        return self._context.registry[ranked[0]]

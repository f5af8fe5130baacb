"""One generation, from the client's request to the last byte of its answer, over as many engines as it takes.

Owns the order of things: send, relay, and when an engine fails, or is drained: decide, choose, promote, send
on (and fence, beside it). The decisions are made elsewhere (`resume`, `choose`, `health`), and `ending` has
the last words. Invariants: what the client received is a prefix of one valid answer; a client that has left
keeps no engine busy; what cannot be continued ends in one clear error and never in `[DONE]`.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

import structlog
from aiohttp import web

from segue_core.messages.status import Exact as Ability
from segue_router.choose import affinity_key
from segue_router.chronicle import Chronicle
from segue_router.client import SEQ_HEADER, ClientStream, client_error_answer, request_headers
from segue_router.context import Context
from segue_router.ending import Ending
from segue_router.engine import Engine
from segue_router.errors import Cause, ClientError, UpstreamFailure
from segue_router.exchange import Busy, EngineAnswer, Exchange, Rejected
from segue_router.request import GenerationRequest, replication_of
from segue_router.resume import (
    ByIds,
    Exact,
    Finish,
    Move,
    Plan,
    Progress,
    Refuse,
    Restart,
    Target,
    exactly_not,
    how_to_resume,
)
from segue_router.takeover import Takeover
from segue_router.transcript import How, Transcript
from segue_router.turn import Turn
from segue_router.upstream import now_ms

log = structlog.get_logger()
FAILOVER_HEADER = "x-segue-failover"
REPLICATION_HEADER = "x-segue-replication"
UNCOUNTED: frozenset[Cause] = frozenset({"connect", "drained"})
"""No move of an answer away from a failure: the engine never had the request, or is emptied on purpose."""


class Generation:
    """See the module."""

    def __init__(self, context: Context, http: web.Request, request: GenerationRequest) -> None:
        self._context = context
        self._http = http
        self._request = request
        self._seq = f"seq-{secrets.token_hex(12)}"
        self._client = ClientStream(http, self._seq)
        limits = context.settings.limits
        self._track = Transcript(request, limits.max_transcript_tokens)
        affinity = context.settings.affinity
        key = affinity_key(request, http.headers.get(affinity.header), affinity.prefix_chars)
        self._turn = Turn(context, request, key)
        replication = replication_of(http.headers.get(REPLICATION_HEADER))
        self._takeover = Takeover(context, self._seq, request.model, self._turn, replication)
        self._chronicle = Chronicle(context.stories, context.metrics, self._seq, request.path)
        self._headers = request_headers(http.headers)
        self._headers["Content-Type"] = "application/json"
        self._exchange = Exchange(
            context, request, self._seq, self._track, self._client, self._chronicle, self._headers
        )
        self._ending = Ending(context, request, self._track, self._client, self._chronicle)
        opted_out = http.headers.get(FAILOVER_HEADER, "").lower() in ("off", "0", "false", "no")
        self._may_move = context.settings.failover.enabled and not opted_out
        self._moves = self._failures = 0
        self._busy_answer: EngineAnswer | None = None
        self._patience_until_ms: float | None = None

    def stop(self) -> None:
        """The router goes: end with an honest error."""
        if self._exchange.attempt is not None:
            self._exchange.attempt.doom("router_stopping", "the router is shutting down")

    def is_on(self, engine: Engine) -> bool:
        """Whether it waits for an answer of `engine`, or is on its way there."""
        return self._exchange.attempt in engine.attempts or self._takeover in engine.expected

    async def move_away(self, engine: Engine) -> bool:
        """Give the present engine up on purpose, once another one has the KV of what was delivered."""
        attempt = self._exchange.attempt
        if attempt is None or attempt not in engine.attempts:  # it is on its way there still
            return False
        if self._request.mode == "whole" or not self._may_move:
            return False
        if isinstance(self._way_out(engine), (Exact, ByIds)):
            await self._takeover.caught_up(
                engine, lambda: self._track.progress if attempt in engine.attempts else None
            )
        if attempt not in engine.attempts or self._way_out(engine) is None:
            return False
        attempt.doom("drained", "the engine is being drained")
        return True

    def _way_out(self, engine: Engine) -> Move | None:
        """How another engine, that is well now, would go on after `engine`; None: there is none."""
        progress = self._track.progress
        if progress.begun:
            self._takeover.origin.began_on(engine)
        plan, needed = self._wherever(engine, progress)
        if progress.finish_reason is not None or isinstance(plan, (Finish, Refuse)):
            return None
        if not self._takeover.has_other(engine, needed):
            return None
        return plan

    async def run(self) -> web.StreamResponse:
        """Serve the client. Raises CancelledError when it leaves."""
        context, chronicle = self._context, self._chronicle
        try:
            context.begin(self)
            return await self._serve()
        except EngineAnswer as answer:
            chronicle.ends("client_error" if answer.status < 500 else "failed")
            return await self._client.pass_on(answer.status, answer.body, answer.headers)
        except ClientError as error:
            chronicle.ends("client_error" if error.status < 500 else "failed", str(error))
            return client_error_answer(error, {SEQ_HEADER: self._seq})
        except asyncio.CancelledError:
            chronicle.ends("client_left")
            raise
        except ConnectionError:
            chronicle.ends("client_left")
            return self._client.response or web.Response(status=499)
        finally:
            self._exchange.let_go()
            self._takeover.arrived()
            context.end(self)
            tokens = len(self._track.prompt_ids or ()) + self._track.delivered_tokens
            self._turn.over(self._seq, tokens)
            chronicle.is_at(len(self._track.prompt_ids or ()), self._track.delivered_tokens)
            chronicle.close()

    async def _serve(self) -> web.StreamResponse:
        engine = await self._takeover.first()
        if engine is None:
            return await self._ending.no_engine()
        plan: Move = self._from_the_start(engine)
        while True:
            self._turn.at(engine)
            self._takeover.arrived()
            try:
                whole = await self._exchange.run(engine, plan)
                return await self._ending.complete() if whole is None else whole
            except UpstreamFailure as failure:
                step = await self._after(engine, failure)
            if isinstance(step, web.StreamResponse):
                return step
            engine, plan = step

    def _from_the_start(self, engine: Engine) -> Restart:
        """The whole request, with a seed of the router's own if `engine` can repeat random draws."""
        request = self._request.seeded(secrets.randbits(31) if self._seeds(engine) else None)
        self._request = request
        takeover = self._takeover
        params = takeover.params(engine)
        return Restart(request.path, request.engine_body(params, takeover.origin.target(engine).model))

    def _seeds(self, engine: Engine) -> bool:
        """Whether random draws have to be repeatable for another engine to go on with them."""
        request = self._request
        return (
            self._context.settings.failover.seed_sampled
            and self._may_move
            and request.mode == "tracked"
            and request.samples
            and request.body.get("seed") is None
            and "seed" in engine.exact
            and not request.exact_obstacle
        )

    async def _after(
        self, engine: Engine, failure: UpstreamFailure
    ) -> web.StreamResponse | tuple[Engine, Move]:
        """An engine failed, or is drained: the client's last answer, or the engine to go on at and how."""
        takeover, exchange = self._takeover, self._exchange
        assert exchange.attempt is not None
        self._chronicle.failed(exchange.attempt)
        if exchange.gained:
            self._patience_until_ms = None
        if failure.cause == "router_stopping" or self._context.cutting_off:
            return await self._ending.stopping()
        progress = self._track.progress
        if isinstance(failure, Rejected):
            if progress.client_has or self._ending.known:
                return await self._ending.refuse(failure.reason, failure)
            takeover.next_epoch(engine)
            restart = self._from_the_start(engine)  # nobody has anything of the answer yet
            self._prepare(restart)
            return engine, restart
        self._note_failure(engine, failure)
        plan, needed = self._wherever(engine, progress)
        if isinstance(plan, Finish):
            return await self._ending.finish(plan)
        if isinstance(plan, Refuse) and plan.reason != "unknown_model_length":
            return await self._ending.refuse(plan.reason, failure)
        takeover.must_continue(needed, self._request.needs if isinstance(plan, Exact) else needed)
        if progress.begun:
            takeover.origin.began_on(engine)
        busy = isinstance(failure, Busy)
        counted = not busy and failure.cause not in UNCOUNTED
        if problem := self._no_more_moves(counted):
            return await self._ending.give_up(502, f"{problem}: {failure}", code=failure.cause)
        if not busy:
            takeover.next_epoch(engine)
        begun = progress.client_has or failure.cause == "drained" or counted or self._moves > 0
        while True:
            patience_ms = self._patience_left() if begun and progress.finish_reason is None else 0
            following = await self._client.while_waiting(
                takeover.next(progress, patience_ms=patience_ms, begun=begun)
            )
            if following is None:
                return await self._ending.nobody(failure, self._busy_answer, begun=begun)
            try:
                plan = await self._plan(following, progress)
            except UpstreamFailure as silent:
                self._note_failure(following, silent)
                if not patience_ms:
                    return await self._ending.nobody(failure, self._busy_answer, begun=begun)
                continue
            if not (isinstance(plan, Refuse) and needed and patience_ms):
                break  # else its daemon was started again in between, and does not know its engine yet
        self._moves += counted
        exchange.let_go()
        if not busy:
            takeover.fence(engine, progress)
        if isinstance(plan, Refuse):
            return await self._ending.refuse(plan.reason, failure)
        if isinstance(plan, Finish):
            return await self._ending.finish(plan)
        if not busy:
            self._note_move(engine, following, failure, plan, progress)
        self._prepare(plan)
        return following, plan

    def _wherever(self, engine: Engine, progress: Progress) -> tuple[Plan, frozenset[Ability]]:
        """How the best engine there is would go on after `engine`, and what it must be able to for that."""
        request, target = self._request, self._takeover.anywhere(engine, self._request.needs)
        plan = how_to_resume(request, progress, target, None)
        if isinstance(plan, Exact):
            modest = how_to_resume(request, progress, replace(target, exact=frozenset()), None)
            if isinstance(modest, Refuse):
                return plan, request.needs
        return plan, frozenset()

    def _prepare(self, plan: Move) -> None:
        """What was collected so far is brought in line with what the next engine will say."""
        if isinstance(plan, Exact):
            self._track.next_engine("exact")
        elif isinstance(plan, ByIds):
            self._track.next_engine("by_ids", given_back=plan.given_back)
        else:
            self._takeover.origin.starts_again()
            self._track.next_engine("restart")

    def _note_failure(self, engine: Engine, failure: UpstreamFailure) -> None:
        """Tell everybody whom it concerns."""
        if isinstance(failure, Busy):
            self._takeover.busy(engine)
            self._busy_answer = failure.answer
            return
        if failure.cause == "drained":
            return
        self._failures += 1
        self._context.registry.failed(engine, failure)
        self._takeover.failed(engine, failure)
        self._context.metrics.failover(failure.cause)
        log.warning(
            "engine failed", seq=self._seq, engine=engine.name, cause=failure.cause, reason=str(failure)
        )

    async def _plan(self, following: Engine, progress: Progress) -> Plan:
        """How `following` goes on. Its daemon and its tokenizer are asked at the same time."""
        takeover = self._takeover
        give_back = self._give_back(following, progress)
        if takeover.epoch > 1:  # somebody wrote before it, be it under an engine that has become busy since
            promotion = takeover.promote(following, progress)
            # Neither is left running when the other fails.
            promoted, count = await asyncio.gather(promotion, give_back, return_exceptions=True)
            if isinstance(promoted, BaseException):
                raise promoted
            if isinstance(count, BaseException):
                raise count
        else:
            count = await give_back
        params = takeover.params(following)
        plan = how_to_resume(
            self._request, progress, takeover.origin.target(following, give_back=count), params
        )
        return self._from_the_start(following) if isinstance(plan, Restart) else plan

    async def _give_back(self, following: Engine, progress: Progress) -> int | None:
        """Delivered ids without their text; matters only where it is continued by ids."""
        target: Target = self._takeover.origin.target(following)
        if not exactly_not(self._request, progress, target):
            return 0
        return await self._takeover.give_back(following, progress, self._headers)

    def _patience_left(self) -> float:
        """How long the client still waits for an engine; the time runs until it gets something new."""
        now = now_ms()
        if self._patience_until_ms is None:
            self._patience_until_ms = now + self._context.settings.timeouts.failover_ms
        return max(0.0, self._patience_until_ms - now)

    def _no_more_moves(self, counted: bool) -> str:
        """Why it may not go on elsewhere; empty if it may."""
        failover = self._context.settings.failover
        if counted and not self._may_move:
            return "the engine failed, and failover is off"
        if counted and self._moves >= failover.max_moves:
            return f"the engine failed, and the request has moved {self._moves} times already"
        if self._failures > failover.max_moves + 2 * len(self._context.registry.engines):
            return "too many engines failed"
        return ""

    def _note_move(
        self,
        engine: Engine,
        following: Engine,
        failure: UpstreamFailure,
        plan: Move,
        progress: Progress,
    ) -> None:
        how: How = "exact" if isinstance(plan, Exact) else "by_ids" if isinstance(plan, ByIds) else "restart"
        dropped = progress.held_tokens if isinstance(plan, Restart) else 0
        if isinstance(plan, ByIds):
            dropped = plan.dropped_tokens
        watermark = self._takeover.watermark
        self._chronicle.moves(engine.name, following.name, failure, how, progress, dropped, watermark)
        log.info("request moves", seq=self._seq, to=following.name, how=how, watermark=watermark)

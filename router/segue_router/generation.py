"""One generation, from the client's request to the last byte of its answer, over as many engines as it takes.

Owns the order of things: send, relay, and when an engine fails: close, decide, choose, promote, send on (and
fence, beside it). The decisions are made elsewhere (`resume`, `choose`, `health`). Invariants: what the
client received is a prefix of one valid answer; a client that has left keeps no engine busy; what cannot be
continued ends in one clear error and never in `[DONE]`.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Literal

import msgspec
import structlog
from aiohttp import web

from segue_router.assemble import response_object
from segue_router.choose import affinity_key
from segue_router.chronicle import Chronicle
from segue_router.client import SEQ_HEADER, ClientStream, client_error_answer, request_headers
from segue_router.context import Context
from segue_router.engine import Engine
from segue_router.errors import Cause, ClientError, UpstreamFailure
from segue_router.exchange import Busy, EngineAnswer, Exchange, Rejected
from segue_router.relay import Relay
from segue_router.request import GenerationRequest
from segue_router.resume import ByIds, Finish, Plan, Progress, Refuse, Restart, how_to_resume
from segue_router.takeover import Takeover
from segue_router.transcript import Transcript
from segue_router.upstream import now_ms

log = structlog.get_logger()
FAILOVER_HEADER = "x-segue-failover"
UNCOUNTED: frozenset[Cause] = frozenset({"connect"})
"""Failures before the engine had the request: trying elsewhere is not yet a move of an answer."""


class Generation:
    """See the module."""

    def __init__(self, context: Context, http: web.Request, request: GenerationRequest) -> None:
        self._context = context
        self._http = http
        self._request = request
        self._seq = f"seq-{secrets.token_hex(12)}"
        self._client = ClientStream(http, self._seq)
        limits = context.settings.limits
        self._track: Transcript | Relay = (
            Transcript(request, limits.max_transcript_tokens) if request.mode == "tracked" else Relay(request)
        )
        affinity = context.settings.affinity
        key = affinity_key(request, http.headers.get(affinity.header), affinity.prefix_chars)
        self._takeover = Takeover(context, self._seq, request.model, key)
        self._chronicle = Chronicle(context.stories, context.metrics, self._seq, request.path)
        self._headers = request_headers(http.headers)
        self._headers["Content-Type"] = "application/json"
        self._exchange = Exchange(context, request, self._track, self._client, self._chronicle, self._headers)
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
        """Whether it waits for an answer of `engine`."""
        return self._exchange.attempt in engine.attempts

    async def move_away(self, engine: Engine) -> bool:
        """See `Running`."""
        return False

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
            context.end(self)
            chronicle.is_at(len(self._track.prompt_ids or ()), self._track.delivered_tokens)
            chronicle.close()

    async def _serve(self) -> web.StreamResponse:
        engine = self._takeover.first()
        if engine is None:
            return await self._no_engine()
        params = self._takeover.params(engine, resume=False)
        plan: Restart | ByIds = Restart(self._request.path, self._request.engine_body(params))
        while True:
            try:
                whole = await self._exchange.run(engine, plan)
                return await self._complete() if whole is None else whole
            except UpstreamFailure as failure:
                step = await self._after(engine, failure)
            if isinstance(step, web.StreamResponse):
                return step
            engine, plan = step

    async def _complete(self) -> web.StreamResponse:
        track = self._track
        # Before the last byte: whoever has the answer may ask for its story.
        self._chronicle.is_at(len(track.prompt_ids or ()), track.delivered_tokens)
        self._chronicle.ends("ok")
        if not self._request.stream:
            assert isinstance(track, Transcript)
            body = msgspec.json.encode(response_object(self._request, track))
            return self._client.answer(200, body, {"Content-Type": "application/json"})
        await self._client.write(track.closing())
        return await self._client.end()

    async def _after(
        self, engine: Engine, failure: UpstreamFailure
    ) -> web.StreamResponse | tuple[Engine, Restart | ByIds]:
        """An engine failed: the client's last answer, or the engine to go on at and how."""
        takeover, exchange = self._takeover, self._exchange
        assert exchange.attempt is not None
        self._chronicle.failed(exchange.attempt)
        if exchange.gained:
            self._patience_until_ms = None
        if failure.cause == "router_stopping" or self._context.cutting_off:
            return await self._give_up(503, "the router is shutting down", code="router_stopping")
        if isinstance(failure, Rejected):
            return await self._refuse("rejected", failure)
        self._note_failure(engine, failure)
        progress = self._track.progress
        # Whether it can go on does not hang on where; a length that is still unknown is asked about below.
        plan = how_to_resume(self._request, progress, takeover.target(engine), None)
        if isinstance(plan, Finish):
            return await self._finish_from_known(plan)
        if isinstance(plan, Refuse) and plan.reason != "unknown_model_length":
            return await self._refuse(plan.reason, failure)
        if progress.delivered_ids:
            takeover.began_on(engine)
        busy = isinstance(failure, Busy)
        counted = not busy and failure.cause not in UNCOUNTED
        if problem := self._no_more_moves(counted):
            return await self._give_up(502, f"{problem}: {failure}", code=failure.cause)
        if not busy:
            takeover.next_epoch()
        begun = progress.client_has or counted or self._moves > 0
        following = await takeover.next(progress, patience_ms=self._patience_left() if begun else 0)
        if following is None:
            return await self._nobody(failure, begun=begun)
        self._moves += counted
        plan = await self._plan(following, progress)
        if not busy:
            takeover.fence(engine)
        if isinstance(plan, Refuse):
            return await self._refuse(plan.reason, failure)
        if isinstance(plan, Finish):
            return await self._finish_from_known(plan)
        if not busy:
            self._note_move(engine, following, failure, plan, progress)
        if isinstance(plan, ByIds):
            self._track.next_engine(by_ids=True, given_back=plan.given_back)
        else:
            takeover.starts_again()
            self._track.next_engine(by_ids=False)
        return following, plan

    def _note_failure(self, engine: Engine, failure: UpstreamFailure) -> None:
        """Tell everybody whom it concerns."""
        if isinstance(failure, Busy):
            self._takeover.busy(engine)
            self._busy_answer = failure.answer
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
        give_back = takeover.give_back(following, progress, self._headers)
        if takeover.epoch > 1:  # somebody wrote before it, be it under an engine that has become busy since
            _, count = await asyncio.gather(takeover.promote(following, progress), give_back)
        else:
            count = await give_back
        params = takeover.params(following, resume=takeover.epoch > 1)
        return how_to_resume(self._request, progress, takeover.target(following, give_back=count), params)

    async def _nobody(self, failure: UpstreamFailure, *, begun: bool) -> web.StreamResponse:
        """There is no engine to go on at."""
        if self._context.cutting_off:
            return await self._give_up(503, "the router is shutting down", code="router_stopping")
        if self._busy_answer is not None and not self._client.started:
            raise self._busy_answer
        problem = "no other engine could take over in time" if begun else "no engine can be reached"
        return await self._give_up(502 if begun else 503, f"{problem}: {failure}", code="no_engine_available")

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

    async def _finish_from_known(self, plan: Finish) -> web.StreamResponse:
        """Everything was there but the end: say it without an engine."""
        self._context.metrics.resume("finish")
        data = self._track.finish(plan.finish_reason)
        if data:
            await self._client.write(data)
        return await self._complete()

    async def _refuse(self, reason: str, failure: UpstreamFailure) -> web.StreamResponse:
        self._context.metrics.refusal(reason)
        self._chronicle.ends("refused", reason)
        message = f"the engine failed and this answer cannot be continued exactly ({reason}): {failure}"
        return await self._client.fail(502, message, kind="server_error", code=f"cannot_resume_{reason}")

    async def _give_up(self, status: int, message: str, *, code: str) -> web.StreamResponse:
        self._chronicle.ends("failed", message)
        return await self._client.fail(status, message, kind="server_error", code=code)

    async def _no_engine(self) -> web.StreamResponse:
        registry = self._context.registry
        known = sorted({name for engine in registry.engines for name in engine.model_names()})
        if self._request.model and known and not any(engine.may_serve_more for engine in registry.engines):
            raise ClientError(
                404,
                f"the model {self._request.model!r} is not served here; served: {', '.join(known)}",
                code="model_not_found",
            )
        return await self._give_up(
            503, "no engine that could have it has been reached yet", code="no_engine_available"
        )

    def _note_move(
        self,
        engine: Engine,
        following: Engine,
        failure: UpstreamFailure,
        plan: Restart | ByIds,
        progress: Progress,
    ) -> None:
        how: Literal["restart", "by_ids"] = "by_ids" if isinstance(plan, ByIds) else "restart"
        dropped = plan.dropped_tokens if isinstance(plan, ByIds) else progress.held_tokens
        watermark = self._takeover.watermark
        self._chronicle.moves(engine.name, following.name, failure, how, progress, dropped, watermark)
        log.info("request moves", seq=self._seq, to=following.name, how=how, watermark=watermark)

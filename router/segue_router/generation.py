"""One generation, from the client's request to the last byte of its answer, over as many engines as it takes.

Owns the order of things: send, relay, and when an engine fails: close, fence, decide, choose, promote, send
on. The decisions are made elsewhere (`resume`, `choose`, `health`). Invariants: what the client received is
a prefix of one valid answer; a client that has left keeps no engine busy; what cannot be continued ends in
one clear error and never in `[DONE]`.
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
from segue_router.client import (
    SEQ_HEADER,
    ClientStream,
    answer_headers,
    client_error_answer,
    request_headers,
)
from segue_router.context import Context
from segue_router.engines import Engine
from segue_router.errors import Cause, ClientError, EngineFault, MalformedEvent, UpstreamFailure
from segue_router.relay import Relay
from segue_router.request import GenerationRequest
from segue_router.resume import ByIds, Finish, Progress, Refuse, Restart, Target, how_to_resume
from segue_router.takeover import Takeover
from segue_router.transcript import Transcript
from segue_router.upstream import Attempt, now_ms

log = structlog.get_logger()
FAILOVER_HEADER = "x-segue-failover"
BUSY_STATUS = frozenset({429, 503})
MAX_ERROR_BYTES = 1 << 20
UNCOUNTED: frozenset[Cause] = frozenset({"connect"})
"""Failures before the engine had the request: trying elsewhere is not yet a move of an answer."""


class EngineAnswer(Exception):
    """An engine's own answer for the client: an error that is the client's affair, or the last word."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = headers


class Busy(UpstreamFailure):
    """429 or 503 before the first byte; `answer` is what the engine said."""

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__("http_status", f"the engine answers {answer.status}")
        self.answer = answer


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
        opted_out = http.headers.get(FAILOVER_HEADER, "").lower() in ("off", "0", "false", "no")
        self._may_move = context.settings.failover.enabled and not opted_out
        self._attempt: Attempt | None = None
        self._moves = self._failures = 0
        self._busy_answer: EngineAnswer | None = None
        self._patience_until_ms: float | None = None

    def stop(self) -> None:
        """The router goes: end with an honest error."""
        if self._attempt is not None:
            self._attempt.doom("router_stopping", "the router is shutting down")

    async def run(self) -> web.StreamResponse:
        """Serve the client. Raises CancelledError when it leaves."""
        context, chronicle = self._context, self._chronicle
        context.begin(self)
        try:
            return await self._serve()
        except EngineAnswer as answer:
            chronicle.ends("client_error" if answer.status < 500 else "failed")
            return await self._client.pass_on(answer.status, answer.body, answer.headers)
        except ClientError as error:
            chronicle.ends("client_error", str(error))
            return client_error_answer(error, {SEQ_HEADER: self._seq})
        except asyncio.CancelledError:
            chronicle.ends("client_left")
            raise
        except ConnectionError:
            chronicle.ends("client_left")
            return self._client.response or web.Response(status=499)
        finally:
            if self._attempt is not None:
                self._attempt.close()
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
                return await self._try(engine, plan)
            except UpstreamFailure as failure:
                step = await self._after(engine, failure)
            if isinstance(step, web.StreamResponse):
                return step
            engine, plan = step

    async def _try(self, engine: Engine, plan: Restart | ByIds) -> web.StreamResponse:
        """Let `engine` go on by `plan`, to the end. Raises UpstreamFailure, EngineAnswer."""
        limits, timeouts = self._context.settings.limits, self._context.settings.timeouts
        whole = self._request.mode == "whole"
        attempt = Attempt(engine.name, max_event_bytes=limits.max_event_bytes, whole=whole)
        self._attempt = attempt
        engine.attempts.add(attempt)
        try:
            body = msgspec.json.encode(plan.body)
            self._chronicle.sent(engine.name)
            response = await attempt.open(
                self._context.data,
                "POST",
                engine.url + plan.path,
                body=body,
                headers=self._headers,
                connect_ms=timeouts.connect_ms,
            )
            if response.status != 200:
                await self._not_ok(attempt, response.status, answer_headers(response.headers), plan)
            if whole:
                raw = await attempt.read_all(limits.max_body_bytes)
                self._chronicle.gained()
                self._chronicle.ends("ok")
                return self._client.answer(200, raw, answer_headers(response.headers))
            if response.content_type != "text/event-stream":
                raise UpstreamFailure("malformed_event", f"a stream of type {response.content_type}")
            await self._pump(engine, attempt)
            return await self._complete()
        finally:
            attempt.close()
            engine.attempts.discard(attempt)

    async def _not_ok(
        self, attempt: Attempt, status: int, headers: dict[str, str], plan: Restart | ByIds
    ) -> None:
        raw = await attempt.read_all(MAX_ERROR_BYTES)
        answer = EngineAnswer(status, raw, headers)
        if status in BUSY_STATUS:
            raise Busy(answer)
        if status < 500 and isinstance(plan, Restart) and not self._client.started:
            raise answer
        detail = f"the engine answers {status}: {raw[:300].decode(errors='replace')}"
        raise UpstreamFailure("http_status", detail)

    async def _pump(self, engine: Engine, attempt: Attempt) -> None:
        """Relay events until `[DONE]`. What is good before a failure reaches the client first."""
        track = self._track
        while not track.done:
            payloads = await attempt.read()
            out: list[bytes] = []
            failure: UpstreamFailure | None = None
            before = track.delivered_tokens
            for payload in payloads:
                try:
                    out.append(track.absorb(payload))
                except MalformedEvent as error:
                    failure = UpstreamFailure("malformed_event", str(error))
                except EngineFault as fault:
                    failure = self._fault(fault)
                if failure is not None or track.done:
                    break
            data = b"".join(out)
            if payloads and failure is None:
                attempt.streaming = True
                engine.progressed()
            if data or track.delivered_tokens > before:
                self._chronicle.gained()
                self._patience_until_ms = None
            if data:
                await self._client.write(data)
            if failure is not None:
                raise failure
        if track.finish_reason is None:
            raise UpstreamFailure("stream_eof", "[DONE] without a finish_reason")

    def _fault(self, fault: EngineFault) -> UpstreamFailure:
        """The failure that an in-band error is, or EngineAnswer raised where it is the client's affair."""
        if 400 <= fault.code < 500 and fault.code != 429 and not self._track.progress.client_has:
            raise EngineAnswer(
                fault.code, msgspec.json.encode(fault.body), {"Content-Type": "application/json"}
            )
        return UpstreamFailure("error_event", str(fault))

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
        context, takeover = self._context, self._takeover
        assert self._attempt is not None
        self._chronicle.failed(self._attempt)
        if failure.cause == "router_stopping" or context.stopping:
            return await self._give_up(503, "the router is shutting down", code="router_stopping")
        busy = isinstance(failure, Busy)
        if isinstance(failure, Busy):
            takeover.busy(engine)
            self._busy_answer = failure.answer
        else:
            self._failures += 1
            context.registry.failed(engine, failure)
            takeover.failed(engine, failure)
            context.metrics.failover(failure.cause)
            log.warning(
                "engine failed", seq=self._seq, engine=engine.name, cause=failure.cause, reason=str(failure)
            )
        progress = self._track.progress
        # Whether it can go on does not hang on where; a length that is still unknown is asked about below.
        target = Target(engine.max_model_len(self._request.model))
        plan = how_to_resume(self._request, progress, target, None)
        if isinstance(plan, Finish):
            return await self._finish_from_known(plan)
        if isinstance(plan, Refuse) and plan.reason != "unknown_model_length":
            return await self._refuse(plan.reason, failure)
        counted = not busy and failure.cause not in UNCOUNTED
        if problem := self._no_more_moves(counted):
            return await self._give_up(502, f"{problem}: {failure}", code=failure.cause)
        if not busy:
            takeover.next_epoch()
        begun = progress.client_has or (not busy and failure.cause not in UNCOUNTED)
        following = await takeover.next(progress, patience_ms=self._patience_left() if begun else 0)
        if following is None:
            if context.stopping:
                return await self._give_up(503, "the router is shutting down", code="router_stopping")
            if self._busy_answer is not None and not self._client.started:
                raise self._busy_answer
            problem = "no other engine could take over in time" if begun else "no engine can be reached"
            return await self._give_up(
                502 if begun else 503, f"{problem}: {failure}", code="no_engine_available"
            )
        self._moves += counted
        if not busy:
            await takeover.promote(following, progress)
            takeover.fence(engine)
        params = takeover.params(following, resume=takeover.epoch > 1)
        target = Target(following.max_model_len(self._request.model))
        plan = how_to_resume(self._request, progress, target, params)
        if isinstance(plan, Refuse):
            return await self._refuse(plan.reason, failure)
        if isinstance(plan, Finish):
            return await self._finish_from_known(plan)
        if not busy:
            self._note_move(engine, following, failure, plan, progress)
        self._track.next_engine(by_ids=isinstance(plan, ByIds))
        return following, plan

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
        if self._request.model and known:
            raise ClientError(
                404,
                f"the model {self._request.model!r} is not served here; served: {', '.join(known)}",
                code="model_not_found",
            )
        return await self._give_up(503, "no engine has been reached yet", code="no_engine_available")

    def _note_move(
        self,
        engine: Engine,
        following: Engine,
        failure: UpstreamFailure,
        plan: Restart | ByIds,
        progress: Progress,
    ) -> None:
        how: Literal["restart", "by_ids"] = "by_ids" if isinstance(plan, ByIds) else "restart"
        watermark = self._takeover.watermark
        self._chronicle.moves(engine.name, following.name, failure, how, progress, watermark)
        log.info("request moves", seq=self._seq, to=following.name, how=how, watermark=watermark)

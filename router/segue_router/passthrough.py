"""Everything that is no generation the router knows: one engine's answer, passed on as it comes.

Owns no failover beyond trying another engine when nothing listens at the first. A stream that breaks is
never ended as if it were complete.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web
from yarl import URL

from segue_router.choose import Candidate, rank_new
from segue_router.client import answer_headers, request_headers
from segue_router.context import Context
from segue_router.engine import Engine
from segue_router.errors import ClientError, UpstreamFailure, error_body
from segue_router.upstream import Attempt


class Passthrough:
    """One such request. What it brings says nothing of the engine's generations: a hung one serves some."""

    def __init__(self, context: Context, http: web.Request, body: bytes) -> None:
        self._context = context
        self._http = http
        self._body = body
        self._attempt: Attempt | None = None

    def stop(self) -> None:
        """The router goes: cut it off."""
        if self._attempt is not None:
            self._attempt.doom("router_stopping", "the router is shutting down")

    def is_on(self, engine: Engine) -> bool:
        """Whether it waits for an answer of `engine`."""
        return self._attempt in engine.attempts

    async def move_away(self, engine: Engine) -> bool:
        """Nobody can go on with what was never read."""
        return False

    async def run(self) -> web.StreamResponse:
        """Serve it. Raises ClientError."""
        context = self._context
        context.begin(self)
        try:
            response = await self._serve()
        except asyncio.CancelledError:
            context.metrics.request("other", "client_left")
            raise
        finally:
            context.end(self)
        outcome = "ok" if response.status < 400 else "client_error" if response.status < 500 else "failed"
        context.metrics.request("other", outcome)
        return response

    async def _serve(self) -> web.StreamResponse:
        tried: set[str] = set()
        failure: UpstreamFailure | None = None
        model = _model_in(self._body)
        while (engine := self._choose(model, tried)) is not None:
            tried.add(engine.name)
            limits = self._context.settings.limits
            self._attempt = Attempt(max_event_bytes=limits.max_event_bytes, whole=True)
            engine.attempts.add(self._attempt)
            try:
                return await self._pass(engine, self._attempt)
            except UpstreamFailure as error:
                failure = error
                self._context.registry.failed(engine, error)
                if error.cause != "connect":
                    break
            finally:
                self._attempt.close()
                engine.attempts.discard(self._attempt)
        if failure is None:
            raise ClientError(
                503, "no engine can serve this", code="no_engine_available", kind="server_error"
            )
        status = 503 if failure.cause == "connect" else 502
        raise ClientError(status, f"the engine failed: {failure}", code=failure.cause, kind="server_error")

    def _choose(self, model: str, tried: set[str]) -> Engine | None:
        registry = self._context.registry
        engines = registry.serving(model) or registry.engines
        candidates = [
            Candidate(engine.name, engine.health.state, len(engine.attempts))
            for engine in engines
            if engine.name not in tried
        ]
        session = self._http.headers.get(self._context.settings.affinity.header, "")
        ranked = rank_new(candidates, session)
        return registry[ranked[0]] if ranked else None

    async def _pass(self, engine: Engine, attempt: Attempt) -> web.StreamResponse:
        upstream = await attempt.open(
            self._context.data,
            self._http.method,
            # Not raw_path: a client may write its target with scheme and host (RFC 9112, absolute-form).
            URL(engine.url + self._http.rel_url.raw_path_qs, encoded=True),
            body=self._body,
            headers=request_headers(self._http.headers),
            connect_ms=self._context.settings.timeouts.connect_ms,
        )
        response = web.StreamResponse(status=upstream.status, headers=answer_headers(upstream.headers))
        if upstream.content_length is not None and self._http.method != "HEAD":
            response.content_length = upstream.content_length
        await response.prepare(self._http)
        try:
            while chunk := await attempt.read_bytes():
                await response.write(chunk)
        except UpstreamFailure as failure:
            self._context.registry.failed(engine, failure)
            await self._cut(response, upstream.content_type, failure)
            return response
        await response.write_eof()
        return response

    async def _cut(self, response: web.StreamResponse, kind: str, failure: UpstreamFailure) -> None:
        """The answer broke: say so in a stream of events, and close without ending it properly."""
        if kind == "text/event-stream":
            error = error_body(f"the engine failed: {failure}", kind="server_error", code=failure.cause)
            await response.write(b"event: error\ndata: " + error + b"\n\n")
            await response.write_eof()
        elif self._http.transport is not None:
            self._http.transport.close()


def _model_in(body: bytes) -> str:
    """The model that a JSON body names; empty if there is none."""
    if body.lstrip()[:1] != b"{":
        return ""
    try:
        model = msgspec.json.decode(body).get("model")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return model if isinstance(model, str) else ""

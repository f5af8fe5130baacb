"""Everything that is no generation the router knows: one engine's answer, passed on as it comes.

Owns no failover beyond trying another engine when nothing listens at the first. A stream that breaks is
never ended as if it were complete.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from yarl import URL

from segue_router.choose import Candidate, rank_new
from segue_router.client import answer_headers, read_body, request_headers
from segue_router.context import Context
from segue_router.engines import Engine
from segue_router.errors import ClientError, UpstreamFailure, error_body
from segue_router.upstream import Attempt


class Passthrough:
    """One such request."""

    def __init__(self, context: Context, http: web.Request) -> None:
        self._context = context
        self._http = http
        self._attempt: Attempt | None = None

    def stop(self) -> None:
        """The router goes: cut it off."""
        if self._attempt is not None:
            self._attempt.doom("router_stopping", "the router is shutting down")

    async def run(self) -> web.StreamResponse:
        """Serve it. Raises ClientError."""
        context = self._context
        body = await read_body(self._http, context.settings.limits.max_body_bytes)
        context.begin(self)
        outcome = "failed"
        try:
            response = await self._serve(body)
            outcome = "ok" if response.status < 400 else "client_error" if response.status < 500 else "failed"
            return response
        finally:
            context.end(self)
            context.metrics.request("other", outcome)

    async def _serve(self, body: bytes) -> web.StreamResponse:
        tried: set[str] = set()
        failure: UpstreamFailure | None = None
        while (engine := self._choose(body, tried)) is not None:
            tried.add(engine.name)
            limits = self._context.settings.limits
            self._attempt = Attempt(engine.name, max_event_bytes=limits.max_event_bytes, whole=True)
            engine.attempts.add(self._attempt)
            try:
                return await self._pass(engine, self._attempt, body)
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

    def _choose(self, body: bytes, tried: set[str]) -> Engine | None:
        registry = self._context.registry
        engines = registry.serving(_model_in(body)) or registry.engines
        candidates = [
            Candidate(engine.name, engine.health.state, len(engine.attempts))
            for engine in engines
            if engine.name not in tried
        ]
        session = self._http.headers.get(self._context.settings.affinity.header, "")
        ranked = rank_new(candidates, session)
        return registry[ranked[0]] if ranked else None

    async def _pass(self, engine: Engine, attempt: Attempt, body: bytes) -> web.StreamResponse:
        upstream = await attempt.open(
            self._context.data,
            self._http.method,
            URL(engine.url + self._http.raw_path, encoded=True),
            body=body,
            headers=request_headers(self._http.headers),
            connect_ms=self._context.settings.timeouts.connect_ms,
        )
        response = web.StreamResponse(status=upstream.status, headers=answer_headers(upstream.headers))
        if upstream.content_length is not None and self._http.method != "HEAD":
            response.content_length = upstream.content_length
        await response.prepare(self._http)
        try:
            while chunk := await attempt.read_bytes():
                engine.progressed()
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
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return model if isinstance(model, str) else ""

"""Everything that is no generation the router knows: one engine's answer, passed on as it comes.

Owns no failover beyond trying another engine when nothing listens at the first, or it is busy. A stream that
breaks is never ended as if it were complete: its own API's error comes last.
"""

from __future__ import annotations

import asyncio
import json

import msgspec
from aiohttp import web
from yarl import URL

from segue_core.messages.request import PARAMS_KEY
from segue_router.choose import Candidate, rank_new
from segue_router.client import answer_headers, request_headers
from segue_router.context import Context
from segue_router.engine import Engine
from segue_router.errors import ClientError, UpstreamFailure
from segue_router.exchange import BUSY_STATUS
from segue_router.foreign import PassedStream, api_of
from segue_router.upstream import Attempt


class _Busy(Exception):
    """429 or 503, and there is another engine to ask."""


class Passthrough:
    """One such request. What it brings says nothing of the engine's generations: a hung one serves some."""

    def __init__(self, context: Context, http: web.Request, body: bytes) -> None:
        self._context = context
        self._http = http
        self._model, self._body = read_head(body)
        self._attempt: Attempt | None = None
        self._response: web.StreamResponse | None = None

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
        except ConnectionError:  # while something was written to it; engines' failures have their own type
            context.metrics.request("other", "client_left")
            return self._response or web.Response(status=499)
        finally:
            context.end(self)
        outcome = "ok" if response.status < 400 else "client_error" if response.status < 500 else "failed"
        context.metrics.request("other", outcome)
        return response

    async def _serve(self) -> web.StreamResponse:
        tried: set[str] = set()
        failure: UpstreamFailure | None = None
        self._context.registry.check_open(self._model)
        while (engine := self._choose(tried)) is not None:
            tried.add(engine.name)
            limits = self._context.settings.limits
            self._attempt = Attempt(max_event_bytes=limits.max_event_bytes, whole=True)
            engine.attempts.add(self._attempt)
            try:
                return await self._pass(engine, self._attempt, last=self._choose(tried) is None)
            except _Busy:
                continue
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

    def _choose(self, tried: set[str]) -> Engine | None:
        registry = self._context.registry
        engines = registry.serving(self._model) or registry.open
        candidates = [
            Candidate(engine.name, engine.health.state, len(engine.attempts))
            for engine in engines
            if engine.name not in tried
        ]
        session = self._http.headers.get(self._context.settings.affinity.header, "")
        ranked = rank_new(candidates, session)
        return registry[ranked[0]] if ranked else None

    async def _pass(self, engine: Engine, attempt: Attempt, *, last: bool) -> web.StreamResponse:
        upstream = await attempt.open(
            self._context.data,
            self._http.method,
            # Not raw_path: a client may write its target with scheme and host (RFC 9112, absolute-form).
            URL(engine.url + self._http.rel_url.raw_path_qs, encoded=True),
            body=self._body,
            headers=request_headers(self._http.headers),
            connect_ms=self._context.settings.timeouts.connect_ms,
        )
        if upstream.status in BUSY_STATUS and not last:
            raise _Busy
        response = web.StreamResponse(status=upstream.status, headers=answer_headers(upstream.headers))
        self._response = response
        has_body = self._http.method != "HEAD"
        streams = has_body and upstream.status == 200 and upstream.content_type == "text/event-stream"
        if upstream.content_length is not None and has_body and not streams:
            response.content_length = upstream.content_length
        await response.prepare(self._http)
        if streams:
            await self._pass_events(engine, attempt, response)
            return response
        try:
            while chunk := await attempt.read_bytes():
                await response.write(chunk)
        except UpstreamFailure as failure:
            self._context.registry.failed(engine, failure)
            if self._http.transport is not None:
                self._http.transport.close()  # without the proper end: nobody takes it for complete
            return response
        await response.write_eof()
        return response

    async def _pass_events(self, engine: Engine, attempt: Attempt, response: web.StreamResponse) -> None:
        """Pass a stream on, event by event; if it ends too early, say so in the form of its API."""
        limits = self._context.settings.limits
        stream = PassedStream(api_of(self._http.path), limits.max_event_bytes)
        try:
            while chunk := await attempt.read_bytes():
                if whole := stream.take(chunk):
                    await response.write(whole)
            if stream.truncated:
                raise UpstreamFailure("stream_eof", "the stream ended before the answer did")
            if rest := stream.rest():
                await response.write(rest)
        except UpstreamFailure as failure:
            self._context.registry.failed(engine, failure)
            if not stream.ended:
                said = str(failure) if failure.cause == "router_stopping" else f"the engine failed: {failure}"
                await response.write(stream.error(said, failure.cause))
        await response.write_eof()


def read_head(body: bytes) -> tuple[str, bytes]:
    """The model that a JSON body names (empty: none), and the body for an engine.

    What a client says under Segue's own key is not passed on: it could name somebody else's sequence. All
    else stays byte for byte. Raises ClientError if that key stands where only an engine would read it.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(fields.get("model", b"null"))
        own = msgspec.json.decode(fields.get("kv_transfer_params", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        _refuse_disguise(body)
        return "", body
    if isinstance(own, dict) and PARAMS_KEY in own:
        del own[PARAMS_KEY]
        fields["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(own))
        body = msgspec.json.encode(fields)
    return model if isinstance(model, str) else "", body


def _refuse_disguise(body: bytes) -> None:
    """Engines' JSON is that of Python, which knows NaN, other encodings and a byte order mark."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    own = fields.get("kv_transfer_params") if isinstance(fields, dict) else None
    if isinstance(own, dict) and PARAMS_KEY in own:
        message = (
            f"kv_transfer_params.{PARAMS_KEY} is not for clients, and the body is not plain JSON in UTF-8"
        )
        raise ClientError(400, message, code="invalid_body")

"""The client's side of a request: what is read from it and how an answer, or an error, is written.

Invariant: a stream that broke never ends with `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from aiohttp import web

from segue_router.errors import ClientError, error_body
from segue_router.sse import event

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
        "expect",
        "x-segue-failover",
        "x-segue-replication",
    }
)
"""Request headers that are not the engine's business."""
ANSWER_HEADERS = frozenset({"content-type", "retry-after", "www-authenticate", "x-request-id", "allow"})
"""Headers of an engine's answer that are passed on."""
SEQ_HEADER = "x-segue-seq"
WAITING_S = 5.0
"""How often a client that has part of its answer is told that the rest is waited for: whoever is in between
would take a long silence for the end."""
WAITING = b": waiting\n\n"
"""A comment: clients of event streams pass over it."""
T = TypeVar("T")


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers for an engine."""
    kept = {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
    kept["Accept-Encoding"] = "identity"
    return kept


def answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """An engine's headers for the client."""
    return {name: value for name, value in headers.items() if name.lower() in ANSWER_HEADERS}


async def read_body(http: web.Request, limit: int, timeout_ms: int) -> bytes:
    """The request's body. Raises ClientError: 413 beyond `limit` bytes, 408 if it takes too long."""
    if (http.content_length or 0) > limit:
        raise ClientError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            async for chunk in http.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise ClientError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    except TimeoutError as error:
        raise ClientError(
            408, f"the body took longer than {timeout_ms} ms", code="request_timeout"
        ) from error
    except web.RequestPayloadError as error:
        raise ClientError(400, f"the body cannot be read: {error}", code="invalid_body") from error
    return bytes(body)


def error_answer(
    status: int,
    message: str,
    *,
    kind: str,
    code: str | int | None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error as clients of the OpenAI API expect it."""
    return web.Response(
        status=status,
        body=error_body(message, kind=kind, code=code),
        content_type="application/json",
        headers=headers,
    )


def client_error_answer(error: ClientError, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer to a request that cannot be served as it is."""
    return error_answer(error.status, str(error), kind=error.kind, code=error.code, headers=headers)


class ClientStream:
    """An answer to one client. Until the first `write`, an HTTP status can still tell of a problem."""

    def __init__(self, http: web.Request, seq: str) -> None:
        self._http = http
        self._seq = seq
        self.response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        return self.response is not None

    async def write(self, data: bytes) -> None:
        """Send; waits while the client is slow. Raises ConnectionError when the client has left."""
        if self.response is None:
            self.response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no",
                    SEQ_HEADER: self._seq,
                }
            )
            await self.response.prepare(self._http)
        await self.response.write(data)

    async def while_waiting(self, wait: Coroutine[Any, Any, T]) -> T:
        """The result of `wait`. Meanwhile a stream that has begun gets a comment now and then; before that
        nothing, so that an HTTP status can still tell how it ends. Raises as `write` and `wait` do."""
        task = asyncio.create_task(wait)
        try:
            while not (await asyncio.wait({task}, timeout=WAITING_S))[0]:
                if self.started:
                    await self.write(WAITING)
            return task.result()
        finally:
            task.cancel()

    async def end(self) -> web.StreamResponse:
        """Nothing more comes."""
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def fail(self, status: int, message: str, *, kind: str, code: str | int) -> web.StreamResponse:
        """One clear error: in-band if the stream has begun, else as an HTTP status."""
        if self.response is None:
            return error_answer(status, message, kind=kind, code=code, headers={SEQ_HEADER: self._seq})
        await self.write(event(error_body(message, kind=kind, code=code)))
        return await self.end()

    async def pass_on(self, status: int, body: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
        """An engine's own error: in-band if the stream has begun."""
        if self.response is None:
            return self.answer(status, body, headers)
        await self.write(event(body.replace(b"\n", b" ")))
        return await self.end()

    def answer(self, status: int, body: Any, headers: Mapping[str, str]) -> web.Response:
        """A whole answer at once."""
        return web.Response(status=status, body=body, headers={**headers, SEQ_HEADER: self._seq})

"""The engine of `bench router` as an HTTP server: as little code as speaks HTTP/1.1 to a proxy.

It answers `/health` and `/v1/models`, and hands each streamed chat to the run that is going on.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from segue_ctl.bench_router_load import CHAT_PATH, MODEL, ChatRequest, Events, Run
from segue_ctl.free_ports import LOOPBACK

_MODELS = msgspec.json.encode(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 1 << 20}]}
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Engine:
    """Listens on `port`; `run` gets the streams."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.run: Run | None = None
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Engine:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), LOOPBACK, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()


class _Connection(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is none by type

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (field.partition(":") for field in fields)}
        if len(body) >= int(headers.get("content-length", 0)):
            self._received = b""
            self._answer(line.split(" ")[1], body)

    def _answer(self, path: str, body: bytes) -> None:
        assert self._transport is not None
        if path == "/health":
            self._say(200, b"")
        elif path == "/v1/models":
            self._say(200, _MODELS)
        elif path == CHAT_PATH and self._engine.run is not None:
            request = msgspec.json.decode(body, type=ChatRequest)
            stream = int(request.user)
            self._transport.write(_STREAM_HEAD)
            self._engine.run.opened(stream, Events(stream, request), self._transport.write)
        else:
            self._say(404, b"")

    def _say(self, status: int, body: bytes) -> None:
        assert self._transport is not None
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

"""A proxy before each engine that breaks answers on purpose, at an exact event and in a chosen way.

One `Breaker` arms any number of proxies: the first generation that reaches any of them meets its first cut,
the next one the second, and so on; then answers pass whole. So a test need not know which engine is asked.
The proxy whose answer was cut counts as dead: it breaks new generations until another answer is cut. Cuts
are counted in events and tokens, never in time, and what passed before a cut has been read by the other side
before the connection breaks: nothing good is lost on the way. All that was asked and passed is recorded.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web

from support.waiting import eventually

GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LOOPBACK = "127.0.0.1"
READ_WITHIN_S = 10.0
MAX_BODY_BYTES = 64 << 20

After = Literal["request", "headers", "role", "tokens", "before_finish", "finish", "usage", "events"]
"""request: no byte is answered. headers: the status only. role: one event. tokens, events: so many, but not
the finish. before_finish: all but the event that finishes the last choice; finish: that too. usage: all but
`[DONE]`."""
How = Literal["reset", "eof", "error", "malformed", "silence"]
"""reset: RST. eof: a proper end of the body. error: an error event, then `[DONE]`. malformed: an event that
is not JSON, then the same. silence: nothing more comes, the connection stays open."""


@dataclass(frozen=True)
class Cut:
    """Break an answer `after` so much of it."""

    after: After
    count: int = 0
    how: How = "reset"


@dataclass
class Asked:
    """A generation that reached an engine, and the events of its answer that were passed on."""

    engine: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    events: list[bytes] = field(default_factory=list)
    cut: bool = False
    refused: bool = False


class Breaker:
    """What the proxies share. `whole_engine`: with the generations of a dead one everything else breaks."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.dead = ""
        self.whole_engine = False
        self._cuts: list[Cut] = []

    def arm(self, *cuts: Cut, whole_engine: bool = False) -> None:
        """Forget what was; the next answers meet these cuts."""
        self.asked, self.dead, self._cuts = [], "", list(cuts)
        self.whole_engine = whole_engine

    @property
    def served(self) -> list[Asked]:
        """The generations that an engine got to see."""
        return [asked for asked in self.asked if not asked.refused]

    def next_cut(self) -> Cut | None:
        """The cut for a generation that arrives now."""
        return self._cuts.pop(0) if self._cuts else None


class CutProxy:
    """Before the engine `name`. Give it `target`, the engine's URL, before anyone asks."""

    def __init__(self, name: str, breaker: Breaker, target: str = "") -> None:
        self.name = name
        self.target = target
        self.url = ""
        self._breaker = breaker
        self._session: aiohttp.ClientSession | None = None
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> CutProxy:
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        dead = self._breaker.dead == self.name
        if request.method != "POST" or request.path not in GENERATIONS:
            if dead and self._breaker.whole_engine:
                return _reset(request)
            return await self._pass(request)
        body = await request.json()
        asked = Asked(self.name, request.path, body, dict(request.headers), refused=dead)
        self._breaker.asked.append(asked)
        if dead:
            return _reset(request)
        cut = self._breaker.next_cut()
        if cut is not None and cut.after == "request":
            return await self._break(request, None, asked, cut)
        return await self._generation(request, asked, cut)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """Anything but a generation: as it is."""
        assert self._session is not None
        async with self._session.request(
            request.method,
            self.target + request.raw_path,
            data=await request.read() or None,
            headers=_end_to_end(request.headers),
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), headers=_end_to_end(answer.headers)
            )

    async def _generation(self, request: web.Request, asked: Asked, cut: Cut | None) -> web.StreamResponse:
        assert self._session is not None
        async with self._session.post(
            self.target + request.raw_path, data=await request.read(), headers=_end_to_end(request.headers)
        ) as answer:
            if answer.content_type != "text/event-stream":
                body = await answer.read()
                if cut is not None and answer.status == 200:
                    return await self._break(request, None, asked, cut)
                asked.events.append(body)
                return web.Response(status=answer.status, body=body, headers=_end_to_end(answer.headers))
            response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
            await response.prepare(request)
            meter = None if cut is None else Meter(cut, choices=asked.body.get("n") or 1)
            pending = b""
            if meter is None or not meter.full:
                async for chunk in answer.content.iter_any():
                    *events, pending = (pending + chunk).split(b"\n\n")
                    for event in events:
                        if meter is not None and not meter.lets_pass(event):
                            break
                        asked.events.append(event)
                        await response.write(event + b"\n\n")
                    if meter is not None and meter.full:
                        break
            if cut is None:
                await response.write(pending)
                await response.write_eof()
                return response
        return await self._break(request, response, asked, cut)

    async def _break(
        self, request: web.Request, response: web.StreamResponse | None, asked: Asked, cut: Cut
    ) -> web.StreamResponse:
        """The cut itself. The engine's own connection is closed by now: it aborts."""
        asked.cut = True
        self._breaker.dead = self.name
        await _until_read(request)
        if cut.how == "silence":
            await asyncio.Event().wait()  # until the other side gives up and this handler is cancelled
        if response is None or cut.how == "reset":
            return _reset(request)
        if cut.how == "error":
            await response.write(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n')
        elif cut.how == "malformed":
            await response.write(b'data: {"id": "cmpl-1", "choi\n\n')
        if cut.how != "eof":
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class Meter:
    """Counts what passed of one answer. `full`: its cut is reached. Pure."""

    def __init__(self, cut: Cut, *, choices: int = 1) -> None:
        self._cut = cut
        self._unfinished = choices
        self._events = self._tokens = 0
        self.full = cut.after == "headers"

    def lets_pass(self, event: bytes) -> bool:
        """Whether this event comes before the cut; not once one has not."""
        after, count = self._cut.after, self._cut.count
        tokens, finishes, last = _look(event)
        self._unfinished -= finishes
        if last or (after in ("tokens", "events", "before_finish", "role") and self._unfinished <= 0):
            self.full = True
        if self.full:
            return False
        self._events += 1
        self._tokens += tokens
        self.full = (
            (after == "role")
            or (after == "events" and self._events >= count)
            or (after == "tokens" and self._tokens >= count)
            or (after == "finish" and self._unfinished <= 0)
        )
        return True


def _look(event: bytes) -> tuple[int, int, bool]:
    """Tokens in an event (one for output without ids), choices that it finishes, whether it is `[DONE]`."""
    data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    if data == b"[DONE]":
        return 0, 0, True
    try:
        choices = json.loads(data).get("choices") or []
    except (ValueError, AttributeError):
        return 0, 0, False
    tokens = 0
    for choice in choices:
        ids, delta = choice.get("token_ids"), choice.get("delta") or choice
        output = any(delta.get(key) for key in ("text", "content", "reasoning", "tool_calls"))
        tokens += len(ids) if ids is not None else int(bool(output))
    return tokens, sum(bool(choice.get("finish_reason")) for choice in choices), False


HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "trailer", "upgrade"}
)


def _end_to_end(headers: Any) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in HOP_BY_HOP}


def _reset(request: web.Request) -> web.Response:
    """Break the connection with RST. What is returned reaches nobody."""
    if request.transport is not None:
        connection: socket.socket = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response(status=502)


async def _until_read(request: web.Request) -> None:
    """Wait until the process at the other end has read all that was sent."""
    transport = request.transport
    if transport is None:
        return
    here, there = transport.get_extra_info("sockname")[1], transport.get_extra_info("peername")[1]
    await eventually(
        lambda: not (transport.get_write_buffer_size() or _unread(here, there)),
        "all is read",
        timeout_s=READ_WITHIN_S,
    )


def _unread(here: int, there: int) -> int:
    """Bytes between two sockets of this machine that were sent or received, but not read."""
    left = 0
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        ports = int(local.split(":")[1], 16), int(remote.split(":")[1], 16)
        sent, received = (int(part, 16) for part in queues.split(":"))
        if ports == (here, there):
            left += sent
        elif ports == (there, here):
            left += received
    return left


def data_of(events: Sequence[bytes]) -> list[Any]:
    """The JSON of recorded events, `[DONE]` left out."""
    parts = [event.removeprefix(b"data:").strip() for event in events]
    return [json.loads(part) for part in parts if part and part != b"[DONE]"]

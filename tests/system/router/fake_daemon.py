"""A daemon that answers the HTTP contract; the test sets what it holds and what it says of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from segue_core.messages.status import EngineStatus, Promoted, PromoteRequest, SequenceStatus


class FakeDaemon:
    """Serve on a free port. `say` changes the engine's status at once for all watchers.

    `says_of`: what it tells of a sequence; None: a replica of `watermark` tokens, if that is not 0.
    `hangs`: it says nothing more to whoever watches. `promotes`: while that is not set, promotions wait.
    """

    def __init__(self) -> None:
        self.status = EngineStatus("e", "running", incarnation=1, fingerprint="fp")
        self.watermark = 0
        self.hangs = False
        self.says_of: Callable[[str], SequenceStatus] | None = None
        self.epochs: dict[str, int] = {}
        self.promotes = asyncio.Event()
        self.promotes.set()
        self.promoted: list[tuple[str, PromoteRequest]] = []
        self.fenced: list[tuple[str, int]] = []
        self.asked: list[str] = []
        self.watched = asyncio.Event()
        self._changed = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, **changes: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self) -> FakeDaemon:
        app = web.Application()
        app.router.add_get("/v1/watch", self._watch)
        app.router.add_get("/v1/sequences/{seq}", self._sequence)
        app.router.add_post("/v1/sequences/{seq}/promote", self._promote)
        app.router.add_post("/v1/sequences/{seq}/fence", self._fence)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _watch(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        while True:
            changed = self._changed
            if not self.hangs:
                await response.write(msgspec.json.encode(self.status) + b"\n")
            self.watched.set()
            try:
                async with asyncio.timeout(0.2):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _sequence(self, http: web.Request) -> web.Response:
        self.asked.append(http.match_info["seq"])
        if self.says_of is not None:
            said = msgspec.json.encode(self.says_of(http.match_info["seq"]))
            return web.Response(body=said, content_type="application/json")
        if not self.watermark:
            return web.json_response({"error": "unknown"}, status=404)
        seq, held = http.match_info["seq"], self.watermark
        status = SequenceStatus(seq, "replica", self.epochs.get(seq, 1), held, held, held, held * 100)
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    async def _promote(self, http: web.Request) -> web.Response:
        seq = http.match_info["seq"]
        request = msgspec.json.decode(await http.read(), type=PromoteRequest)
        self.promoted.append((seq, request))
        await self.promotes.wait()
        if self.epochs.get(seq, 0) >= request.epoch:
            return web.json_response({"error": "superseded"}, status=409)
        self.epochs[seq] = request.epoch
        answer = Promoted(seq, request.epoch, self.watermark)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _fence(self, http: web.Request) -> web.Response:
        self.fenced.append((http.match_info["seq"], (await http.json())["epoch"]))
        return web.json_response({})

"""The daemon's HTTP endpoint: health, status, metrics, and what the router asks during a failover.

`/livez` and `/readyz`: the code is the answer; they need no token. Bad requests get a 4xx that says what was
expected.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from segue_core.messages.request import MAX_SEQ_CHARS
from segue_core.messages.status import FenceRequest, Promoted, PromoteRequest
from segue_core.security import Tokens
from segue_core.service import error_response, guarded, json_response
from segue_daemon.app import Daemon
from segue_daemon.metrics import registry_of

MAX_BODY_BYTES = 64 << 10
MAX_WAIT_MS = 10_000
WATCH_HEARTBEAT_S = 0.2


def build_api(daemon: Daemon, tokens: Tokens) -> web.Application:
    """The aiohttp application for one daemon. With `tokens` all but the two health checks needs one."""
    api = Api(daemon)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/livez", api.livez),
            web.get("/readyz", api.readyz),
            web.get("/status", guarded(api.status, tokens)),
            web.get("/metrics", guarded(api.metrics, tokens)),
            web.get("/v1/watch", guarded(api.watch, tokens)),
            web.get("/v1/sequences/{seq}", guarded(api.sequence, tokens)),
            web.post("/v1/sequences/{seq}/promote", guarded(api.promote, tokens)),
            web.post("/v1/sequences/{seq}/fence", guarded(api.fence, tokens)),
        ]
    )
    return app


class Api:
    """Handlers; each is a thin step from HTTP to one method of the daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._registry = registry_of(daemon)

    async def livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        state = self._daemon.engine_status().state
        ready = self._daemon.ready and state == "running"
        return web.Response(text=f"engine {state}\n", status=200 if ready else 503)

    async def status(self, _: web.Request) -> web.Response:
        return json_response(self._daemon.status())

    async def metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """One line of JSON (EngineStatus) at once, at every change of state, and as heartbeat."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            while self._daemon.ready:
                await response.write(msgspec.json.encode(self._daemon.engine_status()) + b"\n")
                await self._daemon.engine_changed(WATCH_HEARTBEAT_S)
        except ConnectionError:
            pass
        return response

    async def sequence(self, request: web.Request) -> web.Response:
        seq = request.match_info["seq"]
        found = self._daemon.sequence_status(seq)
        if found is None:
            return error_response(f"sequence {seq!r} is not known here", status=404)
        return json_response(found)

    async def promote(self, request: web.Request) -> web.Response:
        seq = request.match_info["seq"]
        body = await _body(request, PromoteRequest)
        if isinstance(body, web.Response):
            return body
        if not 0 <= body.wait_ms <= MAX_WAIT_MS or body.want_tokens < 0:
            return error_response(f"wait_ms is from 0 to {MAX_WAIT_MS}, want_tokens not negative", status=400)
        watermark = await self._daemon.promote(seq, body.epoch, body.want_tokens, body.wait_ms)
        if watermark is None:
            return error_response(
                f"sequence {seq!r} is written under epoch {self._daemon.store.newest(seq)} already",
                hint="a promotion needs an epoch that was never used",
                status=409,
            )
        return json_response(Promoted(seq, body.epoch, watermark))

    async def fence(self, request: web.Request) -> web.Response:
        body = await _body(request, FenceRequest)
        if isinstance(body, web.Response):
            return body
        self._daemon.host.fence(request.match_info["seq"], body.epoch)
        return json_response({"fenced": True})


async def _body(request: web.Request, kind: Any) -> Any:
    """The request's JSON as `kind`, or the 400 that says what is wrong with it."""
    if len(request.match_info["seq"]) > MAX_SEQ_CHARS:
        return error_response(f"a sequence name has at most {MAX_SEQ_CHARS} characters", status=400)
    try:
        body = msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, web.RequestPayloadError) as error:
        return error_response(f"body: {error}", status=400)
    if not 0 < body.epoch < 1 << 63:
        return error_response("epoch must be from 1 to 2**63 - 1", status=400)
    return body

"""The router as an HTTP service: routes, its own endpoints, start and stop.

Its own endpoints: `/livez`, `/readyz` (and `/health`), `/status`, `/metrics`,
`/v1/segue/requests/{seq}`. `/v1/models` is the union over engines; every other path goes to an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import aiohttp
import structlog
from aiohttp import web

import segue_core
from segue_core.messages.status import RouterStatus
from segue_core.service import (
    Handler,
    error_response,
    json_response,
    start_http,
    until_signalled,
)
from segue_router.client import client_error_answer, read_body
from segue_router.context import Context
from segue_router.daemons import settle
from segue_router.engines import Registry
from segue_router.errors import ClientError
from segue_router.generation import Generation
from segue_router.metrics import Metrics
from segue_router.passthrough import Passthrough
from segue_router.request import PATHS, parse_request
from segue_router.settings import RouterSettings
from segue_router.stories import Stories

log = structlog.get_logger()
CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
LAST_WORDS_S = 2.0
"""How long answers that are cut off at shutdown may take to say so."""


def make_app(context: Context) -> web.Application:
    """The routes around `context`."""
    app = web.Application(middlewares=[_errors], client_max_size=0)
    app[CONTEXT] = context
    for path in PATHS:
        app.router.add_post(path, _generate)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/segue/requests/{seq}", _story)
    app.router.add_get("/livez", _live)
    app.router.add_get("/readyz", _ready)
    app.router.add_get("/health", _ready)
    app.router.add_get("/status", _status)
    app.router.add_get("/metrics", _metrics)
    app.router.add_route("*", "/{path:.*}", _pass)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    context = request.app[CONTEXT]
    try:
        return await handler(request)
    except ClientError as error:
        outcome = "client_error" if error.status < 500 else "failed"
        context.metrics.request(request.path if request.path in PATHS else "other", outcome)
        return client_error_answer(error)


async def _body(context: Context, http: web.Request) -> bytes:
    settings = context.settings
    return await read_body(http, settings.limits.max_body_bytes, settings.timeouts.body_ms)


async def _generate(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    with context.admission():
        raw = await _body(context, http)
        return await Generation(context, http, parse_request(http.path, raw)).run()


async def _pass(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    with context.admission():
        return await Passthrough(context, http, await _body(context, http)).run()


async def _models(http: web.Request) -> web.Response:
    engines = http.app[CONTEXT].registry.engines
    cards = {
        name: card
        for engine in engines
        if engine.health.state != "down"
        for name, card in engine.models.items()
    }
    return json_response({"object": "list", "data": list(cards.values())})


async def _story(http: web.Request) -> web.Response:
    story = http.app[CONTEXT].stories.find(http.match_info["seq"])
    if story is None:
        return error_response("no such request", status=404, hint="only the latest ones are kept")
    return json_response(story)


async def _live(http: web.Request) -> web.Response:
    return json_response({"live": True, "monotonic_ns": time.monotonic_ns()})


async def _ready(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    if context.stopping:
        return error_response("shutting down", status=503)
    if not context.registry.ready:
        return error_response("no engine is up", status=503, hint="see /status for each engine's detail")
    return json_response({"ready": True})


async def _status(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    return json_response(
        RouterStatus(
            version=segue_core.__version__,
            ready=context.registry.ready and not context.stopping,
            engines=tuple(engine.status() for engine in context.registry.engines),
            active_requests=len(context.running),
            failovers=context.metrics.failovers_total,
            resumed=context.metrics.resumed_total,
            refused=context.metrics.refused_total,
        )
    )


async def _metrics(http: web.Request) -> web.Response:
    context = http.app[CONTEXT]
    for engine in context.registry.engines:
        context.metrics.engine(engine.name, engine.health.state, len(engine.attempts))
    return web.Response(body=context.metrics.text(), content_type="text/plain", charset="utf-8")


@asynccontextmanager
async def running_router(settings: RouterSettings) -> AsyncIterator[tuple[Context, int]]:
    """A router that listens; yields its context and port. Raises StartupError if it cannot."""
    # A connection per generation: closing it is what makes an engine abort, and a connection kept alive
    # could be one that the engine has just closed.
    data = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    # Each daemon's watch keeps a connection for good: no limit, or many of them would lock the probes out.
    control = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
    )
    registry = Registry(settings, control)
    context = Context(settings, registry, data, control, Metrics(), Stories(settings.limits.max_stories))
    runner: web.AppRunner | None = None
    try:
        # handler_cancellation: a client that leaves stops what runs for it, also while nothing is written.
        runner, port = await start_http(
            make_app(context),
            settings.listen.host,
            settings.listen.port,
            what="listen",
            handler_cancellation=True,
            shutdown_timeout=LAST_WORDS_S,
        )
        registry.start()
        yield context, port
        await _drain(context, runner)
    finally:
        if runner is not None:
            await runner.cleanup()
        await registry.stop()
        await settle(context.background)
        await data.close()
        await control.close()


async def _drain(context: Context, runner: web.AppRunner) -> None:
    """Accept nothing more, let answers finish within the grace time, cut the rest off honestly."""
    context.stopping = True
    for site in list(runner.sites):
        await site.stop()
    await _until_idle(context, context.settings.timeouts.shutdown_grace_ms / 1000)
    context.cutting_off = True
    if context.running:
        log.warning("cutting off answers at shutdown", requests=len(context.running))
    for request in tuple(context.running):
        request.stop()
    context.registry.changed()
    await _until_idle(context, LAST_WORDS_S)


async def _until_idle(context: Context, seconds: float) -> None:
    """Returns when nothing runs any more, or after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await context.idle.wait()
    except TimeoutError:
        return


def is_loopback(host: str) -> bool:
    """Whether only this host can connect to `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def serve(settings: RouterSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    if not is_loopback(settings.listen.host):
        log.warning(
            "listening beyond this host, without encryption or authentication", host=settings.listen.host
        )
    async with running_router(settings) as (_, port):
        signalled = asyncio.create_task(until_signalled())
        await asyncio.sleep(0)  # a signal is heard before anybody is told that the router listens
        print(f"segue-router: listening on http://{settings.listen.host}:{port}", flush=True)  # noqa: T201
        signal_name = await signalled
        log.info("stopping", signal=signal_name)

"""The router as an HTTP service: routes, its own endpoints, start and stop.

Its own endpoints: `/livez`, `/readyz` (and `/health`), `/status`, `/metrics`, `/drain`, `/undrain`,
`/v1/segue/requests/{seq}`. `/v1/models` is the union over engines; every other path goes to an engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import structlog
from aiohttp import web

import segue_core
from segue_core.messages.status import RouterStatus
from segue_core.security import Tokens
from segue_core.service import (
    Handler,
    error_response,
    guarded,
    json_response,
    start_http,
    until_signalled,
    warn_unprotected,
)
from segue_router.access import Access, load_access
from segue_router.client import read_body
from segue_router.context import Context
from segue_router.conversations import Conversations
from segue_router.daemons import settle
from segue_router.drain import Drains
from segue_router.engine import Engine
from segue_router.engines import Registry
from segue_router.errors import ClientError
from segue_router.foreign import api_of, error_json
from segue_router.generation import Generation
from segue_router.metrics import Metrics
from segue_router.passthrough import Passthrough
from segue_router.request import PATHS, parse_request
from segue_router.settings import RouterSettings
from segue_router.stories import Stories

log = structlog.get_logger()
CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
DRAINS: web.AppKey[Drains] = web.AppKey("drains", Drains)
MAX_DRAIN_BODY_BYTES = 4_096
MAX_DRAIN_WAIT_MS = 86_400_000
LAST_WORDS_S = 2.0
"""How long answers that are cut off at shutdown may take to say so."""


def make_app(context: Context, drains: Drains, tokens: Tokens) -> web.Application:
    """The routes around `context`. With `tokens` the router's own endpoints need one, but for health."""
    app = web.Application(middlewares=[_errors], client_max_size=0)
    app[CONTEXT] = context
    app[DRAINS] = drains
    for path in PATHS:
        app.router.add_post(path, _without_token(_generate, tokens))
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/segue/requests/{seq}", guarded(_story, tokens))
    app.router.add_get("/livez", _live)
    app.router.add_get("/readyz", _ready)
    app.router.add_get("/health", _ready)
    app.router.add_get("/status", guarded(_status, tokens))
    app.router.add_get("/metrics", guarded(_metrics, tokens))
    app.router.add_post("/drain", guarded(_drain, tokens))
    app.router.add_post("/undrain", guarded(_undrain, tokens))
    app.router.add_route("*", "/{path:.*}", _without_token(_pass, tokens))
    return app


def _without_token(handler: Handler, tokens: Tokens) -> Handler:
    """`handler`, which passes headers on to an engine, but not for who shows the cluster's token: a slip in a
    path or a method would tell it to the engine."""

    async def checked(http: web.Request) -> web.StreamResponse:
        if any(map(tokens.accepts, http.headers.getall("Authorization", ()))):
            message = f"{http.method} {http.path} is an engine's affair, and the cluster's token is not"
            raise ClientError(400, message, code="cluster_token")
        return await handler(http)

    return checked if tokens else handler


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    context = request.app[CONTEXT]
    try:
        return await handler(request)
    except ClientError as error:
        outcome = "client_error" if error.status < 500 else "failed"
        context.metrics.request(request.path if request.path in PATHS else "other", outcome)
        return web.Response(
            status=error.status,
            body=error_json(api_of(request.path), error),
            content_type="application/json",
        )


async def _body(context: Context, http: web.Request) -> bytes:
    settings = context.settings
    return await read_body(http, settings.limits.max_body_bytes, settings.timeouts.body_ms)


async def _generate(http: web.Request) -> web.StreamResponse:
    context = http.app[CONTEXT]
    with context.admission():
        request = parse_request(http.path, await _body(context, http))
        context.registry.check_open(request.model)
        return await Generation(context, http, request).run()


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
        problem = "no engine is up" if context.registry.open else "every engine is being drained"
        return error_response(problem, status=503, hint="see /status for each engine's detail")
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
        context.metrics.engine(
            engine.name, engine.health.state, len(engine.attempts), draining=engine.draining
        )
    return web.Response(body=context.metrics.text(), content_type="text/plain", charset="utf-8")


async def _drain(http: web.Request) -> web.StreamResponse:
    """Empty an engine; a line of DrainProgress at each change, at least every second, until it is empty.

    Whoever hangs up does not end the drain.
    """
    context, engine = http.app[CONTEXT], await _named_engine(http)
    if isinstance(engine, web.Response):
        return engine
    wait = http.query.get("wait", "true")
    wait_ms = http.query.get("timeout_ms", str(context.settings.drain.wait_ms))
    if wait not in ("true", "false"):
        return error_response(f"`wait` is {wait!r}", status=400, hint="expected true or false")
    if not (wait_ms.isascii() and wait_ms.isdigit() and int(wait_ms) <= MAX_DRAIN_WAIT_MS):
        return error_response(
            f"`timeout_ms` is {wait_ms!r}", status=400, hint=f"expected a number up to {MAX_DRAIN_WAIT_MS}"
        )
    drain = http.app[DRAINS].drain(engine)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(http)
    try:
        if wait == "false":
            await response.write(msgspec.json.encode(drain.progress) + b"\n")
        else:
            async for progress in drain.follow(int(wait_ms)):
                await response.write(msgspec.json.encode(progress) + b"\n")
        await response.write_eof()
    except ConnectionError:
        pass
    return response


async def _undrain(http: web.Request) -> web.Response:
    """Let an engine serve again."""
    engine = await _named_engine(http)
    if isinstance(engine, web.Response):
        return engine
    await http.app[DRAINS].undrain(engine)
    return json_response(engine.status())


class _EngineName(msgspec.Struct, forbid_unknown_fields=True):
    engine: str


async def _named_engine(http: web.Request) -> Engine | web.Response:
    """The engine that the query or the body names, or the answer that says what is wrong."""
    context = http.app[CONTEXT]
    name = http.query.get("engine", "")
    if not name:
        try:
            raw = await read_body(http, MAX_DRAIN_BODY_BYTES, context.settings.timeouts.body_ms)
            name = msgspec.json.decode(raw, type=_EngineName).engine
        except ClientError as error:
            return error_response(str(error), status=error.status)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return error_response("no engine is named", status=400, hint='?engine=NAME or {"engine": NAME}')
    known = ", ".join(engine.name for engine in context.registry.engines)
    found = context.registry.find(name)
    return found or error_response(f"no engine is called {name!r}", status=404, hint=f"engines: {known}")


@asynccontextmanager
async def running_router(
    settings: RouterSettings, access: Access | None = None
) -> AsyncIterator[tuple[Context, int]]:
    """A router that listens; yields its context and port. Raises StartupError if it cannot, ConfigError if
    `settings.security` is not right (`access`: what it says, if it was read already)."""
    access = access or load_access(settings)
    # A connection per generation: closing it is what makes an engine abort, and a connection kept alive
    # could be one that the engine has just closed.
    data = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    control = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
    )
    daemons = access.session()
    registry = Registry(settings, control, daemons)
    limits = settings.limits
    context = Context(
        settings,
        registry,
        data,
        control,
        Metrics(),
        Stories(limits.max_stories),
        Conversations(limits.max_conversations),
    )
    drains = Drains(context)
    runner: web.AppRunner | None = None
    try:
        # handler_cancellation: a client that leaves stops what runs for it, also while nothing is written.
        runner, port = await start_http(
            make_app(context, drains, access.tokens),
            settings.listen.host,
            settings.listen.port,
            what="listen",
            handler_cancellation=True,
            shutdown_timeout=LAST_WORDS_S,
        )
        registry.start()
        yield context, port
        await _wind_down(context, runner)
    finally:
        if runner is not None:
            await runner.cleanup()
        await drains.close()
        await registry.stop()
        await settle(context.background)
        await data.close()
        await control.close()
        await daemons.close()


async def _wind_down(context: Context, runner: web.AppRunner) -> None:
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


async def serve(settings: RouterSettings, access: Access) -> None:
    """Run until SIGTERM or SIGINT."""
    warn_unprotected(access.openings)
    for url in access.in_clear:
        log.warning("the token crosses the network in plain text", daemon=url, hint="its http: {tls: true}")
    async with running_router(settings, access) as (_, port):
        signalled = asyncio.create_task(until_signalled())
        await asyncio.sleep(0)  # a signal is heard before anybody is told that the router listens
        print(f"segue-router: listening on http://{settings.listen.host}:{port}", flush=True)  # noqa: T201
        signal_name = await signalled
        log.info("stopping", signal=signal_name)

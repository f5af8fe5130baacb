"""What the daemon and the router share as HTTP services: JSON answers, one error form, a clean start.

Not used by the shim (it imports aiohttp).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from segue_core.errors import SegueError, StartupError
from segue_core.messages.status import ErrorBody
from segue_core.security import Opening, Tokens

log = structlog.get_logger()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: Any, *, status: int = 200) -> web.Response:
    """`body` (structs, dicts, lists) as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error_response(message: str, *, status: int, hint: str = "") -> web.Response:
    """The one form of an error answer of a status endpoint."""
    return json_response(ErrorBody(error=message, hint=hint), status=status)


async def start_http(
    app: web.Application,
    host: str,
    port: int,
    *,
    what: str,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner and the port (useful with port 0). `options` are AppRunner's.

    Raises StartupError if the address cannot be used; `what` names its key in the configuration.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    runner = web.AppRunner(app, handle_signals=False, access_log=None, **options)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, reuse_address=True, ssl_context=tls)
        await site.start()
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        raise StartupError(f"{what}: {listen_problem(error, host, port)}", hint=LISTEN_HINT) from error
    bound: int = runner.addresses[0][1]
    return runner, bound


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a record of aiohttp's is about a fault of ours. It logs a traceback for each request that is
    none and each client that leaves: whoever can connect could fill the log."""
    cause = record.exc_info[1] if record.exc_info else None
    return not isinstance(cause, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


LISTEN_HINT = "stop the process that uses it, or set another address in the configuration"


def listen_problem(error: OSError | UnicodeError, host: str, port: int) -> str:
    """Why `host:port` cannot be listened on, in words."""
    if isinstance(error, UnicodeError):
        return f"cannot listen on {host}:{port}: that is no host's name"
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is already in use"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def warn_unprotected(openings: Iterable[Opening]) -> None:
    """Say of each address that is open to strangers, as `security.insecure` allows, that it is."""
    for opening in openings:
        log.warning(
            "open to other hosts without protection",
            key=opening.key,
            host=opening.host,
            lacks=opening.lacks,
            hint="whoever reaches it can read what users wrote: keep it on a trusted network",
        )


def guarded(handler: Handler, tokens: Tokens) -> Handler:
    """`handler` behind the token, if there is one: 401 to requests without it."""
    if not tokens:
        return handler

    async def checked(request: web.Request) -> web.StreamResponse:
        if tokens.accepts(request.headers.get("Authorization")):
            return await handler(request)
        answer = error_response(
            "this endpoint needs the cluster's token",
            status=401,
            hint="send it as Authorization: Bearer TOKEN",
        )
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    return checked


async def until_signalled() -> str:
    """Wait for SIGTERM or SIGINT; returns its name."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[str] = loop.create_future()

    def note(name: str) -> None:
        if not received.done():
            received.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number.name)
    return await received


def run_service(main: Callable[[], Awaitable[None]]) -> int:
    """Run an async `main` under uvloop where it is installed; exit status: 0 ok, 1 failed."""
    try:
        import uvloop
    except ImportError:
        runner: Callable[[Any], Any] = asyncio.run
    else:
        runner = uvloop.run
    try:
        runner(main())
    except SegueError as error:
        log.error("stopped", reason=str(error))
        return 1
    except KeyboardInterrupt:
        return 0
    return 0

"""`seguectl drain` and `seguectl undrain`: empty an engine before it is stopped, and let it serve again.

Asks the router (`POST /drain`, `POST /undrain`), which does the work: whoever stops watching stops nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import aiohttp
import msgspec

from segue_core.errors import ConfigError, SegueError
from segue_core.messages.status import DrainProgress, ErrorBody, RouterEngine
from segue_ctl import access
from segue_ctl.output import FAILED, OK, UNHEALTHY, Style, complain, to_json
from segue_ctl.status import DEFAULT_URL, normal_url
from segue_ctl.waiting import tls_problem

SILENCE_S = 10.0
"""The router says something every second: after so long it is not there any more."""
MAX_TIMEOUT_S = 86_400

_DRAIN_EPILOG = """\
examples:
  seguectl drain a && systemctl stop vllm-a    when it is empty
  seguectl drain a --timeout 60                exit status 1 if it is not empty then; the drain goes on
  seguectl undrain a                           let it serve again

The engine gets nothing new, and its answers go on at other engines. What cannot be moved is waited for.
An interruption ends the watching, not the drain. A router that is restarted drains nothing.

--json prints a line at each change and each second: {"engine": NAME, "active": N, "moved": N, "staying": N,
"done": BOOL, "detail": TEXT}.

exit status: 0 empty, 1 not empty in time, 2 no such engine, 3 the router does not answer
"""


def add_parser(verbs: Any) -> None:
    """Add `drain` and `undrain` to the command line."""
    parser = verbs.add_parser(
        "drain",
        help="move every answer off an engine",
        description="Empty an engine: nothing new goes there, what runs there goes on elsewhere.",
        epilog=_DRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="default: as the router is configured"
    )
    parser.set_defaults(run=run_drain)
    back = verbs.add_parser(
        "undrain", help="let a drained engine serve again", description="Let a drained engine serve again."
    )
    _common(back)
    back.set_defaults(run=run_undrain)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="its name in the router's configuration")
    parser.add_argument("--router", metavar="URL", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--json", action="store_true", help="for programs")
    access.add_options(parser)


def run_drain(args: argparse.Namespace) -> int:
    """Start the drain and watch it."""
    query = {"engine": args.engine}
    if args.timeout is not None:
        if not 0 <= args.timeout <= MAX_TIMEOUT_S:
            raise ConfigError(f"--timeout: expected seconds from 0 to {MAX_TIMEOUT_S}")
        query["timeout_ms"] = str(round(args.timeout * 1000))
    options = access.session_options(args)
    return asyncio.run(_watched(normal_url(args.router), query, options, as_json=args.json))


def run_undrain(args: argparse.Namespace) -> int:
    """End the drain."""
    options = access.session_options(args)
    return asyncio.run(_undrain(normal_url(args.router), args.engine, options, as_json=args.json))


async def _watched(router: str, query: dict[str, str], options: dict[str, Any], *, as_json: bool) -> int:
    shown = last = None
    try:
        async with _asked(f"{router}/drain", query, **options) as answer:
            while line := await answer.content.readline():
                last = msgspec.json.decode(line, type=DrainProgress)
                if as_json:
                    print(line.decode().strip(), flush=True)
                elif last != shown:
                    print(render(last, Style(sys.stdout)), flush=True)
                shown = last
    except _Unreachable as error:
        complain(str(error))
        return UNHEALTHY
    if last is None or not (last.done or last.detail):
        complain(f"{router}: the answer ended too early; `seguectl status` shows whether it still drains")
        return UNHEALTHY
    return OK if last.done else FAILED


async def _undrain(router: str, engine: str, options: dict[str, Any], *, as_json: bool) -> int:
    try:
        async with _asked(f"{router}/undrain", {"engine": engine}, **options) as answer:
            status = msgspec.json.decode(await answer.read(), type=RouterEngine)
    except _Unreachable as error:
        complain(str(error))
        return UNHEALTHY
    print(to_json(status) if as_json else f"{status.name}: {status.state}, serves again")
    return OK


def render(progress: DrainProgress, style: Style) -> str:
    """One line for people."""
    name = style.bold(progress.engine)
    moved = f"{progress.moved} moved"
    if progress.done:
        return f"{name}: {style.good('empty')}, {moved}"
    left = f"{name}: {progress.active} left ({progress.staying} cannot move), {moved}"
    return f"{left}: {style.bad(progress.detail)}" if progress.detail else left


class _Unreachable(Exception):
    """The router does not answer, or something else does."""


@asynccontextmanager
async def _asked(
    url: str, query: dict[str, str], *, headers: Mapping[str, str], ssl: SSLContext | bool
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The good answer to a POST. Raises ConfigError (a wrong name), SegueError (refused), _Unreachable."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(url, params=query, ssl=ssl) as answer,
        ):
            if answer.status != 200:
                raise _refusal(answer.status, await answer.read())
            yield answer
    except aiohttp.ClientSSLError as error:
        raise _Unreachable(f"{url}: no TLS with it: {tls_problem(error)}") from error
    except aiohttp.ClientConnectorError as error:
        raise _Unreachable(f"{url}: cannot connect: {os.strerror(error.os_error.errno or 0)}") from error
    except TimeoutError as error:
        raise _Unreachable(f"{url}: silent for {SILENCE_S:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _Unreachable(f"{url}: {str(error) or type(error).__name__}") from error
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: a line without end
        raise _Unreachable(f"{url}: not a Segue router: {error}") from error


def _refusal(status: int, body: bytes) -> SegueError | _Unreachable:
    try:
        said = msgspec.json.decode(body, type=ErrorBody)
    except msgspec.DecodeError:
        return _Unreachable(f"not a Segue router (HTTP {status})")
    if status == 401:
        return ConfigError(said.error, hint="--token-file FILE, or the variable SEGUE_TOKEN")
    kind = ConfigError if 400 <= status < 500 else SegueError
    return kind(said.error, hint=said.hint)

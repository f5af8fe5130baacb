"""`seguectl status`: daemons and routers as they see themselves.

Asks only `GET /status`; which of the two answered shows in the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from segue_core.errors import ConfigError
from segue_core.messages.status import DaemonStatus, RouterStatus
from segue_ctl import access
from segue_ctl.access import session_options
from segue_ctl.output import OK, UNHEALTHY, Style, complain, table, to_json
from segue_ctl.status_daemon import daemon_facts, peer_table
from segue_ctl.waiting import get_json

DEFAULT_URL = "http://127.0.0.1:8080"
_CLEAR = "\x1b[H\x1b[2J"

_EPILOG = """\
examples:
  seguectl status
  seguectl status http://127.0.0.1:7101 http://127.0.0.1:7102
  seguectl status --watch 1
  seguectl status https://host:7101 --ca keys/router/ca.crt --token-file keys/router/token

--json prints one object: {"URL": {"kind": "router"|"daemon", "ready": BOOL, "status": {...}}}, or
{"URL": {"kind": "unreachable", "ready": false, "error": TEXT}}. The fields of "status" are those of the
endpoint's own /status. With --watch there is one such object a line.

exit status: 0 all ready, 3 one of them is not ready or does not answer
"""


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """One endpoint's answer, as --json prints it."""

    kind: str
    ready: bool
    status: DaemonStatus | RouterStatus | None = None
    error: str = ""


def add_parser(verbs: Any) -> None:
    """Add `status` to the command line."""
    parser = verbs.add_parser(
        "status",
        help="show the state of a router or daemon",
        description="Show routers and daemons: engines, links to peers, replicas.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "urls", nargs="*", metavar="URL", default=[DEFAULT_URL], help=f"default: {DEFAULT_URL}, the router"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="again and again (default: 2)"
    )
    access.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the state once, or until interrupted."""
    if args.watch is not None and not args.watch > 0:
        raise ConfigError("--watch: expected a number of seconds above 0")
    urls, options = [normal_url(url) for url in args.urls], session_options(args)
    while True:
        seen = asyncio.run(look(urls, **options))
        _print(seen, as_json=args.json, watching=args.watch is not None)
        if args.watch is None:
            return OK if all(one.ready for one in seen.values()) else UNHEALTHY
        time.sleep(args.watch)


async def look(
    urls: list[str], *, headers: Mapping[str, str] | None = None, ssl: SSLContext | bool = True
) -> dict[str, Seen]:
    """Ask all of `urls` at once."""
    connector = aiohttp.TCPConnector(ssl=ssl)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        answers = await asyncio.gather(*(get_json(session, f"{url}/status") for url in urls))
    return {url: read_status(*answer) for url, answer in zip(urls, answers, strict=True)}


def read_status(code: int, body: object) -> Seen:
    """What an answer to `GET /status` means. Code 0: nothing answered, `body` says why."""
    if code == 0:
        return Seen("unreachable", False, error=str(body))
    if code == 401:
        return Seen("unreachable", False, error="the token is missing or wrong (--token-file, SEGUE_TOKEN)")
    if not isinstance(body, dict) or "ready" not in body:
        return Seen("unreachable", False, error=f"not a Segue status endpoint (HTTP {code})")
    kind: type[RouterStatus] | type[DaemonStatus] = RouterStatus if "engines" in body else DaemonStatus
    try:
        status = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        return Seen("unreachable", False, error=f"unexpected status: {error}")
    return Seen("router" if isinstance(status, RouterStatus) else "daemon", status.ready, status)


def normal_url(url: str) -> str:
    """`url` with a scheme and without a path. Raises ConfigError if nothing could be asked there."""
    url = url if "://" in url else f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: expected a URL such as {DEFAULT_URL}")
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0  # reading the port checks it
    except ValueError as error:
        raise ConfigError(f"{url}: {str(error).lower()}") from error
    if not usable:
        raise ConfigError(f"{url}: expected a URL such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/status")


def _print(seen: dict[str, Seen], *, as_json: bool, watching: bool) -> None:
    if as_json:
        text = msgspec.json.encode(seen).decode() if watching else to_json(seen)
        print(text, flush=True)
        return
    style = Style(sys.stdout)
    if watching and sys.stdout.isatty():
        print(_CLEAR, end="")
    blocks = [render(url, one, style) for url, one in seen.items() if one.status is not None]
    if blocks:
        print("\n\n".join(blocks), flush=True)
    for url, one in seen.items():
        if one.error:
            complain(f"{url}: {one.error}")


def render(url: str, seen: Seen, style: Style) -> str:
    """One endpoint for people."""
    status = seen.status
    if isinstance(status, RouterStatus):
        return _render_router(url, status, style)
    if isinstance(status, DaemonStatus):
        return _render_daemon(url, status, style)
    return f"{url}: {seen.error}"


def _ready(ready: bool, style: Style) -> str:
    return style.good("ready") if ready else style.bad("not ready")


def _render_router(url: str, status: RouterStatus, style: Style) -> str:
    head = f"{style.bold('router')} {url}  {_ready(status.ready, style)}  version {status.version}"
    counts = (
        f"requests now {status.active_requests}, failovers {status.failovers}, "
        f"resumed {status.resumed}, refused {status.refused}"
    )
    rows = [
        [
            e.name,
            f"{e.state}, draining" if e.draining else e.state,
            str(e.active),
            str(e.failures),
            e.daemon_state or "none",
            e.model,
            e.url,
            e.detail,
        ]
        for e in status.engines
    ]
    header = ["ENGINE", "STATE", "ACTIVE", "FAILURES", "DAEMON", "MODEL", "URL", ""]
    return "\n".join([head, counts, table(rows, header=header, right=(2, 3))])


def _render_daemon(url: str, status: DaemonStatus, style: Style) -> str:
    name = style.bold(f"daemon {status.name}")
    head = f"{name} {url}  {_ready(status.ready, style)}  version {status.version}"
    lines = [head, daemon_facts(status)]
    if status.peers:
        lines.append(peer_table(status.peers, style))
    return "\n".join(lines)

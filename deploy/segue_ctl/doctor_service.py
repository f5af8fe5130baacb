"""Looks at what configuration files name: settings, socket, ports, keys, peers; a router's engines.

Each process knows its own settings and keys, so its command judges (`--check --json`), and the daemon's own
probe asks the peers (`segue_daemon.probe`). Nothing is started, taken or changed. No judgement here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from segue_core.credentials import other_end
from segue_core.errors import ConfigError
from segue_core.messages.probe import PEERS_AT_ONCE, STEPS_A_PEER, PeersFound
from segue_core.security import CA_FILE, SecuritySettings, load_tokens, trust_in
from segue_ctl.commands import console_script
from segue_ctl.doctor_child import Outcome, Probe, run_probes
from segue_ctl.status import Seen, look
from segue_ctl.waiting import get_json

CHECK_S = 60.0
PEERS_MARGIN_S = 10.0
Kind = Literal["daemon", "router"]


class Port(msgspec.Struct, frozen=True):
    """An address that a process listens on. `error`: why it cannot be used; `taken`: somebody uses it."""

    key: str
    host: str
    port: int
    taken: bool = False
    error: str = ""


class Answer(NamedTuple):
    """Who answers at `url` for the engine `name`: itself (a text, empty if it is well), or its daemon."""

    url: str
    name: str
    seen: Seen | str


@dataclass(frozen=True)
class Folder:
    """The socket's folder. `there`: False if it has to be made; `parent`: whether it can be."""

    path: str
    there: bool
    parent: bool
    mode: int = 0
    owner: int = 0
    is_folder: bool = True


@dataclass(frozen=True)
class ServiceFacts:
    """What one configuration file comes to. `settings`: all keys, as the process has them; None: it has none.
    `error`: what its own check says. `seen`: who answers where it would listen."""

    file: str
    kind: Kind
    settings: dict[str, Any] | None
    error: str = ""
    ports: tuple[Port, ...] = ()
    seen: Seen | None = None
    folder: Folder | None = None
    listener_pid: int | None = None
    """Of the process behind the unix socket, as this PID namespace has it (0: of another one)."""
    token: bool = False
    """Whether its endpoint wants the cluster's token."""
    peers: Outcome | None = None
    answers: tuple[Answer, ...] = ()
    """Of a router's engines and of the daemons beside them."""


def look_at(file: Path, kind: Kind, timeout_s: float) -> ServiceFacts:
    """Everything about one file."""
    settings, error = read_settings(file, kind)
    if settings is None:
        return ServiceFacts(str(file), kind, None, error)
    if kind == "router":
        listen = settings["listen"]
        ports = (try_port("listen.port", listen["host"], listen["port"]),)
        answers = asyncio.run(_ask_engines(settings))
        seen = _who(settings, listen, "http") if ports[0].taken else None
        token = _has_token(settings)
        return ServiceFacts(str(file), kind, settings, error, ports, seen, token=token, answers=answers)
    http, listen = settings["http"], settings["listen"]
    own = (
        try_port("http.port", http["host"], http["port"]),
        try_port("listen.control_port", listen["host"], listen["control_port"]),
        try_port("listen.bulk_port", listen["host"], listen["bulk_port"]),
    )
    seen = _who(settings, http, "https" if http["tls"] else "http") if own[0].taken else None
    path = Path(settings["socket"])
    return ServiceFacts(
        str(file),
        kind,
        settings,
        error,
        own,
        seen,
        folder=look_at_folder(path.parent),
        listener_pid=_listener(path),
        token=_has_token(settings),
        peers=None if error else _ask_peers(file, settings, timeout_s),
    )


def read_settings(file: Path, kind: Kind) -> tuple[dict[str, Any] | None, str]:
    """(settings, what is wrong): settings may be there although keys or protection are not in order."""
    command = [console_script(f"segue-{kind}"), "--config", str(file), "--check", "--json"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"segue-{kind} --check did not end within {CHECK_S:g} s"
    try:
        settings = msgspec.json.decode(answer.stdout, type=dict[str, Any])
    except msgspec.DecodeError:
        settings = None
    if answer.returncode == 0 and settings is not None:
        return settings, ""
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"segue-{kind} --check ended with status {answer.returncode}"
    return settings, reason.removeprefix(f"segue-{kind}:").strip()


def try_port(key: str, host: str, port: int) -> Port:
    """Listen there for a moment."""
    if port == 0:
        return Port(key, host, port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        text = getattr(error, "strerror", None) or str(error)
        return Port(key, host, port, taken, text)
    return Port(key, host, port)


def _who(settings: dict[str, Any], listen: dict[str, Any], scheme: str) -> Seen | None:
    """Who answers at an address that is taken."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(listen["host"], listen["host"])  # noqa: S104
    url = f"{scheme}://{host}:{listen['port']}"
    try:
        return asyncio.run(look([url], **_access(settings)))[url]
    except ConfigError as error:
        return Seen("unreachable", False, error=str(error))


def _access(settings: dict[str, Any]) -> dict[str, Any]:
    """Token and trust, as the process itself has them. Raises ConfigError."""
    security = msgspec.convert(settings["security"], SecuritySettings)
    ca = Path(security.dir) / CA_FILE
    trust = trust_in(ca, "security.dir") if security.dir and ca.exists() else True
    return {"headers": load_tokens(security).headers, "ssl": trust}


def _has_token(settings: dict[str, Any]) -> bool:
    """What is wrong with a token is the process's own check to say."""
    try:
        return bool(load_tokens(msgspec.convert(settings["security"], SecuritySettings)))
    except ConfigError:
        return False


def look_at_folder(folder: Path) -> Folder:
    """How the folder of a socket is, if it is there."""
    try:
        found = folder.stat()
    except OSError:
        return Folder(str(folder), False, folder.parent.is_dir() and os.access(folder.parent, os.W_OK))
    return Folder(str(folder), True, True, found.st_mode & 0o777, found.st_uid, folder.is_dir())


def _listener(path: Path) -> int | None:
    """Process id behind the unix socket; None: nobody listens, or who does lets nobody in."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1.0)
        trial.connect(str(path))
        return other_end(trial)[0]
    return None


def _ask_peers(file: Path, settings: dict[str, Any], timeout_s: float) -> Outcome | None:
    """The daemon's own probe; None: it has no keys and nobody to ask."""
    if not settings["peers"] and not settings["group"]["leader"] and not settings["security"]["dir"]:
        return None
    asked = len(settings["peers"]) + bool(settings["group"]["leader"])
    peer_s = STEPS_A_PEER * settings["timeouts"]["peer_ms"] / 1000
    steps_s = peer_s * -(-asked // PEERS_AT_ONCE)
    probe = Probe("segue_daemon.probe", ["--config", str(file)], os.environ)
    (outcome,) = run_probes([probe], max(timeout_s, steps_s + PEERS_MARGIN_S))
    return outcome


def peers_of(facts: ServiceFacts) -> PeersFound | None:
    """What the probe found, if it came to that."""
    found = facts.peers.found if facts.peers is not None else None
    return found if isinstance(found, PeersFound) else None


async def _ask_engines(settings: dict[str, Any]) -> tuple[Answer, ...]:
    """Engines and daemons of a router, as it would ask them."""
    engines = settings["engines"]
    urls = [engine["url"].rstrip("/") for engine in engines]
    async with aiohttp.ClientSession() as session:
        codes = await asyncio.gather(*(get_json(session, f"{url}/health") for url in urls))
    answers = [
        Answer(url, engine["name"], "" if code == 200 else f"HTTP {code}" if code else str(body))
        for engine, url, (code, body) in zip(engines, urls, codes, strict=True)
    ]
    owners = {
        url.rstrip("/"): engine["name"]
        for engine in engines
        for url in (engine["daemons"] or ([engine["daemon"]] if engine["daemon"] else []))
    }
    try:
        seen = await look(list(owners), **_access(settings))
    except ConfigError as error:
        seen = {url: Seen("unreachable", False, error=str(error)) for url in owners}
    return (*answers, *(Answer(url, owners[url], one) for url, one in seen.items()))

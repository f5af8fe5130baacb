"""The keys of one daemon, from the folder that `seguectl keygen` made (`security.dir`).

Owns what the files must be: `ca.crt`, `daemon.crt`, `daemon.key` (TLS), `daemon.curve` (its secret key for
control), `peers/NAME.curve` (public keys of the daemons that are let in). Never writes. Invariant: keys that
do not fit together, are another daemon's or out of date, or could be read by others, are refused at start.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq

from segue_core.errors import ConfigError
from segue_core.security import (
    CERTIFICATE_FILE,
    CURVE_FILE,
    PEER_SUFFIX,
    PEERS_FOLDER,
    Opening,
    Tokens,
    check_unaltered,
    load_tokens,
    read_secret,
    refuse_unprotected,
    unprotected,
)
from segue_daemon.settings import DaemonSettings
from segue_daemon.tls import KEY, client_context, names_in, rehearse, server_context, tls_problem, web_context

log = structlog.get_logger()

MAX_PEERS = 1024
REREAD_S = 1.0
"""Public keys are read again when somebody knocks, but not more often: a daemon that is added, or taken away,
needs no restart of the others."""
EXPIRES_SOON_S = 30 * 86_400
_Z85 = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
KEYGEN = "`seguectl keygen` makes this folder; copy it whole"


@dataclass
class Keys:
    """What this daemon proves itself with, and whom it lets in."""

    name: str
    folder: Path
    curve_secret: bytes = field(repr=False)
    curve_public: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    _known: dict[bytes, str] = field(default_factory=dict, repr=False)
    _read_at_s: float = float("-inf")

    def public_key(self, peer: str) -> bytes:
        """The public key of `peer`, as its file says now. Raises ConfigError."""
        return read_public(self.folder / PEERS_FOLDER / f"{peer}{PEER_SUFFIX}")

    def owner(self, public: bytes, now_s: float) -> str | None:
        """Which peer a public key belongs to; None: nobody's that is known."""
        if now_s - self._read_at_s >= REREAD_S:
            self._read_at_s = now_s
            self._known = {}
            for file in sorted((self.folder / PEERS_FOLDER).glob(f"*{PEER_SUFFIX}"))[:MAX_PEERS]:
                try:
                    self._known.setdefault(read_public(file), file.name.removesuffix(PEER_SUFFIX))
                except ConfigError as error:
                    log.warning("a peer's public key is not used", reason=str(error))
        return self._known.get(public)


def read_public(file: Path) -> bytes:
    """A CURVE public key (Z85). Raises ConfigError; also if others could have written it."""
    check_unaltered(file, KEY)
    try:
        with file.open("rb") as opened:
            text = opened.read(128)
    except OSError as error:
        raise ConfigError(
            f"{KEY}: cannot read {file}: {error.strerror}", hint="copy it from the folder that keygen made"
        ) from error
    return _z85(text, file)


def _z85(text: bytes, file: Path) -> bytes:
    key = text.strip().decode("ascii", errors="replace")
    if not _Z85.fullmatch(key):
        raise ConfigError(f"{KEY}: {file} holds no CURVE key (40 characters)", hint=KEYGEN)
    return key.encode()


def load_keys(folder: Path, name: str, peers: Iterable[str] = ()) -> Keys:
    """The keys of daemon `name`, tried out as peers would. Raises ConfigError, also if those of `peers` are
    not there."""
    secret = _z85(read_secret(folder / CURVE_FILE, KEY), folder / CURVE_FILE)
    try:
        public = zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise ConfigError(f"{KEY}: libzmq was built without CURVE: {error}") from error
    keys = Keys(name, folder, secret, public, server_context(folder), client_context(folder))
    if keys.public_key(name) != public:
        raise ConfigError(f"{KEY}: {folder / CURVE_FILE} is not the key of {name!r}", hint=KEYGEN)
    for peer in peers:
        if keys.public_key(peer) == public:
            raise ConfigError(f"{KEY}: the public key of peer {peer!r} is this daemon's own", hint=KEYGEN)
    _check_certificate(keys)
    return keys


def _check_certificate(keys: Keys) -> None:
    certificate = keys.folder / CERTIFICATE_FILE
    try:
        shown = rehearse(keys.server, keys.client)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{KEY}: peers would refuse {certificate}: {tls_problem(error)}",
            hint="make a new one with `seguectl keygen --force`",
        ) from error
    names = names_in(shown)
    if keys.name not in names:
        found = ", ".join(sorted(names)) or "nobody"
        raise ConfigError(f"{KEY}: {certificate} is for {found}, not for {keys.name!r}", hint=KEYGEN)
    left_s = ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()
    if left_s < EXPIRES_SOON_S:
        log.warning("the certificate expires soon", file=str(certificate), days=int(left_s // 86_400))


@dataclass(frozen=True)
class Protection:
    """All that protects one daemon. `openings`: what is open to strangers, as the configuration says."""

    keys: Keys | None
    tokens: Tokens
    web: ssl.SSLContext | None
    openings: tuple[Opening, ...]


def load_protection(settings: DaemonSettings) -> Protection:
    """Read what `settings.security` names. Raises ConfigError if it cannot be used, or if something would be
    open to other hosts without it."""
    security, listen, http = settings.security, settings.listen, settings.http
    folder = Path(security.dir)
    tokens = load_tokens(security)
    addresses = [("http.host", http.host, "token"), ("listen.host", listen.host, "keys")]
    addresses += [(f"peers[].control of {p.name}", p.control.rsplit(":")[0], "keys") for p in settings.peers]
    if settings.group.leader:
        addresses.append(("group.leader", settings.group.leader.rsplit(":")[0], "keys"))
    openings = unprotected(addresses, {"token": bool(tokens), "keys": bool(security.dir)})
    refuse_unprotected(openings, security)
    keys = load_keys(folder, settings.name, [peer.name for peer in settings.peers]) if security.dir else None
    return Protection(keys, tokens, web_context(folder) if http.tls else None, tuple(openings))

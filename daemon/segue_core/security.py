"""Who may reach a process: the `security` section, tokens, secrets on disk, and which addresses need them.

Never talks to anybody. Invariants: a secret that other users of the host could read is not used; an address
that other hosts can reach stays closed unless there is something to tell friends from strangers by, or
`security.insecure` says that there need not be.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import ssl
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from segue_core.errors import ConfigError
from segue_core.settings import Settings

CA_FILE = "ca.crt"
CERTIFICATE_FILE = "daemon.crt"
KEY_FILE = "daemon.key"
CURVE_FILE = "daemon.curve"
PEERS_FOLDER = "peers"
PEER_SUFFIX = ".curve"
TOKEN_FILE = "token"  # noqa: S105 - a name, no token
TOKEN_VARIABLE = "SEGUE_TOKEN"  # noqa: S105

MAX_SECRET_BYTES = 64 << 10
MAX_TOKENS = 4
_TOKEN = re.compile(r"[!-~]{16,256}")


class SecuritySettings(Settings, frozen=True):
    """What tells friends from strangers. The secrets themselves are never in the configuration."""

    dir: str = ""
    """The folder that `seguectl keygen` made for this process. Empty: no keys."""
    token_file: str = ""
    """The token of the HTTP endpoints. Empty: the variable SEGUE_TOKEN, else the file `token` in `dir`."""
    insecure: bool = False
    """Open what is configured to other hosts, even where there are no keys or no token."""


@dataclass(frozen=True)
class Opening:
    """An address that other hosts have part in, by its `key` in the configuration; `lacks`: what would
    protect it and is not there."""

    key: str
    host: str
    lacks: str

    def __str__(self) -> str:
        return f"`{self.key}`: {self.host} is not only this host, and there is no {self.lacks}"


def unprotected(addresses: Iterable[tuple[str, str, str]], has: Mapping[str, bool]) -> list[Opening]:
    """Of `addresses` (key, host, what protects it) those beyond loopback without their protection."""
    return [Opening(*one) for one in addresses if not is_loopback(one[1]) and not has[one[2]]]


def refuse_unprotected(openings: list[Opening], settings: SecuritySettings) -> None:
    """Raise ConfigError if there are any and nobody wrote that it is meant."""
    if openings and not settings.insecure:
        raise ConfigError(
            "; ".join(map(str, openings)),
            hint="make keys with `seguectl keygen` and set `security.dir`, or write `security.insecure: true`"
            " if everybody who can connect may read what users wrote",
        )


def is_loopback(host: str) -> bool:
    """Whether only this host can connect to `host`. A name is taken for another host's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Tokens:
    """The tokens of the HTTP endpoints: the first is sent, any is accepted (while one is being replaced)."""

    def __init__(self, values: tuple[str, ...] = ()) -> None:
        self._first = values[0] if values else ""
        self._digests = [_digest(f"Bearer {value}".encode()) for value in values]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: str | None) -> bool:
        """Whether a request with this header may pass. Takes the same time for every wrong one."""
        said = _digest((authorization or "").encode(errors="surrogateescape"))
        matches = [hmac.compare_digest(said, known) for known in self._digests]
        return any(matches)

    @property
    def headers(self) -> dict[str, str]:
        """What a request of ours carries."""
        return {"Authorization": f"Bearer {self._first}"} if self._first else {}


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


def load_tokens(settings: SecuritySettings, environ: Mapping[str, str] | None = None) -> Tokens:
    """The tokens that `settings` and the environment name; none if they name none. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    if settings.token_file:
        return read_tokens(Path(settings.token_file), "security.token_file")
    if variable := environ.get(TOKEN_VARIABLE, ""):
        return parse_tokens(variable, TOKEN_VARIABLE)
    if not settings.dir:
        return Tokens()
    try:
        return read_tokens(Path(settings.dir) / TOKEN_FILE, "security.dir")
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return Tokens()
        raise


def read_tokens(file: Path, key: str) -> Tokens:
    """The tokens in `file`; `key` is what named it. Raises ConfigError."""
    return parse_tokens(read_secret(file, key).decode(errors="replace"), f"{key}: {file}")


def parse_tokens(text: str, source: str) -> Tokens:
    """One token a line. Raises ConfigError, without showing any."""
    values = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not 1 <= len(values) <= MAX_TOKENS or not all(_TOKEN.fullmatch(value) for value in values):
        raise ConfigError(
            f"{source}: expected a token a line (16 to 256 printable characters, no blanks),"
            f" at most {MAX_TOKENS}",
            hint="`seguectl keygen` makes one",
        )
    return Tokens(values)


def read_secret(file: Path, key: str) -> bytes:
    """The content of a file that nobody else may read. Raises ConfigError; `key` is what named it."""
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{key}: {file} is not a file")
            check_private(file, found, key)
            content = opened.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file}: {error.strerror}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{key}: {file} is larger than {MAX_SECRET_BYTES} bytes")
    return content


def check_unaltered(file: Path, key: str) -> None:
    """Raise ConfigError if others could have written a file that is no secret, but is trusted."""
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file}: {error.strerror}") from error
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{key}: others can write {file}",
            hint=f"check what it holds, chown {os.geteuid()} and chmod 600 it",
        )


def trust_in(ca: Path, key: str) -> ssl.SSLContext:
    """For clients of daemons' web servers: whoever the cluster's CA has signed, by any name, for certificates
    have those of daemons, not of hosts. Raises ConfigError; `key` is what named the file."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{key}: cannot use {ca}: {error.strerror or error}") from error
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def check_private(file: Path, found: os.stat_result, key: str) -> None:
    """Raise ConfigError if others can get at a secret: it belongs to this user and is his alone, or it is
    root's, who may let this user's group read it (as for files that a container is given)."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{key}: {file} belongs to user {found.st_uid}, not to the one who runs this",
            hint=f"chown {os.geteuid()} {file}",
        )
    allowed = 0o740 if found.st_uid == 0 else 0o700
    if mode & ~allowed & 0o777:
        raise ConfigError(
            f"{key}: others can get at {file} (mode {mode:04o})", hint=f"chmod 600 {file}, and make new keys"
        )

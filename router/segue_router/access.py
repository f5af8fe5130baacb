"""Who may give the router orders, and how it speaks to daemons: token, CA, and what lies open.

Clients' own keys are not its affair: they go to the engines as they are. Invariant: the token goes to daemons
only, and under `https://` only to those whose certificate the cluster's CA has signed.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from segue_core.security import (
    CA_FILE,
    Opening,
    Tokens,
    is_loopback,
    load_tokens,
    refuse_unprotected,
    trust_in,
    unprotected,
)
from segue_router.settings import RouterSettings


@dataclass(frozen=True)
class Access:
    """`tokens`: what `/drain` and the like need, and what daemons are shown. `daemons`: trust in daemons that
    are asked by https; None: as for any web server. `openings`: what is open to strangers, as configured.
    `in_clear`: daemons that the token reaches in plain text."""

    tokens: Tokens
    daemons: ssl.SSLContext | None
    openings: tuple[Opening, ...]
    in_clear: tuple[str, ...] = ()

    def session(self) -> aiohttp.ClientSession:
        """For requests to daemons, and to nobody else."""
        # Each daemon's watch keeps a connection for good: no limit, or many of them would lock questions out.
        connector = aiohttp.TCPConnector(limit=0, ssl=self.daemons or True)
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=self.tokens.headers
        )


def load_access(settings: RouterSettings) -> Access:
    """Read what `settings.security` names. Raises ConfigError if it cannot be used, or if something would be
    open to other hosts without it."""
    tokens = load_tokens(settings.security)
    addresses = [("listen.host", settings.listen.host, "token")]
    in_clear = []
    secure = False
    for engine in settings.engines:
        for url in engine.daemon_urls:
            parts = urlsplit(url)
            addresses.append((f"engines[].daemon of {engine.name}", parts.hostname or "", "token"))
            secure = secure or parts.scheme == "https"
            if tokens and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
                in_clear.append(url)
    openings = unprotected(addresses, {"token": bool(tokens)})
    refuse_unprotected(openings, settings.security)
    folder = settings.security.dir
    trusted = trust_in(Path(folder) / CA_FILE, "security.dir") if secure and folder else None
    return Access(tokens, trusted, tuple(openings), tuple(in_clear))

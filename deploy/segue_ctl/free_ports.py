"""Free TCP ports on loopback that stay free until the process they are for listens on them.

A held port is bound but not listened on, with SO_REUSEADDR set after the bind: Linux then lets another
socket with SO_REUSEADDR (every server here) bind and listen, while our own search, which binds without
it, passes the port by. So two launchers never hand out one port, and a restarted server gets its own back.
"""

from __future__ import annotations

import random
import socket

from segue_core.errors import StartupError

LOOPBACK = "127.0.0.1"
# Below the range that the kernel takes outgoing connections' ports from.
_FIRST, _LAST = 20_000, 32_000
_TRIES = 1_000


class PortHolder:
    """Hands out ports and keeps them until closed."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self) -> int:
        """A port that nothing else uses. Raises StartupError if none is found."""
        for _ in range(_TRIES):
            port = random.randint(_FIRST, _LAST)  # noqa: S311 - spread, not secrecy
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                holder.bind((LOOPBACK, port))
            except OSError:
                holder.close()
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sockets.append(holder)
            return port
        raise StartupError(f"no free port between {_FIRST} and {_LAST} in {_TRIES} tries")

    def close(self) -> None:
        """Let all ports go."""
        while self._sockets:
            self._sockets.pop().close()

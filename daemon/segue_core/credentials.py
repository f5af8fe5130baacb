"""Who is at the other end of a unix socket: by the kernel's word, not by its own.

Invariant: an engine and its daemon belong to one user, or one of the two is root's. Each looks for itself: a
daemon that does not run cannot keep another user from putting a socket in its place, and what an engine hands
over there is what its users wrote.
"""

from __future__ import annotations

import os
import socket
import struct

from segue_core.errors import ProtocolError

_CREDENTIALS = struct.Struct("3i")


def check_client(connection: socket.socket) -> int:
    """Only this user's processes and root's may connect. Returns the process id; raises ProtocolError."""
    pid, uid = other_end(connection)
    if uid not in (0, os.geteuid()):
        raise ProtocolError(
            f"process {pid} of user {uid} may not connect; only user {os.geteuid()} and root may"
        )
    return pid


def check_server(connection: socket.socket) -> None:
    """Only a daemon of this user or of root is talked to; root's own choice of a socket is good as it is.
    Raises ProtocolError."""
    _, uid = other_end(connection)
    if os.geteuid() not in (0, uid) and uid != 0:
        raise ProtocolError(
            f"user {uid} listens there, neither this user ({os.geteuid()}) nor root",
            hint="run the daemon as the engine's user, its socket in a folder of that user's own",
        )


def other_end(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return int(pid), int(uid)

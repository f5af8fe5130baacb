"""The local channel's server: the unix socket on which the engine beside us registers and asks.

Owns the socket file and its lock, checks who connects (same user or root), and turns frames into calls
of `LocalHandler`. Holds no policy. Invariant: whatever arrives, only its own connection suffers.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from segue_core.errors import GeometryError, ProtocolError, StartupError
from segue_core.framing import LENGTH, MAX_FRAME_BYTES, close_fds, decode, encode_frame, recv_with_fds
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import Attach, Match, Refused, Register, Registered, Release, ToDaemon
from segue_daemon.supervise import Tasks, supervise

log = structlog.get_logger()

HANDSHAKE_S = 5.0
MAX_CONNECTIONS = 64
MAX_UNREAD_BYTES = 4 << 20


class Connection:
    """One accepted connection. `pid` is the other process as the kernel names it here, whatever it calls
    itself in a PID namespace of its own (0: not visible)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self.reader = reader
        self.writer = writer
        self.pid = pid
        self.leases: set[int] = set()

    def send(self, message: msgspec.Struct) -> None:
        """Queue one frame. An engine that does not read is cut off, not waited for."""
        if self.writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.writer.transport.abort()
            return
        self.writer.write(encode_frame(message))


class LocalHandler(Protocol):
    """What the daemon does with what arrives."""

    def arena(self) -> tuple[int, int, int]:
        """(daemon incarnation, arena descriptor, arena bytes)."""
        ...

    def register(self, message: Register, fds: list[int], connection: Connection) -> Refused | None:
        """Take an engine in (and its descriptors), or say why not."""
        ...

    def gone(self, connection: Connection) -> None:
        """The worker's connection ended: its process is dead or has let go."""
        ...

    def match(self, message: Match, connection: Connection) -> None:
        """Answer on `connection`."""
        ...

    def release(self, message: Release, connection: Connection) -> None:
        """The lease is over."""
        ...


class LocalServer:
    """Listens on `path`."""

    def __init__(self, path: Path, handler: LocalHandler) -> None:
        self._path = path
        self._handler = handler
        self._tasks = Tasks()
        self._listener: socket.socket | None = None
        self._lock = -1

    async def start(self) -> None:
        """Bind and accept. Raises StartupError if the folder is missing or another daemon listens."""
        folder = self._path.parent
        if not folder.is_dir():
            raise StartupError(
                f"socket: folder {folder} does not exist", hint=f"create it: mkdir -p -m 700 {folder}"
            )
        try:
            self._lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartupError(
                f"socket: another segue-daemon listens on {self._path}",
                hint="one daemon per engine: stop the other one, or set another `socket`",
            ) from error
        except OSError as error:
            raise StartupError(f"socket: cannot use {folder}: {error.strerror}") from error
        self._listener = self._bind()
        listener = self._listener
        self._tasks.spawn(supervise("local accept", lambda: self._accept(listener)))

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        mask = os.umask(0o177)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
        except OSError as error:
            listener.close()
            raise StartupError(f"socket: cannot listen on {self._path}: {error.strerror or error}") from error
        finally:
            os.umask(mask)
        listener.listen(16)
        listener.setblocking(False)
        return listener

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(listener)
            if len(self._tasks) > MAX_CONNECTIONS:
                log.warning("too many local connections; refused one", limit=MAX_CONNECTIONS)
                accepted.close()
                continue
            self._tasks.spawn(self._serve(accepted))

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            pid = _check_credentials(accepted)
            accepted.settimeout(HANDSHAKE_S)
            body, fds = await asyncio.to_thread(recv_with_fds, accepted, peer="local connection")
            if not body:
                accepted.close()
                return
            hello = await self._handshake(accepted, body, fds, pid)
        except (ProtocolError, OSError) as error:
            log.warning("local connection refused", reason=str(error))
            accepted.close()
            return
        if hello is not None:
            await self._converse(*hello)

    async def _handshake(
        self, accepted: socket.socket, body: bytes, fds: list[int], pid: int
    ) -> tuple[Connection, bool] | None:
        """Answer the first frame; (connection, is it a worker) to go on with."""
        refused: Refused | None = None
        connection: Connection | None = None
        try:
            message = decode(body, ToDaemon, peer="local connection")
            if not isinstance(message, Register | Attach):
                raise ProtocolError("local connection: first message must be register or attach")
            if message.version != PROTOCOL_VERSION:
                refused = Refused(
                    f"shim speaks protocol {message.version}, daemon {PROTOCOL_VERSION}:"
                    " install the same Segue release on both sides",
                    retry=False,
                )
            accepted.setblocking(False)
            connection = Connection(*await asyncio.open_unix_connection(sock=accepted), pid)
            if refused is None and isinstance(message, Register):
                refused = self._handler.register(message, fds, connection)
        except (ProtocolError, GeometryError, OSError, ValueError) as error:
            refused = Refused(str(error), retry=False)
        if refused is not None or connection is None:
            close_fds(fds)
            log.warning("engine refused", reason=refused.reason if refused else "")
            _answer(accepted, refused or Refused("not understood", retry=False), [])
            if connection is not None:
                connection.writer.close()
            else:
                accepted.close()
            return None
        incarnation, arena_fd, arena_bytes = self._handler.arena()
        _answer(accepted, Registered(incarnation, arena_bytes), [arena_fd])
        return connection, isinstance(message, Register)

    async def _converse(self, connection: Connection, worker: bool) -> None:
        try:
            while True:
                header = await connection.reader.readexactly(LENGTH.size)
                (length,) = LENGTH.unpack(header)
                if length > MAX_FRAME_BYTES:
                    raise ProtocolError(f"local connection: frame of {length} bytes")
                body = await connection.reader.readexactly(length)
                message = decode(body, ToDaemon, peer="local connection")
                if isinstance(message, Match):
                    self._handler.match(message, connection)
                elif isinstance(message, Release):
                    self._handler.release(message, connection)
                else:
                    raise ProtocolError("local connection: register or attach comes first and once")
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ProtocolError as error:
            log.warning("local connection closed", reason=str(error))
        finally:
            # Leases are not ended here: a load may be under way. They end at their deadline.
            if worker:
                self._handler.gone(connection)
            connection.writer.close()

    async def stop(self) -> None:
        """Stop accepting, cut connections, remove the socket file."""
        await self._tasks.end()
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)


def _answer(connection: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Send the handshake's answer: it is small and the first thing on the socket, so it fits at once."""
    frame = encode_frame(message)
    try:
        socket.send_fds(connection, [frame], fds)
    except OSError as error:
        log.warning("local connection ended during its handshake", reason=str(error))


def _check_credentials(connection: socket.socket) -> int:
    """Only this user's processes and root's may connect. Returns the process id; raises ProtocolError."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid not in (0, os.getuid()):
        raise ProtocolError(f"process {pid} of user {uid} may not connect")
    return int(pid)

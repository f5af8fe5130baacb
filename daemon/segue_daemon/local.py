"""The local channel's server: the unix socket on which the engine beside us registers and asks.

Owns the socket file, its lock and its folder, checks who connects (same user or root), and turns frames
into calls of `LocalHandler`. Holds no policy. Invariants: whatever arrives, only its own connection suffers;
another user of the host can neither connect nor put a socket of his own in this one's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from segue_core.credentials import check_client
from segue_core.errors import GeometryError, ProtocolError, StartupError
from segue_core.framing import LENGTH, MAX_FRAME_BYTES, close_fds, decode, encode_frame, recv_with_fds
from segue_core.memory_handle import MAX_PIECES
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import (
    Attach,
    Match,
    Refused,
    Register,
    Registered,
    Release,
    TierMapped,
    ToDaemon,
)
from segue_daemon.engine import exported
from segue_daemon.open_pages import open_beside
from segue_daemon.pages import Pages
from segue_daemon.supervise import Tasks, supervise

log = structlog.get_logger()

HANDSHAKE_S = 5.0
MAX_CONNECTIONS = 64
MAX_UNREAD_BYTES = 4 << 20
MAX_FDS = MAX_PIECES + 8
"""In one registration: each physical allocation of GPU memory has one."""


class Connection:
    """One accepted connection. `pid` is the other process as the kernel names it here, whatever it calls
    itself in a PID namespace of its own (0: not visible)."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, accepted: socket.socket
    ) -> None:
        """`accepted`: the socket below the streams."""
        self.reader = reader
        self.writer = writer
        self.pid = pid
        self._accepted = accepted
        self.leases: set[int] = set()

    def send(self, message: msgspec.Struct) -> None:
        """Queue one frame. An engine that does not read is cut off, not waited for."""
        if self.writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.writer.transport.abort()
            return
        self.writer.write(encode_frame(message))

    def send_with_fds(self, message: msgspec.Struct, fds: list[int]) -> bool:
        """Send one small frame with descriptors, at once; False if that is not possible now."""
        transport = self.writer.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        frame = encode_frame(message)
        try:
            sent = socket.send_fds(self._accepted, [frame], fds)
        except OSError:
            return False
        if sent < len(frame):
            transport.abort()  # half a frame is none
        return sent == len(frame)


class LocalHandler(Protocol):
    """What the daemon does with what arrives."""

    def arena(self) -> tuple[int, int, int]:
        """(daemon incarnation, arena descriptor, arena bytes)."""
        ...

    def refusal(self, message: Register) -> Refused | None:
        """Why an engine cannot be taken in now, whatever it exports."""
        ...

    def register(
        self, message: Register, fds: list[int], connection: Connection, pages: Pages | None
    ) -> Refused | None:
        """Take an engine in (and its descriptors and pages), or say why not."""
        ...

    def tier_mapped(self, message: TierMapped, connection: Connection) -> None:
        """The worker has mapped the daemon's GPU memory, or cannot."""
        ...

    def gone(self, connection: Connection) -> None:
        """The worker's connection ended: its process is dead or has let go."""
        ...

    async def let_go(self) -> None:
        """Return once the memory of an engine that hung up is not mapped here any more, or late."""
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
        self._opening = False

    async def start(self) -> None:
        """Bind and accept. Raises StartupError if the folder cannot be used or another daemon listens."""
        folder = self._path.parent
        own_folder(folder)
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
        fds: list[int] = []
        try:
            pid = check_client(accepted)
            body, fds = await _first_frame(accepted)
            if not body:
                accepted.close()
                return
            hello = await self._handshake(accepted, body, fds, pid)
        except (ProtocolError, OSError) as error:
            log.warning("local connection refused", reason=str(error))
            accepted.close()
            return
        finally:
            close_fds(fds)  # those that came with a message and nobody took over
        if hello is not None:
            await self._converse(*hello)

    async def _handshake(
        self, accepted: socket.socket, body: bytes, fds: list[int], pid: int
    ) -> tuple[Connection, bool] | None:
        """Answer the first frame; (connection, is it a worker) to go on with. Of `fds` those stay that were
        not taken over."""
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
            connection = Connection(*await asyncio.open_unix_connection(sock=accepted), pid, accepted)
            if refused is None and isinstance(message, Register):
                refused = await self._register(message, fds, connection)
        except (ProtocolError, GeometryError, OSError, ValueError) as error:
            refused = Refused(str(error), retry=False)
        if refused is not None or connection is None:
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

    async def _register(self, message: Register, fds: list[int], connection: Connection) -> Refused | None:
        """Hand an engine over, with its descriptors if it is taken in. Memory on a GPU is opened before that,
        beside the event loop, for one engine at a time."""
        pages: Pages | None = None
        if message.geometry.gpu:
            refused = self._handler.refusal(message)
            if refused is None and self._opening:
                refused = Refused("the GPU memory of an engine is being opened; try again", retry=True)
            if refused is not None:
                return refused
            self._opening = True
            log.info("opening an engine's memory", engine=message.engine, gpu=message.geometry.gpu)
            try:
                pages = await open_beside(*exported(message, fds))
            finally:
                self._opening = False
        try:
            refused = self._handler.register(message, list(fds), connection, pages)
            if refused is None:
                fds.clear()
                pages = None
            return refused
        finally:
            if pages is not None:
                pages.close()

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
                elif isinstance(message, TierMapped) and worker:
                    self._handler.tier_mapped(message, connection)
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
            try:
                if worker:
                    await self._handler.let_go()
            finally:
                connection.writer.close()

    async def stop(self) -> None:
        """Stop accepting, cut connections, remove the socket file."""
        await self._tasks.end()
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)


def own_folder(folder: Path) -> None:
    """Make sure that `folder` is there (its parent must be) and that no other user can enter it. Raises
    StartupError."""
    hint = f"create it: mkdir -p -m 700 {folder}"
    try:
        if not folder.exists() and folder.parent.is_dir():
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)  # whatever the umask took away
        found = folder.stat()
    except FileNotFoundError as error:
        raise StartupError(f"socket: folder {folder} does not exist", hint=hint) from error
    except OSError as error:
        raise StartupError(f"socket: cannot use {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StartupError(f"socket: {folder} is not a folder", hint=hint)
    if found.st_uid not in (0, os.geteuid()):
        raise StartupError(
            f"socket: folder {folder} belongs to user {found.st_uid}, who could put another socket there",
            hint=f"chown {os.geteuid()} {folder}, or set `socket` in a folder of this user's own",
        )
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise StartupError(
            f"socket: other users may use the folder {folder} (mode {mode:04o})",
            hint=f"chmod 700 {folder}, or set `socket` in a folder of its own (made if its parent is there)",
        )


async def _first_frame(accepted: socket.socket) -> tuple[bytes, list[int]]:
    """The first frame and its descriptors, all of it within `HANDSHAKE_S`: whoever sends it byte by byte must
    not keep the thread that others wait for."""
    accepted.settimeout(HANDSHAKE_S)
    late = asyncio.get_running_loop().call_later(HANDSHAKE_S, _hang_up, accepted)
    try:
        return await asyncio.to_thread(recv_with_fds, accepted, peer="local connection", max_fds=MAX_FDS)
    finally:
        late.cancel()


def _hang_up(connection: socket.socket) -> None:
    """Whoever reads from it sees its end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _answer(connection: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Send the handshake's answer: it is small and the first thing on the socket, so it fits at once."""
    frame = encode_frame(message)
    try:
        socket.send_fds(connection, [frame], fds)
    except OSError as error:
        log.warning("local connection ended during its handshake", reason=str(error))

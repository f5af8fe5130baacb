"""TLS on the bulk connection: contexts, names in certificates, and one class for each direction.

Bulk flows one way, so each side has what costs it least (measured): the writer's `SSLSocket` encrypts from
where the bytes are; the receiver reads large pieces from the socket and decrypts them to where they stay.
Invariants: only TLS 1.3, both sides show a certificate of the cluster's CA; the event loop never waits, and
has its turn after `TURN_BYTES`; what was not decrypted and verified is not handed out.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from segue_core.errors import ConfigError, ProtocolError
from segue_core.security import CA_FILE, CERTIFICATE_FILE, KEY_FILE, check_unaltered, read_secret
from segue_daemon.ready import readable, writable

READ_BYTES = 256 << 10
"""What one read takes from the socket."""
TURN_BYTES = 1 << 20
"""Others have their turn after so much: half a millisecond of encryption."""
RECORD_BYTES = 2 << 10
"""A record costs as much time as so many bytes, however little is in it."""
HANDSHAKE_READ_BYTES = 16 << 10
GREETED = b"\x01"
"""The receiver says so when it takes a bulk connection: a writer whose certificate is refused would hear of
it only later."""
KEY = "security.dir"


def server_context(folder: Path) -> ssl.SSLContext:
    """Accepts whoever shows a certificate of the CA. Raises ConfigError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder)
    context.num_tickets = 0  # a resumed session would not show its certificate again
    return context


def client_context(folder: Path) -> ssl.SSLContext:
    """Connects to whoever shows a certificate of the CA; the name is compared by the caller (`names_in`).
    Raises ConfigError."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder)


def web_context(folder: Path) -> ssl.SSLContext:
    """For the HTTP endpoint: clients show a token, not a certificate. Raises ConfigError."""
    context = server_context(folder)
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names of daemons, not of hosts
    context.verify_mode = ssl.CERT_REQUIRED
    read_secret(folder / KEY_FILE, KEY)
    check_unaltered(folder / CA_FILE, KEY)
    check_unaltered(folder / CERTIFICATE_FILE, KEY)
    try:
        context.load_verify_locations(cafile=folder / CA_FILE)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{KEY}: cannot use {folder / CA_FILE}: {tls_problem(error)}") from error
    try:
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        files = f"{folder / CERTIFICATE_FILE} with {KEY_FILE}"
        raise ConfigError(f"{KEY}: cannot use {files}: {tls_problem(error)}") from error
    return context


def _no_password() -> str:
    return ""  # an encrypted key is refused; without this, OpenSSL would ask on the terminal


def tls_problem(error: Exception) -> str:
    """What went wrong, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def names_in(certificate: Any) -> frozenset[str]:
    """The names (DNS, as they stand) in what `getpeercert` returned for a verified certificate."""
    names = certificate.get("subjectAltName", ()) if certificate else ()
    return frozenset(value for kind, value in names if kind == "DNS")


def rehearse(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Both roles of this daemon meet in memory: what peers would check is checked here. Returns our
    certificate as a verified peer's. Raises ssl.SSLError as they would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (one, other, one, other, one):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    shown = other.getpeercert()
    assert shown, "a handshake in memory takes two rounds"
    return dict(shown)


class SecureSender:
    """The writer's end of a bulk connection: sends much, reads next to nothing."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """Takes over `connection`, which is connected and does not block."""
        self._socket = context.wrap_socket(connection, do_handshake_on_connect=False)

    async def handshake(self, name: str) -> None:
        """Raises ProtocolError unless it is `name` that answers. Has no deadline of its own."""
        while True:
            try:
                self._socket.do_handshake()
                break
            except ssl.SSLWantReadError:
                await readable(self._socket)
            except ssl.SSLWantWriteError:
                await writable(self._socket)
            except (ssl.SSLError, OSError) as error:
                raise ProtocolError(f"TLS with peer {name}: {tls_problem(error)}") from error
        names = names_in(self._socket.getpeercert())
        if name not in names:
            shown = ", ".join(sorted(names)) or "no name"
            raise ProtocolError(f"TLS: peer {name} shows a certificate of {shown}")

    async def sendall(self, data: bytes | memoryview) -> None:
        """Send all of `data`."""
        rest, turn = memoryview(data), TURN_BYTES
        while rest:
            try:
                sent = self._socket.send(rest)
            except ssl.SSLWantWriteError:
                await writable(self._socket)
                continue
            except ssl.SSLError as error:
                raise ProtocolError(f"TLS: {tls_problem(error)}") from error
            rest = rest[sent:]
            turn -= sent
            if turn <= 0:
                turn = TURN_BYTES
                await asyncio.sleep(0)

    async def read_byte(self) -> bytes:
        """One byte; empty at the end. Raises ProtocolError if the peer refuses this side's certificate: in
        TLS 1.3 that is heard only after the handshake."""
        while True:
            try:
                return self._socket.recv(1)
            except ssl.SSLWantReadError:
                await readable(self._socket)
            except ssl.SSLError as error:
                raise ProtocolError(f"TLS: the peer says: {tls_problem(error)}") from error

    def close(self) -> None:
        """Close the socket. Nobody may be waiting on it."""
        self._socket.close()


class SecureReceiver:
    """The receiver's end of a bulk connection: reads much, sends next to nothing."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """Takes over `connection`, which is connected and does not block."""
        self._socket = connection
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]
        self._buffer = memoryview(bytearray(HANDSHAKE_READ_BYTES))
        self._turn = TURN_BYTES
        self.wait: Callable[[socket.socket], Awaitable[None]] = readable
        """Called when nothing has come: returns once something has."""
        self.names: frozenset[str] = frozenset()
        """Those in the peer's certificate, once the handshake is over."""

    async def handshake(self) -> None:
        """Raises ProtocolError if the peer is none of ours. Has no deadline of its own."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                if not await self._more():
                    raise ProtocolError("TLS: hung up during the handshake") from None
            except ssl.SSLError as error:
                await self._flush()  # the alert, so that the peer can say why
                raise ProtocolError(f"TLS: {tls_problem(error)}") from error
        await self._flush()
        self.names = names_in(self._tls.getpeercert())
        self._buffer = memoryview(bytearray(READ_BYTES))

    async def fill(self, target: memoryview, at_least: int | None = None) -> int:
        """Fill `target`; less only if the stream ends before, or if `at_least` bytes or more are there and
        nothing else has come."""
        have, enough = 0, len(target) if at_least is None else at_least
        while have < len(target):
            try:
                count = self._read(len(target) - have, target[have:])
            except ssl.SSLWantReadError:
                if have >= enough or not await self._more():
                    return have
                continue
            except ssl.SSLError as error:
                raise ProtocolError(f"TLS: {tls_problem(error)}") from error
            if not count:
                return have
            have += count
            await self._spend(RECORD_BYTES)
        return have

    async def sendall(self, data: bytes) -> None:
        """Send a few bytes."""
        self._tls.write(data)
        await self._flush()

    async def _more(self) -> bool:
        await self._flush()  # of the handshake, or that this side renews its keys too: that would pile up
        while True:
            try:
                count = self._socket.recv_into(self._buffer)
                break
            except BlockingIOError:
                await self.wait(self._socket)
        self._in.write(self._buffer[:count])
        await self._spend(count)
        return count > 0

    async def _spend(self, nbytes: int) -> None:
        self._turn -= nbytes
        if self._turn <= 0:
            self._turn = TURN_BYTES
            await asyncio.sleep(0)

    async def _flush(self) -> None:
        if self._out.pending:
            await asyncio.get_running_loop().sock_sendall(self._socket, self._out.read())

    def close(self) -> None:
        """Close the socket. Nobody may be waiting on it."""
        self._socket.close()

"""Opening a link to a peer: the greeting on control, then the bulk connection that belongs to it.

Each step has a deadline. Raises ProtocolError if the peer is another one, or speaks another protocol;
TimeoutError and OSError if it cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

import zmq
import zmq.asyncio

from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import BulkHello, Control, Hello, Welcome
from segue_daemon.curve import Monitor, answer_or_failure, secure_client
from segue_daemon.keys import Keys
from segue_daemon.settings import DaemonSettings
from segue_daemon.tls import GREETED, SecureSender
from segue_daemon.wire import CONTROL_UNREAD_BYTES, encode, send_bulk, tune

MAX_ANSWER_BYTES = 4 << 10
"""Largest answer to a link: a nack with the longest name of a sequence takes a sixth of it."""
MAX_QUESTIONS = 10_000
"""What the peer has not read."""


def control_socket(
    context: zmq.asyncio.Context, keys: Keys | None, name: str, *, max_bytes: int = MAX_ANSWER_BYTES
) -> zmq.asyncio.Socket:
    """A control socket that can talk to the peer `name`, whose messages have at most `max_bytes`. Raises
    ConfigError if its key is not there."""
    control = context.socket(zmq.DEALER)
    control.linger = 0
    control.maxmsgsize = max_bytes
    control.sndhwm, control.rcvhwm = MAX_QUESTIONS, CONTROL_UNREAD_BYTES // max_bytes
    try:
        if keys is not None:
            secure_client(control, keys, name)
    except BaseException:
        control.close()
        raise
    return control


def hello_of(settings: DaemonSettings, incarnation: int, labels: tuple[str, str]) -> Hello:
    """How this daemon greets its peers."""
    host, zone = labels
    group = settings.group
    return Hello(PROTOCOL_VERSION, settings.name, incarnation, host, zone, rank=group.rank, ranks=group.ranks)


@dataclass(frozen=True)
class Peer:
    """Whom to reach: by `address` (host:port), each step within `peer_s`, with `keys` if there are any."""

    name: str
    address: str
    peer_s: float
    keys: Keys | None = None


async def greet(control: zmq.asyncio.Socket, hello: Hello, peer: Peer) -> Welcome:
    """Connect and say hello; the answer, if it comes from the peer that is meant."""
    name, address = peer.name, peer.address
    monitor = Monitor(control, secured=peer.keys is not None)
    try:
        async with asyncio.timeout(peer.peer_s):
            control.connect(f"tcp://{address}")
            await control.send(encode(hello))
            while True:
                answer = asyncio.ensure_future(_received(control))
                message = decode(await answer_or_failure(answer, monitor, peer=name), Control, peer=name)
                if isinstance(message, Welcome):
                    break
    finally:
        monitor.close()
    if message.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"peer {name} speaks protocol {message.version}, this daemon {PROTOCOL_VERSION}",
            hint="run one Segue release everywhere",
        )
    if message.name != name:
        raise ProtocolError(
            f"{address} is {message.name!r}, not {name!r}",
            hint="check `peers` in the configuration",
        )
    if (message.rank, message.ranks) != (hello.rank, hello.ranks):
        raise ProtocolError(
            f"{address} is beside rank {message.rank} of {message.ranks} of {name},"
            f" this daemon beside rank {hello.rank} of {hello.ranks}",
            hint="peers of a rank are the daemons of the same rank: check `peers` and `group`",
        )
    return message


async def _received(control: zmq.asyncio.Socket) -> bytes:
    message: bytes = await control.recv()
    return message


async def open_bulk(hello: Hello, welcome: Welcome, peer: Peer) -> socket.socket | SecureSender:
    """The bulk connection to the peer that said `welcome`; under TLS if there are keys."""
    host = peer.address.rpartition(":")[0]
    plain = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    plain.setblocking(False)
    bulk: socket.socket | SecureSender = plain
    try:
        async with asyncio.timeout(peer.peer_s):
            await asyncio.get_running_loop().sock_connect(plain, (host, welcome.bulk_port))
            tune(plain)
            if peer.keys is None:
                await send_bulk(plain, BulkHello(hello.incarnation, welcome.ticket))
                return plain
            bulk = secured = SecureSender(plain, peer.keys.client)
            await secured.handshake(peer.name)
            await send_bulk(secured, BulkHello(hello.incarnation, welcome.ticket))
            if await secured.read_byte() != GREETED:
                raise ProtocolError(f"peer {welcome.name} did not take the bulk connection")
    except BaseException:
        bulk.close()
        raise
    return bulk


async def until_closed(bulk: socket.socket | SecureSender) -> None:
    """Return when the peer closes the bulk connection (it says nothing more on it)."""
    with contextlib.suppress(ConnectionError):
        if isinstance(bulk, SecureSender):
            await bulk.read_byte()
        else:
            await asyncio.get_running_loop().sock_recv(bulk, 1)

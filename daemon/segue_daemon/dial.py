"""Opening a link to a peer: the greeting on control, then the bulk connection that belongs to it.

Each step has a deadline. Raises ProtocolError if the peer is another one, or speaks another protocol;
TimeoutError and OSError if it cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import zmq.asyncio

from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import BulkHello, Control, Hello, Welcome
from segue_daemon.wire import encode, send_bulk, tune


async def greet(
    control: zmq.asyncio.Socket, hello: Hello, *, name: str, address: str, peer_s: float
) -> Welcome:
    """Say hello; the answer, if it comes from `name` within `peer_s`."""
    async with asyncio.timeout(peer_s):
        await control.send(encode(hello))
        while True:
            message = decode(await control.recv(), Control, peer=name)
            if isinstance(message, Welcome):
                break
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
    return message


async def open_bulk(hello: Hello, welcome: Welcome, *, address: str, peer_s: float) -> socket.socket:
    """The bulk connection to the peer that said `welcome`."""
    host = address.rpartition(":")[0]
    bulk = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bulk.setblocking(False)
    try:
        async with asyncio.timeout(peer_s):
            await asyncio.get_running_loop().sock_connect(bulk, (host, welcome.bulk_port))
            tune(bulk)
            await send_bulk(bulk, BulkHello(hello.incarnation, welcome.ticket))
    except BaseException:
        bulk.close()
        raise
    return bulk


async def until_closed(bulk: socket.socket) -> None:
    """Return when the peer closes the bulk connection (it never sends on it)."""
    with contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_recv(bulk, 1)

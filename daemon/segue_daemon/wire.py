"""Bytes on the peer channel: encoding, socket options, sending bulk frames (`bulk_reader.py` reads them).

Invariant: a frame is sent whole, or the connection is of no further use.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator

import msgspec

from segue_core.clock import Clock
from segue_core.messages.peer import BulkHello, Delta, End, bulk_head
from segue_daemon.ready import writable
from segue_daemon.tls import SecureSender

SOCKET_BUFFER_BYTES = 4 << 20
MAX_BUFFERS = 256
"""In one system call; the kernel takes 1,024."""
JOINED_BYTES = 64 << 10
"""Under TLS up to here one copy is cheaper than a second record and a second system call."""
CONTROL_UNREAD_BYTES = 32 << 20
"""What may come over one control connection and wait to be read; more waits at its sender."""
SLICE_NS = 2_000_000
"""How long a task may go on without waiting for anything."""
Frame = tuple[BulkHello | Delta | End, memoryview | None]
"""A message, and its payload if it has one."""
encode = msgspec.msgpack.encode


def tune(connection: socket.socket) -> None:
    """Options of a bulk connection. Cubic beats BBR by a quarter on short paths (measured)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    except OSError:
        return  # not built into this kernel: its default will do


class Slices:
    """Gives the event loop back in time: a socket that is always ready never makes its task wait, and nobody
    else would run as long as that lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_ns = clock.now_ns()

    @property
    def over(self) -> bool:
        """Whether others may have waited for `SLICE_NS`."""
        return self._clock.now_ns() - self._since_ns >= SLICE_NS

    async def share(self) -> None:
        """Let others run if they may have waited for `SLICE_NS`."""
        if self.over:
            await asyncio.sleep(0)
            self._since_ns = self._clock.now_ns()


async def send_bulk(
    connection: socket.socket | SecureSender,
    message: BulkHello | Delta | End,
    payload: memoryview | None = None,
) -> int:
    """Send one frame; returns its bytes on the wire. `payload` may be changed afterwards."""
    return await send_frames(connection, [(message, payload)])


async def send_frames(connection: socket.socket | SecureSender, frames: Iterable[Frame]) -> int:
    """Send frames together; returns their bytes on the wire. The payloads may be changed afterwards."""
    buffers: list[memoryview] = []
    for message, payload in frames:
        header = encode(message)
        buffers.append(memoryview(bulk_head(header, len(payload or b"")) + header))
        if payload:
            buffers.append(payload)
    nbytes = sum(map(len, buffers))
    if isinstance(connection, SecureSender):
        for joined in _joined(buffers):
            await connection.sendall(joined)
    else:
        for first in range(0, len(buffers), MAX_BUFFERS):
            await _send_plain(connection, buffers[first : first + MAX_BUFFERS])
    return nbytes


def _joined(buffers: list[memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, what is short together with what comes before it."""
    short: list[memoryview] = []
    for buffer in buffers:
        if short and sum(map(len, short)) + len(buffer) > JOINED_BYTES:
            yield b"".join(short)
            short.clear()
        if len(buffer) > JOINED_BYTES:
            yield buffer
        else:
            short.append(buffer)
    if short:
        yield b"".join(short)


async def _send_plain(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Header and payload in one call, straight to the kernel; the event loop comes in only to wait."""
    while True:
        try:
            sent = connection.sendmsg(buffers)
        except BlockingIOError:
            await writable(connection)
            continue
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if not buffers:
            return
        buffers[0] = buffers[0][sent:]

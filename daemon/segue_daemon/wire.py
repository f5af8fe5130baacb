"""Bytes on the peer channel: encoding, socket options, sending and receiving bulk frames.

Invariant: a receiver reads exactly what a header announced, after it was checked against the limits.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from segue_core.clock import Clock
from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.messages.peer import (
    BULK_HEADER,
    MAX_HEADER_BYTES,
    Bulk,
    BulkHello,
    Delta,
    End,
    bulk_head,
)
from segue_daemon.ready import readable, writable
from segue_daemon.tls import SecureReceiver, SecureSender

SOCKET_BUFFER_BYTES = 4 << 20
WAKE_BYTES = 512 << 10
"""A reader that misses more is woken when so much has come, or a part of what the buffers hold."""
WAKES_PER_BUFFER = 16
"""Far less than a buffer: a sender whose buffer is full with less than the reader waits for would get on only
by the delayed acks of TCP, 40 ms each."""
TURN_BYTES = 8 << 20
"""Others have their turn after so much, even if the next bytes are there already."""
JOINED_BYTES = 64 << 10
"""Under TLS up to here one copy is cheaper than a second record and a second system call."""
HEADER_S = 30.0
"""Within this a header is here whole: no peer has memory held for it longer."""
CONTROL_UNREAD_BYTES = 32 << 20
"""What may come over one control connection and wait to be read; more waits at its sender."""
SLICE_NS = 2_000_000
"""How long a task may go on without waiting for anything."""
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

    async def share(self) -> None:
        """Let others run if they may have waited for `SLICE_NS`."""
        if self._clock.now_ns() - self._since_ns >= SLICE_NS:
            await asyncio.sleep(0)
            self._since_ns = self._clock.now_ns()


async def send_bulk(
    connection: socket.socket | SecureSender,
    message: BulkHello | Delta | End,
    payload: memoryview | None = None,
) -> int:
    """Send one frame; returns its bytes on the wire. `payload` may be changed afterwards."""
    header = encode(message)
    length = len(payload) if payload is not None else 0
    head = bulk_head(header, length) + header
    if isinstance(connection, SecureSender):
        joined = head + payload if payload and length <= JOINED_BYTES else head
        await connection.sendall(joined)
        if len(joined) < len(head) + length:
            await connection.sendall(payload or b"")
    else:
        await _send_plain(connection, [memoryview(head), payload] if payload else [memoryview(head)])
    return len(head) + length


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


async def recv_bulk_header(
    connection: socket.socket | SecureReceiver, *, peer: str, limit: int = MAX_HEADER_BYTES
) -> tuple[BulkHello | Delta | End, int, int]:
    """Receive a frame's header: (message, payload bytes, header bytes on the wire).

    Raises EOFError at a clean end, ProtocolError on anything malformed, TimeoutError if it stops in between.
    """
    head = bytearray(BULK_HEADER.size)
    if not await recv_into(connection, memoryview(head), at_start=True):
        raise EOFError
    header_bytes, payload_bytes, _ = BULK_HEADER.unpack(head)
    if header_bytes > limit:
        raise ProtocolError(f"{peer}: bulk header of {header_bytes} bytes")
    header = bytearray(header_bytes)
    async with asyncio.timeout(HEADER_S):
        await recv_into(connection, memoryview(header))
    if head != bulk_head(header, payload_bytes):
        raise ProtocolError(f"{peer}: a bulk header changed on its way")
    return decode(memoryview(header), Bulk, peer=peer), payload_bytes, BULK_HEADER.size + header_bytes


async def recv_into(
    connection: socket.socket | SecureReceiver, target: memoryview, *, at_start: bool = False
) -> bool:
    """Fill `target`. False if the stream ends before its first byte and `at_start` allows that.

    Raises ProtocolError if the stream ends inside.
    """
    if isinstance(connection, SecureReceiver):
        have = await connection.fill(target)
        if have < len(target) and (have or not at_start):
            raise ProtocolError("stream ended inside a frame")
        return have == len(target)
    have = 0
    turn = TURN_BYTES
    while have < len(target):
        try:
            count = connection.recv_into(target[have:])
        except BlockingIOError:
            # Wake up for much at once: fewer system calls here, fewer wake-ups for whoever sends.
            room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // WAKES_PER_BUFFER
            enough = min(len(target) - have, WAKE_BYTES, room)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            await readable(connection)
            turn = TURN_BYTES
            continue
        if not count:
            if at_start and not have:
                return False
            raise ProtocolError("stream ended inside a frame")
        have += count
        turn -= count
        if turn <= 0:
            turn = TURN_BYTES
            await asyncio.sleep(0)
    return True

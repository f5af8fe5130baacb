"""Reads the frames of one bulk connection: small ones together, large payloads straight to their place.

Reads ahead into one buffer, so that small frames cost less than a system call each; what is larger than the
buffer goes from the socket to where it stays. Holds no policy. Invariants: a frame is handed out only as its
header announced it, after that was checked against the limits; before it waits for bytes it says so, and a
frame that has begun is not waited for longer than its deadline; a socket that never runs dry does not keep
the event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

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
from segue_daemon.ready import readable
from segue_daemon.tls import SecureReceiver

SMALL_AHEAD_BYTES = 16 << 10
"""Read ahead where payloads go straight to their place: what comes with a header is copied once more."""
AHEAD_BYTES = 512 << 10
"""Read ahead once small payloads come: a few at once, which then still are in the processor's cache."""
WAKE_BYTES = 512 << 10
"""A reader that misses more is woken when so much has come, or a part of what the buffers hold."""
WAKES_PER_BUFFER = 16
"""Far less than a buffer: a sender whose buffer is full with less than the reader waits for would get on only
by the delayed acks of TCP, 40 ms each."""
TURN_BYTES = 8 << 20
"""Others have their turn after so much, even if the next bytes are there already."""
HEADER_S = 30.0
"""Within this a header is here whole: no peer has memory held for it longer."""
PAYLOAD_S = 30.0
"""And within this what it announced."""
SKIP_BYTES = 1 << 20


async def _nothing() -> None:
    pass


class BulkReader:
    """The receiving end of one bulk connection, which nobody else reads from."""

    def __init__(
        self,
        connection: socket.socket | SecureReceiver,
        *,
        peer: str,
        before_wait: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """`peer`: whose bytes these are, for errors. `before_wait` is called each time that there is nothing
        to read."""
        self.peer = peer
        self.before_wait = before_wait
        self._connection = connection
        self._buffer = memoryview(bytearray(SMALL_AHEAD_BYTES))
        self._start = self._end = 0
        self._deadline: float | None = None
        self._turn = TURN_BYTES
        self._low_water = 0
        if isinstance(connection, SecureReceiver):
            connection.wait = self._wait
            self._most_low_water = 1  # its records are read as they come
        else:
            room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // WAKES_PER_BUFFER
            self._most_low_water = min(WAKE_BYTES, room)

    async def header(self, limit: int = MAX_HEADER_BYTES) -> tuple[BulkHello | Delta | End, int, int]:
        """The next frame's header: (message, payload bytes, header bytes on the wire). The payload is to be
        read before the next call.

        Raises EOFError at a clean end, ProtocolError on what is malformed, TimeoutError if it stops inside.
        """
        self._deadline = None
        if self._start == self._end and not await self._read_ahead():
            raise EOFError
        self._deadline = asyncio.get_running_loop().time() + HEADER_S
        head_bytes = BULK_HEADER.size
        head = bytes(await self.view(head_bytes))
        header_bytes, payload_bytes, _ = BULK_HEADER.unpack(head)
        if header_bytes > limit:
            raise ProtocolError(f"{self.peer}: bulk header of {header_bytes} bytes")
        header = bytes(await self.view(header_bytes))
        if head != bulk_head(header, payload_bytes):
            raise ProtocolError(f"{self.peer}: a bulk header changed on its way")
        message = decode(header, Bulk, peer=self.peer)
        self._deadline = asyncio.get_running_loop().time() + PAYLOAD_S
        return message, payload_bytes, head_bytes + header_bytes

    async def view(self, count: int) -> memoryview:
        """The next `count` bytes, good until the next call. Raises ProtocolError if the stream ends."""
        if count > AHEAD_BYTES:
            target = memoryview(bytearray(count))
            await self.fill(target)
            return target
        if count > len(self._buffer):
            self._grow()
        while self._end - self._start < count:
            if not await self._read_ahead(count):
                raise ProtocolError("stream ended inside a frame")
        start = self._start
        self._start += count
        return self._buffer[start : start + count]

    async def fill(self, target: memoryview) -> None:
        """The next bytes into `target`. Raises ProtocolError if the stream ends before."""
        have = min(len(target), self._end - self._start)
        target[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        while have < len(target):
            count = await self._receive(target[have:], len(target) - have)
            if not count:
                raise ProtocolError("stream ended inside a frame")
            have += count

    async def skip(self, count: int) -> None:
        """Read past `count` bytes. Raises ProtocolError if the stream ends before."""
        ahead = min(count, self._end - self._start)
        self._start += ahead
        count -= ahead
        sink = memoryview(bytearray(min(count, SKIP_BYTES)))
        while count:
            step = min(count, len(sink))
            await self.fill(sink[:step])
            count -= step

    def _grow(self) -> None:
        """Small payloads come: have room for some of them."""
        buffer = memoryview(bytearray(AHEAD_BYTES))
        kept = self._end - self._start
        buffer[:kept] = self._buffer[self._start : self._end]
        self._buffer, self._start, self._end = buffer, 0, kept

    async def _read_ahead(self, wanted: int = 1) -> bool:
        """Read what there is into the buffer, for `wanted` bytes in a row; False at the end of the stream."""
        kept = self._end - self._start
        if not kept:
            self._start = self._end = 0
        elif len(self._buffer) - self._start < wanted:
            self._buffer[:kept] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, kept
        count = await self._receive(self._buffer[self._end :], wanted - kept)
        self._end += count
        return count > 0

    async def _receive(self, target: memoryview, missing: int) -> int:
        """Read what there is into `target`, at least a byte; 0 at the end. Once awake it waits for `missing`
        bytes, or a good part of them."""
        if isinstance(self._connection, SecureReceiver):
            return await self._connection.fill(target, 1)
        while True:
            try:
                count = self._connection.recv_into(target)
                break
            except BlockingIOError:
                # Wake up for much at once: fewer system calls here, fewer wake-ups for whoever sends.
                enough = min(missing, self._most_low_water)
                if enough != self._low_water:
                    self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
                    self._low_water = enough
                await self._wait(self._connection)
        self._turn -= count
        if self._turn <= 0:
            self._turn = TURN_BYTES
            await asyncio.sleep(0)
        return count

    async def _wait(self, connection: socket.socket) -> None:
        await self.before_wait()
        if self._deadline is None:
            await readable(connection)
        else:
            async with asyncio.timeout_at(self._deadline):
                await readable(connection)
        self._turn = TURN_BYTES

"""Wires: a TCP proxy in this process for each connection that is to be cut, slowed down or left hanging.

Owns the listening sockets and what runs through them; when and what is harmed is the director's affair.
Bytes are never changed or reordered, only late or cut off. Healing a `hole` lets go on what was held, as a
network does that works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterable
from typing import Literal

Harm = Literal["", "cut", "hole", "slow"]
"""cut: connections are reset, new ones too. hole: nothing passes, nothing is closed. slow: SLOW_S a piece."""
SLOW_S = 0.03
PIECE_BYTES = 1 << 16


class Wire:
    """From one process to another, over as many ports as that one listens on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.harm: Harm = ""
        self._well = asyncio.Event()
        self._well.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int, target_host: str, target_port: int) -> None:
        """Pass on what comes to `host`:`port`."""

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._through(reader, writer, target_host, target_port)
            except asyncio.CancelledError:
                return  # `close`; streams would report it as a failure
            finally:
                self._tasks.discard(task)

        self._servers.append(await asyncio.start_server(accepted, host, port, reuse_address=True))

    def hurt(self, harm: Harm) -> None:
        """From now on; empty: it is well again."""
        self.harm = harm
        if harm == "hole":
            self._well.clear()
        else:
            self._well.set()
        if harm == "cut":
            for writer in tuple(self._writers):
                _reset(writer)

    async def close(self) -> None:
        """End everything that runs through it."""
        for server in self._servers:
            server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _through(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        await self._well.wait()
        if self.harm == "cut":
            _reset(writer)
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:
            _reset(writer)  # the nearest to a refusal that a proxy can say
            return
        both = (writer, there_writer)
        self._writers.update(both)
        try:
            await _first_of(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers.difference_update(both)
            for each in both:
                each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._well.wait()
                if self.harm == "slow":
                    await asyncio.sleep(SLOW_S)
                writer.write(data)
                await writer.drain()


async def _first_of(*pumps: object) -> None:
    """Until one direction has ended: then the connection is over for both."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed already; uvloop says ValueError
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport = writer.transport
    transport.abort()


async def close_all(wires: Iterable[Wire]) -> None:
    """End them."""
    await asyncio.gather(*(wire.close() for wire in wires))

"""Waiting for a socket in the event loop, where asyncio's own calls would read or write on their terms.

At most one task waits to read from a socket, and one to write to it. Invariant: when a wait is over, also by
cancellation, the loop does not watch the socket for it any more.
"""

from __future__ import annotations

import asyncio
import socket


async def readable(connection: socket.socket) -> None:
    """Return once there is something to read, or nothing will come any more."""
    loop, number = asyncio.get_running_loop(), connection.fileno()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(number, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(number)


async def writable(connection: socket.socket) -> None:
    """Return once there is room to write."""
    loop, number = asyncio.get_running_loop(), connection.fileno()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(number, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(number)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

"""Bulk frames over real sockets: whole whatever the sockets take at a time, and nobody else is starved."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from segue_core.errors import ProtocolError
from segue_core.messages.peer import End, bulk_head
from segue_daemon import wire
from segue_daemon.wire import recv_bulk_header, recv_into, send_bulk

MESSAGE = End("s", 1, 7)


def pair(buffer_bytes: int) -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection that take little at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
    return one, other


@pytest.mark.parametrize("payload_bytes", [0, 1, 100_000, 3_000_001])
def test_a_frame_arrives_whole_through_small_buffers(payload_bytes: int) -> None:
    """Sender and receiver wait for each other many times within a frame, and the next one is read rightly."""

    async def run() -> None:
        one, other = pair(1 << 16)
        payload = os.urandom(payload_bytes)

        async def send() -> None:
            for _ in range(2):
                await send_bulk(one, MESSAGE, memoryview(payload))

        sending = asyncio.create_task(send())
        for _ in range(2):
            message, length, _ = await recv_bulk_header(other, peer="a")
            assert (message, length) == (MESSAGE, payload_bytes)
            target = bytearray(length)
            await recv_into(other, memoryview(target))
            assert target == payload
        await sending
        one.close()
        with pytest.raises(EOFError):
            await recv_bulk_header(other, peer="a")
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_sender_that_goes_in_the_middle_of_a_frame_is_noticed() -> None:
    """A reader that waits for much at once still hears that there is no more."""

    async def run() -> None:
        one, other = pair(1 << 20)
        one.send(b"x" * 10)
        reading = asyncio.create_task(recv_into(other, memoryview(bytearray(1 << 20))))
        await asyncio.sleep(0)
        one.close()
        with pytest.raises(ProtocolError):
            await reading
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_others_run_while_a_socket_never_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are always there already do not keep the event loop."""
    monkeypatch.setattr(wire, "TURN_BYTES", 1000)

    async def run() -> None:
        one, other = pair(1 << 20)
        await send_bulk(one, MESSAGE, memoryview(bytes(50_000)))
        _, length, _ = await recv_bulk_header(other, peer="a")
        turns = 0
        done = False

        async def somebody_else() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        else_ = asyncio.create_task(somebody_else())
        target = memoryview(bytearray(length))
        for at in range(0, length, 10_000):
            await recv_into(other, target[at : at + 10_000])
        done = True
        await else_
        assert turns >= 3
        one.close()
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


async def test_a_header_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that stops in the middle does not have megabytes held for it as long as it likes."""
    monkeypatch.setattr(wire, "HEADER_S", 0.01)
    one, other = pair(1 << 16)
    one.send(bulk_head(bytes(1 << 20), 0) + bytes(100))
    async with asyncio.timeout(30) as patience:
        with pytest.raises(TimeoutError):
            await recv_bulk_header(other, peer="a")
    assert not patience.expired()
    one.close()
    other.close()

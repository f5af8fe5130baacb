"""Bulk frames over real sockets: whole whatever the sockets take at a time, and nobody else is starved."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from segue_core.errors import ProtocolError
from segue_core.messages.peer import End, bulk_head
from segue_daemon import bulk_reader
from segue_daemon.bulk_reader import BulkReader
from segue_daemon.wire import encode, send_bulk, send_frames

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
        reader = BulkReader(other, peer="a")
        for _ in range(2):
            message, length, _ = await reader.header()
            assert (message, length) == (MESSAGE, payload_bytes)
            target = bytearray(length)
            await reader.fill(memoryview(target))
            assert target == payload
        await sending
        one.close()
        with pytest.raises(EOFError):
            await reader.header()
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("apart", [False, True])
def test_frames_of_all_sizes_that_come_together_are_read_one_by_one(apart: bool) -> None:
    """Small ones are read ahead, several at once; none is taken for another, and before the reader waits for
    more it says so."""

    async def run() -> None:
        one, other = pair(1 << 18)
        sizes = [0, 300, 40_000, 0, 200_000, 1, bulk_reader.AHEAD_BYTES + 1, 131_000, 131_000, 131_000, 9]
        payloads = [os.urandom(size) for size in sizes]
        frames = [(End(f"s{at}", 1, 7), memoryview(payload)) for at, payload in enumerate(payloads)]
        waits = 0

        async def note_wait() -> None:
            nonlocal waits
            waits += 1

        async def send() -> None:
            for few in [[frame] for frame in frames] if apart else [frames]:
                await send_frames(one, few)

        sending = asyncio.create_task(send())
        reader = BulkReader(other, peer="a", before_wait=note_wait)
        for at, payload in enumerate(payloads):
            message, length, _ = await reader.header()
            assert message == End(f"s{at}", 1, 7)
            if at % 3 == 2:
                target = bytearray(length)
                await reader.fill(memoryview(target))
                assert target == payload
            else:
                assert await reader.view(length) == payload
        await sending
        assert waits
        one.send(b"x" * 10)
        one.close()
        with pytest.raises(ProtocolError, match="ended inside a frame"):
            await reader.header()
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_sender_that_goes_in_the_middle_of_a_frame_is_noticed() -> None:
    """A reader that waits for much at once still hears that there is no more."""

    async def run() -> None:
        one, other = pair(1 << 20)
        one.send(b"x" * 10)
        reading = asyncio.create_task(BulkReader(other, peer="a").fill(memoryview(bytearray(1 << 20))))
        await asyncio.sleep(0)
        one.close()
        with pytest.raises(ProtocolError):
            await reading
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_others_run_while_a_socket_never_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are always there already do not keep the event loop."""
    monkeypatch.setattr(bulk_reader, "TURN_BYTES", 1000)

    async def run() -> None:
        one, other = pair(1 << 20)
        await send_bulk(one, MESSAGE, memoryview(bytes(50_000)))
        reader = BulkReader(other, peer="a")
        _, length, _ = await reader.header()
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
            await reader.fill(target[at : at + 10_000])
        done = True
        await else_
        assert turns >= 3
        one.close()
        other.close()

    asyncio.run(asyncio.wait_for(run(), 30))


async def test_a_header_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that stops in the middle does not have megabytes held for it as long as it likes."""
    monkeypatch.setattr(bulk_reader, "HEADER_S", 0.01)
    one, other = pair(1 << 16)
    one.send(bulk_head(bytes(1 << 20), 0) + bytes(100))
    async with asyncio.timeout(30) as patience:
        with pytest.raises(TimeoutError):
            await BulkReader(other, peer="a").header()
    assert not patience.expired()
    one.close()
    other.close()


async def test_a_payload_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is room in the store held for one that stops in the middle of what it announced; a writer with
    nothing to say may wait as long as it likes."""
    monkeypatch.setattr(bulk_reader, "HEADER_S", 0.0)
    monkeypatch.setattr(bulk_reader, "PAYLOAD_S", 0.0)
    one, other = pair(1 << 16)
    waits = asyncio.Event()

    async def note_wait() -> None:
        waits.set()

    reader = BulkReader(other, peer="a", before_wait=note_wait)
    header = encode(MESSAGE)
    frame = bulk_head(header, 100) + header + bytes(100)
    one.send(frame)
    async with asyncio.timeout(30) as patience:
        await reader.header()
        await reader.fill(memoryview(bytearray(100)))
        idle = asyncio.create_task(reader.header())
        await waits.wait()  # with the last frame's deadline it would be over as it begins
        one.send(frame[:-1])
        await idle
        with pytest.raises(TimeoutError):
            await reader.fill(memoryview(bytearray(100)))
    assert not patience.expired()
    one.close()
    other.close()

"""Writers that vanish: silent ones are noticed, their replicas go; those that are back keep theirs."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from segue_core.clock import MonotonicClock
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import (
    Ack,
    BulkHello,
    Control,
    Delta,
    End,
    Hello,
    Nack,
    NackReason,
    Part,
    PartKind,
    Ping,
    Pong,
    Welcome,
    bulk_head,
)
from segue_daemon import receiver as module
from segue_daemon.deltas import checksum_of_payload
from segue_daemon.receiver import Receiver
from segue_daemon.settings import DaemonSettings, ListenSettings, TimeoutSettings
from segue_daemon.store import ReplicaStore
from segue_daemon.wire import send_bulk
from support.waiting import eventually

PAYLOAD = bytes(64)


class Peer:
    """A writer as seen from its sockets."""

    def __init__(self, context: zmq.asyncio.Context, receiver: Receiver, incarnation: int) -> None:
        self.control = context.socket(zmq.DEALER)
        self.control.linger = 0
        self.control.connect(f"tcp://127.0.0.1:{receiver.control_port}")
        self.incarnation = incarnation
        self.bulk: asyncio.StreamWriter | None = None

    async def ask(self, message: msgspec.Struct) -> msgspec.Struct:
        await self.control.send(msgspec.msgpack.encode(message))
        answer = await asyncio.wait_for(self.control.recv(), 5)
        return msgspec.msgpack.decode(answer, type=Control)

    async def connect(self) -> None:
        welcome = await self.ask(Hello(PROTOCOL_VERSION, "a", self.incarnation))
        assert isinstance(welcome, Welcome)
        self.socket = socket.socket()
        self.socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", welcome.bulk_port))
        await send_bulk(self.socket, BulkHello(self.incarnation, welcome.ticket))

    async def ship(self) -> None:
        part = Part(0, PartKind.WHOLE, b"", 64)
        checksum = checksum_of_payload((part,), PAYLOAD)
        delta = Delta(1, "s", 1, 7, b"f" * 16, b"", 4, 64, 0, bytes(8), (part,), checksum)
        await send_bulk(self.socket, delta, memoryview(PAYLOAD))
        await asyncio.wait_for(self.control.recv(), 5)

    def close(self) -> None:
        self.control.close()
        self.socket.close()


class Stage:
    """A receiver in this process."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.store = ReplicaStore(np.zeros(1 << 16, np.uint8), lease_ns=1)
        settings = DaemonSettings(
            name="b",
            socket="unused",
            listen=ListenSettings(control_port=0),
            timeouts=TimeoutSettings(peer_ms=200),
        )
        self.receiver = Receiver(settings, 1, self.store, self.context, MonotonicClock(), lambda _: None)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(module, "ORPHAN_S", 0.4)
    monkeypatch.setattr(module, "WATCH_S", 0.02)
    made = Stage()
    await made.receiver.start()
    yield made
    await made.receiver.stop()
    made.context.destroy(linger=0)


async def replicas(stage: Stage, count: int) -> None:
    await eventually(lambda: len(stage.store.replicas) == count, f"{count} replicas")


async def test_a_writer_whose_host_lost_power_is_given_up(stage: Stage) -> None:
    """No end of file, no pings: its replicas do not stay for ever."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    await peer.ship()
    await replicas(stage, 1)
    await replicas(stage, 0)
    peer.close()


async def test_a_writer_that_is_back_keeps_what_it_does_not_mention(stage: Stage) -> None:
    """A blip of the link while a sequence waits: the peer said it has it, so it must have it."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    await peer.ship()
    peer.close()
    again = Peer(stage.context, stage.receiver, 5)
    await again.connect()
    loop = asyncio.get_running_loop()
    end = loop.time() + 1.0
    while loop.time() < end:
        await again.ask(Ping(1))
    assert len(stage.store.replicas) == 1
    again.close()


async def test_another_life_of_a_writer_gives_up_what_it_does_not_know(stage: Stage) -> None:
    """A daemon that was restarted will never end what only its last life knew."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    await peer.ship()
    peer.close()
    again = Peer(stage.context, stage.receiver, 6)
    await again.connect()
    async with asyncio.timeout(10):
        while stage.store.replicas:
            await again.ask(Ping(1))
    again.close()


async def test_a_blip_after_a_restart_changes_nothing(stage: Stage) -> None:
    """What a writer's last life left is given up, also when its new life's link breaks in between."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    await peer.ship()
    peer.close()
    reborn = Peer(stage.context, stage.receiver, 6)
    await reborn.connect()
    reborn.close()
    again = Peer(stage.context, stage.receiver, 6)
    await again.connect()
    async with asyncio.timeout(10):
        while stage.store.replicas:
            await again.ask(Ping(1))
    again.close()


@pytest.mark.parametrize("away", [False, True], ids=["connected", "away"])
async def test_a_writer_is_told_what_the_store_gave_up(stage: Stage, away: bool) -> None:
    """It believes in no replica that is gone, also if it was away when that happened."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    await peer.ship()
    if away:
        peer.close()
        await writer_noticed_gone(stage)
    stage.store.budget.limit = 0
    stage.store.evictor.trim(MonotonicClock().now_ns())
    assert not stage.store.replicas
    if away:
        peer = Peer(stage.context, stage.receiver, 5)
        await peer.connect()
    told = msgspec.msgpack.decode(await asyncio.wait_for(peer.control.recv(), 5), type=Control)
    assert isinstance(told, Nack)
    assert (told.seq, told.epoch, told.watermark, told.reason) == ("s", 1, 0, NackReason.NO_ROOM)
    peer.close()


async def test_a_loss_is_told_after_the_acks_from_before_it(stage: Stage) -> None:
    """Acks wait for each other. One that came after the word that its replica is gone would say that the peer
    has room for it."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    await peer.ship()
    (writer,) = stage.receiver._writers.values()
    writer.answers.append(msgspec.msgpack.encode(Ack(2, "s", 1, 2, 1)))
    stage.store.budget.limit = 0
    stage.store.evictor.trim(MonotonicClock().now_ns())
    async with asyncio.timeout(10):
        heard = [msgspec.msgpack.decode(await peer.control.recv(), type=Control) for _ in range(2)]
    assert [type(message) for message in heard] == [Ack, Nack]
    peer.close()


async def writer_noticed_gone(stage: Stage) -> None:
    """Wait until the receiver has noticed that the writer is gone."""
    await eventually(lambda: not stage.receiver._writers, "nobody writes")


async def test_a_writer_that_never_pauses_lets_others_run(stage: Stage) -> None:
    """Bytes that are there already make nobody wait: pings, engines and other writers would starve."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    heard = 0

    def slowly(end: End) -> None:
        nonlocal heard
        heard += 1
        time.sleep(0.001)  # work, while nobody else runs

    stage.store.end = slowly  # type: ignore[method-assign]
    message = msgspec.msgpack.encode(End("nobody", 1, 7))
    frames = (bulk_head(message, 0) + message) * 300
    await asyncio.get_running_loop().sock_sendall(peer.socket, frames)
    longest = 0.0
    while heard < 300:
        began = time.monotonic()
        await asyncio.sleep(0)
        longest = max(longest, time.monotonic() - began)
    assert longest < 0.15
    peer.close()


async def test_answers_that_cannot_be_sent_are_not_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that does not read for a moment hears of every delta later, in order; a sign of life before
    that does not claim that it was told already."""
    peer = Peer(stage.context, stage.receiver, 5)
    await peer.connect()
    send = stage.receiver._send_frames
    blocked = True

    async def at_times(identity: bytes, messages: list[bytes]) -> bool:
        is_pong = isinstance(msgspec.msgpack.decode(messages[0], type=Control), Pong)
        return await send(identity, messages) if is_pong or not blocked else False

    monkeypatch.setattr(stage.receiver, "_send_frames", at_times)
    part = Part(0, PartKind.WHOLE, b"", 64)
    checksum = checksum_of_payload((part,), PAYLOAD)
    for number in range(1, 4):
        delta = Delta(number, f"s{number}", 1, 7, b"f" * 16, b"", 4, 64, 0, bytes(8), (part,), checksum)
        await send_bulk(peer.socket, delta, memoryview(PAYLOAD))
    await replicas(stage, 3)
    pong = await peer.ask(Ping(1))
    assert isinstance(pong, Pong) and pong.consumed_bytes == 0
    blocked = False
    await peer.control.send(msgspec.msgpack.encode(Ping(2)))
    heard: list[msgspec.Struct] = []
    async with asyncio.timeout(10):
        while len(heard) < 4:
            frames = await peer.control.recv_multipart()
            heard += [msgspec.msgpack.decode(frame, type=Control) for frame in frames]
    assert [getattr(message, "seq", "") for message in heard] == ["s1", "s2", "s3", ""]
    last, pong = heard[-2:]
    assert isinstance(last, Ack) and isinstance(pong, Pong) and pong.consumed_bytes == last.consumed_bytes
    peer.close()

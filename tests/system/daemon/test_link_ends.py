"""An end that was under way when the link broke is said again; one that arrived for sure is not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from segue_core.clock import MonotonicClock
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import Ack, BulkHello, Control, Delta, End, Hello, Pong, Welcome
from segue_daemon.bulk_reader import BulkReader
from segue_daemon.link import Link
from segue_daemon.placement import Placement
from segue_daemon.settings import DaemonSettings, PeerSettings, TimeoutSettings
from segue_daemon.shipment import Ready
from segue_daemon.wire import encode
from support.waiting import eventually

pytestmark = pytest.mark.timeout(20)


class NoEngine:
    """A daemon without an engine."""

    def drain(self) -> None:
        return

    def fence(self, seq: str, epoch: int) -> bool:
        return False


class Peer:
    """The other side: takes what comes and answers what the test says."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.control = self.context.socket(zmq.ROUTER)
        self.control.linger = 0
        self.port = self.control.bind_to_random_port("tcp://127.0.0.1")
        self.bulk = socket.create_server(("127.0.0.1", 0))
        self.bulk.setblocking(False)
        self.identity = b""

    async def accept(self) -> socket.socket:
        """The link comes: greet it, and take its bulk connection."""
        while True:  # pings of the link before may come first
            self.identity, message = await self.control.recv_multipart()
            if isinstance(msgspec.msgpack.decode(message, type=Control), Hello):
                break
        bulk_port = self.bulk.getsockname()[1]
        await self.say(Welcome(PROTOCOL_VERSION, "b", 9, bulk_port, 1 << 20, 1))
        connection, _ = await asyncio.get_running_loop().sock_accept(self.bulk)
        connection.setblocking(False)
        self.reader = BulkReader(connection, peer="a")
        hello, _, _ = await self.reader.header()
        assert isinstance(hello, BulkHello)
        return connection

    async def say(self, message: Welcome | Ack | Pong) -> None:
        await self.control.send_multipart([self.identity, encode(message)])


@pytest.fixture
async def stage() -> AsyncIterator[tuple[Peer, Link]]:
    peer = Peer()
    settings = DaemonSettings(
        name="a",
        socket="unused",
        peers=(PeerSettings("b", f"127.0.0.1:{peer.port}"),),
        timeouts=TimeoutSettings(reconnect_ms=1),
    )
    clock, placement = MonotonicClock(), Placement(["b"])
    link = Link(settings.peers[0], settings, 1, peer.context, clock, NoEngine(), placement)
    task = asyncio.create_task(link.run())
    try:
        yield peer, link
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        peer.control.close()
        peer.bulk.close()
        peer.context.term()


async def next_end(peer: Peer) -> End:
    message, _, _ = await peer.reader.header()
    assert isinstance(message, End)
    return message


async def test_an_end_that_nobody_confirmed_is_said_again(stage: tuple[Peer, Link]) -> None:
    """Otherwise the replica would stay at the peer until its room is needed."""
    peer, link = stage
    connection = await peer.accept()
    link.end(7, "s", 2)
    assert await next_end(peer) == End("s", 2, 7)
    connection.close()
    again = await peer.accept()
    assert await next_end(peer) == End("s", 2, 7)
    again.close()


async def test_an_end_is_not_said_again_once_something_later_was_answered(stage: tuple[Peer, Link]) -> None:
    """Bulk keeps its order: who answers what came after it has it."""
    peer, link = stage
    connection = await peer.accept()
    link.end(7, "s", 2)
    await next_end(peer)
    await peer.say(Ack(1, "other", 1, 0, 0))
    await peer.say(Pong(1, 12345, 12345, 0, False))
    await eventually(lambda: link.free_bytes == 12345, "it is heard")
    connection.close()
    again = await peer.accept()
    link.end(7, "t", 1)
    assert await next_end(peer) == End("t", 1, 7)
    again.close()


async def test_ends_of_two_lives_of_an_engine_are_two(stage: tuple[Peer, Link]) -> None:
    """A name that came back under the same epoch: a peer frees only what was written by who ends it."""
    peer, link = stage
    connection = await peer.accept()
    link.end(7, "s", 1)
    link.end(8, "s", 1)
    assert [await next_end(peer) for _ in range(2)] == [End("s", 1, 7), End("s", 1, 8)]
    connection.close()


async def test_an_answer_that_was_lost_is_noticed(stage: tuple[Peer, Link]) -> None:
    """Otherwise what it gave back of the window is gone for good, and the link may stand still for ever."""
    peer, link = stage
    connection = await peer.accept()
    always_something_to_send(link, 2, lambda _: None)
    link.end(7, "first", 1)
    while link._outbox.in_flight < 2:
        await peer.reader.header()
    await peer.say(Ack(1, "busy", 1, 1, 1))
    await peer.say(Pong(1, 5, 5, 0, False, 1))
    await eventually(lambda: link.free_bytes == 5, "it is heard")
    assert link.connected, "all that was consumed was answered"
    reasons: list[str] = []
    link._disconnected = reasons.append  # type: ignore[method-assign]
    await peer.say(Pong(2, 5, 5, 0, False, 2))
    async with asyncio.timeout(10):
        again = await peer.accept()
    assert reasons == ["an answer was lost"]
    for each in (connection, again):
        each.close()


@pytest.mark.parametrize("why", ["let go", "only receives"])
async def test_nobody_waits_for_what_will_never_be_sent(stage: tuple[Peer, Link], why: str) -> None:
    """A dead engine's memory was let go for the next one, or this daemon sends nothing: salvage is over."""
    peer, link = stage
    connection = await peer.accept()
    session: Any = SimpleNamespace(incarnation=7)
    shipment: Any = SimpleNamespace(
        session=session, flush=lambda _: None, unflushed=lambda: 1, next_delta=None
    )
    shipment.urgent, shipment.waiting = lambda _: False, False
    shipment.planner = SimpleNamespace(due_ns=lambda: None)
    if why == "only receives":
        settings = msgspec.structs.replace(link._settings.replication, enabled=False)
        link._settings = msgspec.structs.replace(link._settings, replication=settings)
    link._shipments[7] = shipment
    async with asyncio.timeout(10):
        await eventually(lambda: link.connected, "the link stands")
        salvage = asyncio.create_task(link.flushed(session))
        await asyncio.sleep(0)
        assert salvage.done() == (why == "only receives")
        link.drop_engine(session)
        await salvage
    connection.close()


def always_something_to_send(link: Link, count: int, before: Callable[[int], None]) -> None:
    """Put `count` small deltas into the link's outbox, ready at once; `before(n)` comes before the nth."""

    def following(drain: Callable[[], None], now_ns: int) -> list[Ready] | int:
        number = link._outbox.number = link._outbox.number + 1
        if number > count:
            return 0
        before(number)
        delta = Delta(number, "busy", 1, 7, b"f" * 16, b"", 4, 64, 0, bytes(4), (), 0)
        return [Ready(delta, memoryview(b""))]

    link._outbox.next_deltas = following  # type: ignore[method-assign]


async def test_an_end_does_not_wait_until_there_is_nothing_else_to_send(stage: tuple[Peer, Link]) -> None:
    """A sequence may have been placed here again meanwhile: said after its first delta, the end of what was
    here before would end it too."""
    peer, link = stage
    connection = await peer.accept()

    def before(number: int) -> None:
        if number == 3:
            link.end(7, "s", 2)

    always_something_to_send(link, 50, before)
    link.end(7, "first", 1)
    seen = [(await peer.reader.header())[0] for _ in range(52)]
    assert [at for at, message in enumerate(seen) if isinstance(message, End)] == [0, 4]
    connection.close()


async def test_a_link_with_much_to_send_lets_others_run(stage: tuple[Peer, Link]) -> None:
    """The engine's questions are answered by the same loop, and a socket with room makes nobody wait."""
    peer, link = stage
    connection = await peer.accept()
    always_something_to_send(link, 300, lambda _: time.sleep(0.001))
    link.end(7, "first", 1)
    longest = 0.0
    while link._outbox.number < 300:
        began = time.monotonic()
        await asyncio.sleep(0)
        longest = max(longest, time.monotonic() - began)
    assert longest < 0.15
    connection.close()

"""Who is inside already and goes too far: one connection a ticket, bounded memory, nobody else's place."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
import zmq.asyncio

from fuzz.daemon_world import DaemonWorld
from fuzz.test_findings import turns_while
from segue_core.errors import ProtocolError
from segue_core.geometry import Geometry, Region
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import Register
from segue_core.messages.peer import BulkHello, Delta, Hello, Join, Part, PartKind, bulk_head
from segue_daemon import receiver as receiver_module
from segue_daemon.dial import control_socket
from segue_daemon.gate import control_router
from segue_daemon.group import MAX_MESSAGE_BYTES
from segue_daemon.tls import SecureReceiver, client_context, server_context
from segue_daemon.wire import CONTROL_UNREAD_BYTES
from support.keys import make_keys
from support.waiting import eventually


@pytest.fixture
async def world() -> AsyncIterator[DaemonWorld]:
    made = DaemonWorld()
    await made.start()
    yield made
    await made.stop()


def framed(message: msgspec.Struct, payload: bytes = b"") -> bytes:
    header = msgspec.msgpack.encode(message)
    return bulk_head(header, len(payload)) + header + payload


def delta(seq: str) -> bytes:
    """A frame that takes `seq` to one token."""
    part = Part(0, PartKind.WHOLE, b"", 64)
    checksum = xxhash.xxh3_64_intdigest(xxhash.xxh3_64_intdigest(bytes(64)).to_bytes(8, "little"))
    return framed(Delta(1, seq, 1, 7, b"f" * 16, b"", 4, 64, 0, bytes(4), (part,), checksum), bytes(64))


class Writer:
    """A peer that has said hello and shows its ticket on `connections` bulk connections."""

    def __init__(self, world: DaemonWorld, name: str) -> None:
        self._world = world
        self.name = name
        self.identity = name.encode()
        self.tasks: list[asyncio.Task[None]] = []
        self.connections: list[socket.socket] = []

    async def hello(self, **changes: Any) -> None:
        await self._world.receiver._greet(self.identity, Hello(PROTOCOL_VERSION, self.name, 7, **changes))

    async def connect(self) -> None:
        hello = framed(BulkHello(7, self._world.receiver._writers[self.identity].ticket))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        theirs.setblocking(False)
        self.connections.append(ours)
        self.tasks.append(asyncio.create_task(self._world.receiver._serve_bulk(theirs, "peer:1")))
        ours.sendall(hello)

    async def write(self, number: int, seq: str) -> None:
        """Over connection `number`; returns once it is there."""
        self.connections[number].sendall(delta(seq))
        await eventually(lambda: seq in self._world.store.replicas, f"{seq} is there", timeout_s=30)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


async def test_a_ticket_opens_one_connection_and_only_while_its_link_lasts(world: DaemonWorld) -> None:
    """A writer cannot hold memory on a thousand connections, nor write on after it was given up."""
    writer = Writer(world, "a")
    await writer.hello()
    await writer.connect()
    await writer.write(0, "first")
    await writer.connect()
    async with asyncio.timeout(30):
        await writer.tasks[1]
    await writer.write(0, "second")
    world.receiver._forget(world.receiver._writers[writer.identity])
    async with asyncio.timeout(30):
        await asyncio.wait(writer.tasks)
    writer.close()


async def test_a_daemon_of_another_rank_takes_nobodys_place(world: DaemonWorld) -> None:
    """All ranks' daemons of an engine have one name: one that was given the wrong peers does not end the
    right one's link five times a second."""
    right, wrong = Writer(world, "a"), Writer(world, "a")
    wrong.identity = b"another"
    await right.hello()
    await right.connect()
    await right.write(0, "first")
    await wrong.hello(rank=1, ranks=2)
    await right.write(0, "second")
    assert set(world.receiver._writers) == {right.identity}
    right.close()
    async with asyncio.timeout(30):
        await asyncio.wait(right.tasks)


async def test_of_too_many_lost_writers_the_longest_lost_is_given_up(
    world: DaemonWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a writer left is never kept for ever because others were lost before."""
    monkeypatch.setattr(receiver_module, "MAX_WRITERS", 2)
    given_up: list[str] = []
    monkeypatch.setattr(world.store, "drop_writer", lambda name, _: given_up.append(name))
    for name in "abc":
        writer = Writer(world, name)
        await writer.hello()
        world.receiver._forget(world.receiver._writers[writer.identity])
    assert given_up == ["a"] and set(world.receiver._lost) == {"b", "c"}


async def test_what_waits_unread_on_a_control_connection_is_bounded() -> None:
    """A peer that says more than is read waits itself; nothing here grows by gigabytes."""
    context = zmq.asyncio.Context()
    sockets = [
        control_router(context),
        control_socket(context, None, "a"),
        control_socket(context, None, "a", max_bytes=MAX_MESSAGE_BYTES),
    ]
    for control in sockets:
        assert 0 < control.rcvhwm * control.maxmsgsize <= CONTROL_UNREAD_BYTES
    context.destroy(linger=0)


async def test_hosts_that_vanish_leave_no_control_connections_for_good() -> None:
    """Nobody closes them, and nothing is sent on them: only the kernel's own questions find that out."""
    context = zmq.asyncio.Context()
    control = control_router(context)
    assert control.tcp_keepalive == 1
    assert 0 < control.tcp_keepalive_idle + control.tcp_keepalive_cnt * control.tcp_keepalive_intvl <= 300
    context.destroy(linger=0)


async def test_a_rank_that_may_not_join_fills_no_log(
    world: DaemonWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tries again five times a second until somebody mends its configuration."""
    for _ in range(3):
        await world.daemon._leader.hear(b"id", Join(PROTOCOL_VERSION, "x", 1, 2))
    assert capsys.readouterr().out.count("may not join") == 1


async def test_an_engine_whose_defaults_are_no_numbers_is_refused(world: DaemonWorld) -> None:
    """JSON cannot say them: the router would hear nothing more of this engine."""
    geometry = Geometry(4, 2, (256,), (Region(0, 0, (4, 2, 16), (64, 32, 2), 2, ("block", "slot", "dim")),))
    for value in (math.nan, math.inf):
        register = Register(
            PROTOCOL_VERSION, "e", 9, "m", b"f" * 16, geometry, defaults={"presence_penalty": value}
        )
        nobody: Any = None
        with pytest.raises(ProtocolError, match=r"finite numbers.*presence_penalty"):
            world.daemon.register(register, [], nobody)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="asks for new keys with openssl")
async def test_a_peer_that_renews_its_keys_again_and_again_is_answered(tmp_path: Path) -> None:
    """The answers do not pile up in memory."""
    keys = make_keys(tmp_path / "keys", "a", "b")
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    certificate = ["-cert", str(keys / "a" / "daemon.crt"), "-key", str(keys / "a" / "daemon.key")]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.DEVNULL}
    client = await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-brief", "-connect", f"127.0.0.1:{listener.getsockname()[1]}"),
        *certificate,
        **pipes,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert client.stdin is not None
    try:
        async with asyncio.timeout(30):
            accepted, _ = await loop.sock_accept(listener)
            accepted.setblocking(False)
            receiver = SecureReceiver(accepted, server_context(keys / "b"))
            await receiver.handshake()
            came = Counted(receiver)
            reading = asyncio.create_task(receiver.fill(memoryview(bytearray(2))))
            for number in range(1, 4):
                client.stdin.write(b"K\n")  # new keys for both sides
                await came.wait(number)
            client.stdin.write(b"x\n")
            assert await reading == 2
        assert not receiver._out.pending
    finally:
        client.kill()
        await client.wait()
        listener.close()
        receiver.close()


class Counted:
    """Counts what comes in over a connection."""

    def __init__(self, receiver: SecureReceiver) -> None:
        self._count = 0
        self._came = asyncio.Condition()
        self._more = receiver._more
        receiver._more = self._counted  # type: ignore[method-assign]

    async def _counted(self) -> bool:
        came = await self._more()
        async with self._came:
            self._count += 1
            self._came.notify_all()
        return came

    async def wait(self, count: int) -> None:
        """Until something has come so many times."""
        async with self._came:
            await self._came.wait_for(lambda: self._count >= count)


async def test_records_with_next_to_nothing_in_them_let_others_run(tmp_path: Path) -> None:
    """Each takes time, although the bytes of a thousand make no turn."""
    keys = make_keys(tmp_path / "keys", "a", "b")
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    receiver = SecureReceiver(theirs, server_context(keys / "b"))
    accepting = asyncio.create_task(receiver.handshake())
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    sender = client_context(keys / "a").wrap_bio(came, goes)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        while not accepting.done():
            with contextlib.suppress(ssl.SSLWantReadError):
                sender.do_handshake()
            await loop.sock_sendall(ours, goes.read())
            if sender.version() is None:
                came.write(await loop.sock_recv(ours, 1 << 16))
            await asyncio.sleep(0)
    records = 5_000
    for _ in range(records):
        sender.write(b"x")
    receiver._in.write(goes.read())  # all of it has come
    filling = asyncio.create_task(receiver.fill(memoryview(bytearray(records))))
    assert await turns_while(filling) > 5
    assert filling.result() == records
    ours.close()
    receiver.close()

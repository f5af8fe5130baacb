"""The receiving side of the peer channel: takes peers' deltas into the replica store.

Owns the control ROUTER and the bulk listener. Each payload goes straight to where it will stay, is
verified there, and counts only then. Invariants: a delta without a greeted writer, over its credit, with
a wrong checksum or a low epoch changes nothing; a writer that is silent for `orphan_s` loses its replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import xxhash
import zmq
import zmq.asyncio

from segue_core.clock import Clock
from segue_core.errors import ProtocolError, StartupError
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import (
    Ack,
    BulkHello,
    Control,
    Delta,
    Hello,
    Nack,
    NackReason,
    Ping,
    Pong,
    Welcome,
)
from segue_core.service import LISTEN_HINT, listen_problem
from segue_daemon.arena import Bytes
from segue_daemon.replicas import Refusal, Reservation
from segue_daemon.settings import DaemonSettings
from segue_daemon.store import ReplicaStore
from segue_daemon.wire import encode, recv_bulk_header, recv_into, tune

log = structlog.get_logger()

ORPHAN_S = 60.0
MAX_WRITERS = 1024
FRAME_DEADLINE_S = 30.0
DRAIN_CHUNK = 1 << 20


@dataclass(eq=False)
class Writer:
    """A peer daemon that writes to us."""

    name: str
    identity: bytes
    incarnation: int
    ticket: int
    consumed: int = 0
    bulk: asyncio.Task[None] | None = field(default=None, repr=False)


class Receiver:
    """Takes deltas from every peer."""

    def __init__(
        self,
        settings: DaemonSettings,
        incarnation: int,
        store: ReplicaStore,
        capacity: int,
        context: zmq.asyncio.Context,
        clock: Clock,
        changed: Callable[[str], None],
    ) -> None:
        """`changed` is called with the name of each sequence whose watermark moved."""
        self.corrupt = 0
        self.control_port = 0
        self._settings = settings
        self._incarnation = incarnation
        self._store = store
        self._capacity = capacity
        self._clock = clock
        self._changed = changed
        self._control = context.socket(zmq.ROUTER)
        self._control.linger = 0
        self._control.router_mandatory = True
        self._control.maxmsgsize = 1 << 20
        self._control.sndhwm = self._control.rcvhwm = 10_000
        self._bulk: socket.socket | None = None
        self._bulk_port = 0
        self._writers: dict[bytes, Writer] = {}
        self._orphans: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffer: Bytes = np.empty(0, np.uint8)

    async def start(self) -> None:
        """Bind both listeners. Raises StartupError if an address cannot be used."""
        listen = self._settings.listen
        try:
            self._control.bind(f"tcp://{listen.host}:{listen.control_port or '*'}")
            endpoint = self._control.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            self.control_port = int(endpoint.decode().rstrip("\0").rpartition(":")[2])
        except zmq.ZMQError as error:
            problem = listen_problem(OSError(error.errno, str(error)), listen.host, listen.control_port)
            raise StartupError(f"listen.control_port: {problem}", hint=LISTEN_HINT) from error
        self._bulk = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._bulk.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._bulk.bind((listen.host, listen.bulk_port))
        except OSError as error:
            problem = listen_problem(error, listen.host, listen.bulk_port)
            raise StartupError(f"listen.bulk_port: {problem}", hint=LISTEN_HINT) from error
        self._bulk.listen(64)
        self._bulk.setblocking(False)
        self._bulk_port = self._bulk.getsockname()[1]
        self._spawn(self._serve_control())
        self._spawn(self._accept(self._bulk))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Close both listeners and every connection."""
        for handle in self._orphans.values():
            handle.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._control.close()
        if self._bulk is not None:
            self._bulk.close()

    # -- control ------------------------------------------------------------------------------

    async def _serve_control(self) -> None:
        while True:
            frames = await self._control.recv_multipart()
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"control: message of {len(frames)} frames")
                identity, payload = frames
                message = decode(payload, Control, peer="control connection")
                if isinstance(message, Hello):
                    await self._greet(identity, message)
                elif isinstance(message, Ping):
                    free = self._capacity - self._store.used_bytes + self._store.cached_bytes
                    await self._reply(identity, Pong(message.number, free))
                else:
                    raise ProtocolError(f"control: {type(message).__name__} makes no sense here")
            except ProtocolError as error:
                log.warning("control message ignored", reason=str(error))

    async def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.version == PROTOCOL_VERSION:
            for writer in [w for w in self._writers.values() if w.name == hello.name]:
                self._forget(writer)
            if len(self._writers) >= MAX_WRITERS:
                raise ProtocolError(f"control: more than {MAX_WRITERS} writers")
            writer = Writer(hello.name, identity, hello.incarnation, secrets.randbits(63))
            self._writers[identity] = writer
            self._orphan_later(hello.name)
        await self._reply(
            identity,
            Welcome(
                version=PROTOCOL_VERSION,
                name=self._settings.name,
                incarnation=self._incarnation,
                bulk_port=self._bulk_port,
                window_bytes=self._settings.replication.window_bytes,
                ticket=self._writers[identity].ticket if identity in self._writers else 0,
            ),
        )

    async def _reply(self, identity: bytes, message: Welcome | Pong | Ack | Nack) -> None:
        """Answer; a peer that is gone or does not read is not waited for."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            await self._control.send_multipart([identity, encode(message)], flags=zmq.DONTWAIT)

    def _forget(self, writer: Writer) -> None:
        self._writers.pop(writer.identity, None)
        if writer.bulk is not None:
            writer.bulk.cancel()

    def _orphan_later(self, name: str) -> None:
        """What `name` does not touch from now on within `ORPHAN_S` is given up."""
        handle = self._orphans.pop(name, None)
        if handle is not None:
            handle.cancel()
        since = self._clock.now_ns()
        loop = asyncio.get_running_loop()
        self._orphans[name] = loop.call_later(ORPHAN_S, self._give_up, name, since)

    def _give_up(self, name: str, since_ns: int) -> None:
        self._orphans.pop(name, None)
        dropped = self._store.drop_writer(name, since_ns)
        if dropped:
            log.warning("replicas of a lost writer dropped", writer=name, replicas=dropped)

    # -- bulk ---------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, address = await loop.sock_accept(listener)
            connection.setblocking(False)
            if len(self._tasks) > 2 * MAX_WRITERS:
                connection.close()
                continue
            self._spawn(self._serve_bulk(connection, f"{address[0]}:{address[1]}"))

    async def _serve_bulk(self, connection: socket.socket, peer: str) -> None:
        writer: Writer | None = None
        try:
            tune(connection)
            async with asyncio.timeout(FRAME_DEADLINE_S):
                hello, payload_bytes, _ = await recv_bulk_header(connection, peer=peer)
            writer = self._writer_of(hello, payload_bytes, peer)
            writer.bulk = asyncio.current_task()
            peer = writer.name
            while True:
                message, payload_bytes, header_bytes = await recv_bulk_header(connection, peer=peer)
                async with asyncio.timeout(FRAME_DEADLINE_S):
                    await self._take(connection, writer, message, payload_bytes, header_bytes)
        except EOFError:
            pass
        except (ProtocolError, OSError, TimeoutError) as error:
            log.warning("bulk connection closed", peer=peer, reason=str(error) or "frame took too long")
        finally:
            connection.close()
            if writer is not None and self._writers.get(writer.identity) is writer:
                self._orphan_later(writer.name)

    def _writer_of(self, hello: object, payload_bytes: int, peer: str) -> Writer:
        if isinstance(hello, BulkHello) and not payload_bytes:
            for writer in self._writers.values():
                if writer.incarnation == hello.incarnation and secrets.compare_digest(
                    str(writer.ticket), str(hello.ticket)
                ):
                    return writer
        raise ProtocolError(f"{peer}: bulk connection without a valid ticket")

    async def _take(
        self,
        connection: socket.socket,
        writer: Writer,
        message: object,
        payload_bytes: int,
        header_bytes: int,
    ) -> None:
        if isinstance(message, BulkHello) or not isinstance(message, Delta):
            if payload_bytes or isinstance(message, BulkHello):
                raise ProtocolError(f"{writer.name}: unexpected {type(message).__name__}")
            self._store.end(message)  # type: ignore[arg-type]
            return
        announced = sum(part.nbytes for part in message.parts)
        if min((part.nbytes for part in message.parts), default=0) < 0 or announced != payload_bytes:
            raise ProtocolError(f"{writer.name}: delta of {announced} bytes in {payload_bytes}")
        if payload_bytes > self._settings.replication.window_bytes:
            raise ProtocolError(f"{writer.name}: delta of {payload_bytes} bytes is over the window")
        outcome = await self._receive(connection, writer, message)
        writer.consumed += header_bytes + payload_bytes
        if isinstance(outcome, Refusal):
            log.debug("delta refused", peer=writer.name, seq=message.seq, reason=outcome.reason.name)
            answer: Ack | Nack = Nack(
                message.number, message.seq, message.epoch, outcome.watermark, outcome.reason, writer.consumed
            )
        else:
            answer = Ack(message.number, message.seq, message.epoch, outcome, writer.consumed)
            self._changed(message.seq)
        await self._reply(writer.identity, answer)

    async def _receive(self, connection: socket.socket, writer: Writer, delta: Delta) -> int | Refusal:
        """Receive a delta's payload; the new watermark, or why it does not count."""
        reservation = self._store.reserve(delta, writer.name)
        if isinstance(reservation, Refusal):
            await self._discard(connection, sum(part.nbytes for part in delta.parts))
            return reservation
        try:
            return await self._fill(connection, delta, reservation)
        except BaseException:
            self._store.cancel(reservation)
            raise

    async def _fill(self, connection: socket.socket, delta: Delta, reservation: Reservation) -> int | Refusal:
        digest = xxhash.xxh3_64()
        buffered: dict[int, Bytes] = {}
        for index, part in enumerate(delta.parts):
            target = self._store.room_for(reservation, index)
            if target is None and reservation.targets[index][1] is None:
                target = buffered[index] = np.empty(part.nbytes, np.uint8)
            if target is not None and part.nbytes:
                await recv_into(connection, target.data)
                digest.update(target.data)
        if digest.intdigest() != delta.checksum:
            self.corrupt += 1
            self._store.cancel(reservation)
            return Refusal(NackReason.CORRUPT, reservation.replica.watermark)
        return self._store.commit(reservation, buffered, self._clock.now_ns())

    async def _discard(self, connection: socket.socket, count: int) -> None:
        """Read past a payload that is not wanted."""
        sink = memoryview(bytearray(min(count, DRAIN_CHUNK)))
        while count:
            step = min(count, len(sink))
            await recv_into(connection, sink[:step])
            count -= step

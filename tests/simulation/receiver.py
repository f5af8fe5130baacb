"""The receiving side of the peer channel, without sockets. Stands for segue_daemon/receiver.py.

`control` is `_serve_control`, `_greet`, `_tell_losses` and `_reply`; `_serve`, `_take` and `_fill` are the
methods of the same names, as generators: a `yield` is where the real one awaits bytes, so anything may happen
at the store in between. Decoding, checks, `reserve`, `room_for`, `commit` and `cancel` are the real ones, in
the same order. Answers wait for each other a moment, as they do while there is more to read. `_reborn`
outlives a broken connection: a writer that came back in another life is asked for what it has forgotten even
if its link breaks meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import (
    BULK_HEADER,
    MAX_HEADER_BYTES,
    Ack,
    Bulk,
    BulkHello,
    Control,
    Delta,
    End,
    Hello,
    Nack,
    NackReason,
    Ping,
    Pong,
    Welcome,
    bulk_head,
)
from segue_daemon.arena import Bytes
from segue_daemon.replicas import Loss, Refusal, Reservation
from segue_daemon.wire import encode
from simulation.clockwork import MS
from simulation.network import Connection

if TYPE_CHECKING:
    from simulation.daemon import SimDaemon

SILENT_MS = 250
ORPHAN_MS = 600
WATCH_MS = 60
Task = Generator[int, bytes, None]


@dataclass(eq=False)
class Writer:
    """A peer daemon that writes to us."""

    name: str
    incarnation: int
    ticket: int
    heard_ns: int
    connection: Connection
    consumed: int = 0
    answered: int = 0
    answers: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Reading:
    """A bulk connection being read: its task waits for at most `wanted` bytes."""

    task: Task
    wanted: int
    have: bytearray = field(default_factory=bytearray)


class SimReceiver:
    """Takes deltas from every peer of one daemon life. `open`: reservations whose payload is on its way."""

    def __init__(self, daemon: SimDaemon) -> None:
        self.daemon = daemon
        self.world = daemon.world
        self.writers: dict[int, Writer] = {}
        self.open: list[Reservation] = []
        self._lost: dict[str, tuple[int, int]] = {}
        self._reborn: dict[str, int] = {}
        self._losses: deque[Loss] = deque()
        self._readings: dict[int, Reading] = {}
        self.store = daemon.store
        daemon.store.on_loss = self._note_loss
        self.world.after(WATCH_MS * MS, daemon, self._watch)

    # -- control ------------------------------------------------------------------------------

    def control(self, connection: Connection, payload: bytes) -> None:
        """One message arrived."""
        message = decode(payload, Control, peer="control connection")
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif isinstance(message, Ping):
            writer = self.writers.get(connection.number)
            if writer is not None:
                writer.heard_ns = self.world.now
                self._answer(writer)
            consumed = writer.answered if writer is not None else 0
            room = self.store.evictor.room_bytes
            connection.answer(encode(Pong(message.number, room, consumed_bytes=consumed)))

    def _greet(self, connection: Connection, hello: Hello) -> None:
        now = self.world.now
        for other in [w for w in self.writers.values() if w.name == hello.name or w.connection is connection]:
            self._forget(other)
        ticket = self.world.new_identity()
        self.writers[connection.number] = Writer(hello.name, hello.incarnation, ticket, now, connection)
        lost = self._lost.pop(hello.name, None)
        if lost is not None and lost[0] != hello.incarnation:
            self._reborn[hello.name] = now  # what it does not know any more it will not end either
        name, incarnation = self.daemon.name, self.daemon.incarnation
        window = self.world.replication.window_bytes
        connection.answer(encode(Welcome(PROTOCOL_VERSION, name, incarnation, 1, window, ticket)))
        self._tell_losses()

    def _note_loss(self, loss: Loss) -> None:
        self._losses.append(loss)
        self.world.after(0, self.daemon, self._tell_losses)

    def _tell_losses(self) -> None:
        writers = {writer.name: writer for writer in self.writers.values()}
        for _ in range(len(self._losses)):
            loss = self._losses.popleft()
            writer = writers.get(loss.writer)
            if writer is None:
                self._losses.append(loss)
                continue
            nack = Nack(0, loss.seq, loss.epoch, loss.watermark, loss.reason, writer.answered)
            self.world.say("{} tells {}: {}", self.daemon.name, writer.name, nack)
            writer.connection.answer(encode(nack))

    def _forget(self, writer: Writer) -> None:
        self.writers.pop(writer.connection.number, None)
        self._lost[writer.name] = (writer.incarnation, self.world.now)
        self._end_reading(writer.connection)

    def _watch(self) -> None:
        self.world.after(WATCH_MS * MS, self.daemon, self._watch)
        now = self.world.now
        for writer in list(self.writers.values()):
            if now - writer.heard_ns > SILENT_MS * MS:
                self._forget(writer)
        for name, (_, since) in list(self._lost.items()):
            if now - since > ORPHAN_MS * MS:
                del self._lost[name]
                self._reborn.pop(name, None)
                self._drop_writer(name, now + 1)
        for name, since in list(self._reborn.items()):
            if now - since > ORPHAN_MS * MS:
                del self._reborn[name]
                self._drop_writer(name, since)

    def _drop_writer(self, name: str, before_ns: int) -> None:
        self.store.drop_writer(name, before_ns)
        self.world.touched(self.daemon)

    # -- bulk ---------------------------------------------------------------------------------

    def bulk(self, connection: Connection, data: bytes) -> None:
        """Bytes arrived; none: the stream ended."""
        reading = self._readings.get(connection.number)
        if reading is None:
            reading = Reading(self._serve(connection), 0)
            reading.wanted = next(reading.task)
            self._readings[connection.number] = reading
        reading.have += data
        try:
            if not data:
                reading.wanted = reading.task.send(b"")
            while reading.have:
                taken = bytes(reading.have[: reading.wanted])
                del reading.have[: reading.wanted]
                reading.wanted = reading.task.send(taken)
        except StopIteration:
            pass
        except ProtocolError as error:
            self.world.say("{}: bulk connection closed: {}", self.daemon.name, error)
            self._end_reading(connection)
        writer = self.writers.get(connection.number)
        if writer is not None and writer.answers:
            self.world.after(self.world.between(0, 0.3), self.daemon, self._answer, writer)

    def _end_reading(self, connection: Connection) -> None:
        reading = self._readings.pop(connection.number, None)
        if reading is not None:
            reading.task.close()
        connection.close_there()

    def _serve(self, connection: Connection) -> Task:
        writer: Writer | None = None
        try:
            hello, payload_bytes, _ = yield from _header()
            writer = self.writers.get(connection.number)
            if writer is None or not isinstance(hello, BulkHello) or payload_bytes:
                raise ProtocolError("bulk connection without a valid ticket")
            if (writer.incarnation, writer.ticket) != (hello.incarnation, hello.ticket):
                raise ProtocolError("bulk connection without a valid ticket")
            while True:
                message, payload_bytes, header_bytes = yield from _header()
                writer.heard_ns = self.world.now
                yield from self._take(writer, message, payload_bytes, header_bytes)
        except EOFError:
            pass
        finally:
            connection.close_there()
            if writer is not None and self.writers.get(connection.number) is writer:
                self._readings.pop(connection.number, None)
                self._forget(writer)

    def _take(self, writer: Writer, message: object, payload_bytes: int, header_bytes: int) -> Task:
        if isinstance(message, End):
            self.store.end(message)
            self.daemon.replica_changed(message.seq)
            self.world.say("{}: {} ended", self.daemon.name, message)
            self.world.touched(self.daemon)
            return
        if not isinstance(message, Delta):
            raise ProtocolError(f"{writer.name}: unexpected {type(message).__name__}")
        announced = sum(part.nbytes for part in message.parts)
        if announced != payload_bytes or payload_bytes > self.world.replication.window_bytes:
            raise ProtocolError(f"{writer.name}: delta of {announced} bytes in {payload_bytes}")
        outcome = yield from self._receive(writer, message)
        writer.consumed += header_bytes + payload_bytes
        answer: Ack | Nack
        about = message.number, message.seq, message.epoch
        if isinstance(outcome, Refusal):
            answer = Nack(*about, outcome.watermark, outcome.reason, writer.consumed, outcome.fence)
        else:
            answer = Ack(*about, outcome, writer.consumed)
        self.world.say("{} answers {}: {}", self.daemon.name, writer.name, answer)
        self.world.checks.answered(self.daemon, message, answer)
        if isinstance(answer, Ack):
            self.daemon.replica_changed(message.seq)
        writer.answers.append(encode(answer))
        self.world.touched(self.daemon)

    def _answer(self, writer: Writer) -> None:
        """`_answer`: all that waits goes out, or later with what comes next."""
        if not writer.answers or self.world.clockwork.chance(self.world.faults.no_room_to_answer):
            return
        answers, writer.answers = writer.answers, []
        writer.answered = writer.consumed
        for answer in answers:
            writer.connection.answer(answer)

    def _receive(self, writer: Writer, delta: Delta) -> Generator[int, bytes, int | Refusal]:
        reservation = self.store.reserve(delta, writer.name, self.world.now)
        if isinstance(reservation, Refusal):
            yield from _fill_with(bytearray(sum(part.nbytes for part in delta.parts)))
            return reservation
        self.open.append(reservation)
        try:
            return (yield from self._fill(delta, reservation))
        except BaseException:
            self.store.cancel(reservation)
            raise
        finally:
            self.open.remove(reservation)

    def _fill(self, delta: Delta, reservation: Reservation) -> Generator[int, bytes, int | Refusal]:
        store = self.store
        buffered: dict[int, Bytes] = {}
        for index, part in enumerate(delta.parts):
            target = store.room_for(reservation, index)
            if target is None and reservation.targets[index][1] is None:
                target = buffered[index] = np.empty(part.nbytes, np.uint8)
            if target is not None and part.nbytes:
                yield from _fill_with(target.data)
                reservation.digests[index] = xxhash.xxh3_64_intdigest(target.data)
        if not self.verified(reservation.checksum(), delta):
            store.cancel(reservation)
            return Refusal(NackReason.CORRUPT, reservation.replica.watermark)
        return store.commit(reservation, buffered, self.world.now)

    def verified(self, digest: int, delta: Delta) -> bool:
        """Whether the payload is what was sent."""
        return digest == delta.checksum


def _header() -> Generator[int, bytes, tuple[object, int, int]]:
    """`BulkReader.header`. Raises EOFError at a clean end."""
    head = bytearray(BULK_HEADER.size)
    yield from _fill_with(head, at_start=True)
    header_bytes, payload_bytes, _ = BULK_HEADER.unpack(head)
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"bulk header of {header_bytes} bytes")
    header = bytearray(header_bytes)
    yield from _fill_with(header)
    if head != bulk_head(header, payload_bytes):
        raise ProtocolError("a bulk header changed on its way")
    return decode(memoryview(header), Bulk, peer="bulk"), payload_bytes, BULK_HEADER.size + header_bytes


def _fill_with(target: bytearray | memoryview, *, at_start: bool = False) -> Task:
    """`BulkReader.fill`: what arrives is in its place at once, even if the rest never comes."""
    have = 0
    while have < len(target):
        piece = yield len(target) - have
        if not piece:
            if at_start and not have:
                raise EOFError
            raise ProtocolError("stream ended inside a frame")
        target[have : have + len(piece)] = piece
        have += len(piece)

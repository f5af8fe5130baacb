"""The receiving side of the peer channel: takes peers' deltas into the replica store.

Owns the control ROUTER, the bulk listener and who writes here. Invariants: a delta without a greeted
writer, larger than the window, with a wrong checksum or a low epoch changes nothing; a writer has one bulk
connection, and hears what the store gave up of its replicas; those of one that was not heard of for
`ORPHAN_S` go.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable

import structlog
import zmq
import zmq.asyncio

from segue_core.clock import Clock
from segue_core.errors import ProtocolError, StartupError
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import (
    MAX_GREETING_BYTES,
    Ack,
    BulkHello,
    Control,
    Delta,
    End,
    Hello,
    Join,
    Nack,
    Ping,
    Pong,
    Report,
    Welcome,
)
from segue_core.service import LISTEN_HINT, listen_problem
from segue_daemon.bulk_reader import BulkReader
from segue_daemon.gate import Gate, control_router
from segue_daemon.keys import Keys
from segue_daemon.payload import Payloads
from segue_daemon.replicas import Loss, Refusal
from segue_daemon.settings import DaemonSettings
from segue_daemon.store import ReplicaStore
from segue_daemon.supervise import Tasks, supervise
from segue_daemon.wire import Slices, encode, tune
from segue_daemon.writers import Losses, Lost, Writer

log = structlog.get_logger()

ORPHAN_S = 60.0
WATCH_S = 0.5
SILENT_PERIODS = 5
"""A writer pings twice a second; silent for so many times `peer_ms`, its link is over."""
MAX_WRITERS = 1024
MAX_LOSSES = 10_000
"""Losses that writers have not been told of yet."""
MAX_ANSWERS_AT_ONCE = 32
"""Acks that wait for each other, while deltas are there already, and go in one message."""
MAX_ANSWERS_KEPT = 1024
"""Acks that a writer has no room for; with more its link is over."""


class Receiver:
    """Takes deltas from every peer."""

    def __init__(
        self,
        settings: DaemonSettings,
        incarnation: int,
        store: ReplicaStore,
        context: zmq.asyncio.Context,
        clock: Clock,
        changed: Callable[[str], None],
        running: Callable[[], int | None] = lambda: 0,
        host: str = "",
        keys: Keys | None = None,
    ) -> None:
        """`running`: sequences that the engine here works on, None without a living one; `host`: the label
        that peers are told. `changed` is called with the name of each sequence whose watermark moved. Hears
        of the store's losses from now on, to tell the writers."""
        self._orphan_ns = int(ORPHAN_S * 1e9)
        self.control_port = 0
        self._settings = settings
        self._incarnation = incarnation
        self._store = store
        self._clock = clock
        self._changed = changed
        self._running = running
        self._host = host
        self._control = control_router(context)
        self._bulk: socket.socket | None = None
        self._bulk_port = 0
        self._writers: dict[bytes, Writer] = {}
        self._lost: dict[str, Lost] = {}
        self._reborn: dict[str, int] = {}
        """Writers that came back in another life, and when: what the earlier one wrote is given up later."""
        self._losses = Losses(MAX_LOSSES)
        self._telling = False
        self._tasks = Tasks()
        self.members: Callable[[bytes, Join | Report], Awaitable[None]] | None = None
        """Hears what daemons of other ranks say."""
        self._payloads = Payloads(store, clock)
        self._gate = Gate(keys, context, clock, self._tasks)
        store.on_loss = self._note_loss

    @property
    def corrupt(self) -> int:
        """Deltas with a wrong checksum."""
        return self._payloads.corrupt

    async def start(self) -> None:
        """Bind both listeners. Raises StartupError if an address cannot be used."""
        listen = self._settings.listen
        self._gate.guard(self._control)
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
        bulk = self._bulk
        self._tasks.spawn(supervise("control", self._serve_control))
        self._tasks.spawn(supervise("bulk accept", lambda: self._accept(bulk)))
        self._tasks.spawn(supervise("lost writers", self._watch_writers))

    async def stop(self) -> None:
        """Close both listeners and every connection."""
        await self._tasks.end()
        self._gate.close()
        self._control.close()
        if self._bulk is not None:
            self._bulk.close()

    # -- control ------------------------------------------------------------------------------

    async def _serve_control(self) -> None:
        slices = Slices(self._clock)
        while True:
            await slices.share()
            frames = await self._control.recv_multipart(copy=False)
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"control: message of {len(frames)} frames")
                identity = frames[0].bytes
                message = decode(frames[1].buffer, Control, peer="control connection")
                if isinstance(message, Hello):
                    self._gate.check_name(message.name, frames[1])
                    await self._greet(identity, message)
                elif isinstance(message, Ping):
                    await self._ping(identity, message)
                elif isinstance(message, Join | Report):
                    if isinstance(message, Join):
                        self._gate.check_name(message.name, frames[1])
                    if self.members is not None:
                        await self.members(identity, message)
                else:
                    raise ProtocolError(f"control: {type(message).__name__} makes no sense here")
            except ProtocolError as error:
                self._gate.say("control message ignored", "control", str(error))

    async def _ping(self, identity: bytes, ping: Ping) -> None:
        writer = self._writers.get(identity)
        if writer is not None:
            writer.heard_ns = self._clock.now_ns()
            await self._answer(writer)
        room, budget = self._store.evictor.room_bytes, self._store.budget.limit
        running, answered = self._running(), writer.answered if writer is not None else 0
        pong = Pong(ping.number, room, budget, running or 0, running is not None, answered)
        await self.send(identity, pong)

    async def _greet(self, identity: bytes, hello: Hello) -> None:
        group = self._settings.group
        # Who is another release's or another rank's hears so from the answer, and takes nobody's place.
        if hello.version == PROTOCOL_VERSION and (hello.rank, hello.ranks) == (group.rank, group.ranks):
            now_ns = self._clock.now_ns()
            for other in [
                w for w in self._writers.values() if w.name == hello.name or w.identity == identity
            ]:
                self._forget(other)
            if len(self._writers) >= MAX_WRITERS:
                raise ProtocolError(f"control: more than {MAX_WRITERS} writers")
            self._writers[identity] = Writer(
                hello.name, identity, hello.incarnation, secrets.randbits(63), now_ns
            )
            lost = self._lost.pop(hello.name, None)
            if lost is not None and lost.incarnation != hello.incarnation:
                # Another life of the peer: what it does not know any more it will not end either.
                if len(self._reborn) >= MAX_WRITERS:
                    oldest = next(iter(self._reborn))
                    self._give_up(oldest, self._reborn.pop(oldest))
                self._reborn[hello.name] = now_ns
        await self.send(
            identity,
            Welcome(
                version=PROTOCOL_VERSION,
                name=self._settings.name,
                incarnation=self._incarnation,
                bulk_port=self._bulk_port,
                window_bytes=self._settings.replication.window_bytes,
                ticket=self._writers[identity].ticket if identity in self._writers else 0,
                host=self._host,
                zone=self._settings.labels.zone,
                rank=group.rank,
                ranks=group.ranks,
            ),
        )
        await self._tell_losses()

    async def send(self, identity: bytes, message: Control) -> bool:
        """Answer; a peer that is gone or does not read is not waited for. Returns whether it went out."""
        return await self._send_frames(identity, [encode(message)])

    async def _send_frames(self, identity: bytes, messages: list[bytes]) -> bool:
        try:
            await self._control.send_multipart([identity, *messages], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def _note_loss(self, loss: Loss) -> None:
        self._losses.add(loss)
        if not self._telling:
            self._telling = True
            self._tasks.spawn(self._tell_losses())

    async def _tell_losses(self) -> None:
        """Tell writers what the store gave up of their replicas; who is away hears it when it is back."""
        self._telling = False
        for writer in list(self._writers.values()):
            for loss in self._losses.take(writer.name):
                log.debug("replica given up", peer=loss.writer, seq=loss.seq, reason=loss.reason.name)
                await self._answer(writer)  # an ack from before the loss that came after it would undo it
                nack = Nack(0, loss.seq, loss.epoch, loss.watermark, loss.reason, writer.answered)
                await self.send(writer.identity, nack)

    def _forget(self, writer: Writer) -> None:
        """This link is over; the peer may be back under another."""
        self._writers.pop(writer.identity, None)
        if len(self._lost) >= MAX_WRITERS:
            self._bury(next(iter(self._lost)))
        self._lost[writer.name] = Lost(writer.incarnation, self._clock.now_ns())
        if writer.bulk is not None:
            writer.bulk.cancel()

    async def _watch_writers(self) -> None:
        """Notice who fell silent, and give up what nobody will ever end."""
        while True:
            await asyncio.sleep(WATCH_S)
            now_ns = self._clock.now_ns()
            silent_ns = 1_000_000 * self._settings.timeouts.peer_ms * SILENT_PERIODS
            for writer in list(self._writers.values()):
                if now_ns - writer.heard_ns > silent_ns:
                    log.warning("writer is silent", writer=writer.name)
                    self._forget(writer)
            for name, since_ns in list(self._reborn.items()):
                if now_ns - since_ns > self._orphan_ns:
                    del self._reborn[name]
                    self._give_up(name, since_ns)
            for name, lost in list(self._lost.items()):
                if now_ns - lost.since_ns > self._orphan_ns:
                    self._bury(name)

    def _bury(self, name: str) -> None:
        """A lost writer is not waited for any more."""
        del self._lost[name]
        self._reborn.pop(name, None)
        self._give_up(name, self._clock.now_ns() + 1)

    def _give_up(self, name: str, before_ns: int) -> None:
        dropped = self._store.drop_writer(name, before_ns)
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
            self._tasks.spawn(self._serve_bulk(connection, f"{address[0]}:{address[1]}"))

    async def _serve_bulk(self, accepted: socket.socket, peer: str) -> None:
        writer: Writer | None = None
        try:
            tune(accepted)
            async with self._gate.newcomer(peer):
                connection = await self._gate.admit(accepted)
                reader = BulkReader(connection, peer=peer)
                hello, payload_bytes, _ = await reader.header(limit=MAX_GREETING_BYTES)
                shown = self._writer_of(hello, payload_bytes, peer)
                await self._gate.take(connection, shown.name)
                if shown.bulk is not None or self._writers.get(shown.identity) is not shown:
                    raise ProtocolError(f"{shown.name}: a ticket is good once, and while its link lasts")
            writer = shown
            writer.bulk = asyncio.current_task()
            reader.peer = writer.name
            reader.before_wait = lambda: self._answer(shown)
            await self._take_all(reader, writer)
        except EOFError:
            pass
        except (ProtocolError, OSError, TimeoutError) as error:
            reason = str(error) or "took too long"
            if writer is None:
                self._gate.say("bulk connection refused", peer.rpartition(":")[0], reason)
            else:
                log.warning("bulk connection closed", peer=writer.name, reason=reason)
        finally:
            accepted.close()
            if writer is not None and self._writers.get(writer.identity) is writer:
                self._forget(writer)

    async def _take_all(self, reader: BulkReader, writer: Writer) -> None:
        """Take frames for as long as they come."""
        slices = Slices(self._clock)
        try:
            while True:
                if len(writer.answers) >= MAX_ANSWERS_AT_ONCE or slices.over:
                    await self._answer(writer)
                    await slices.share()
                message, payload_bytes, header_bytes = await reader.header()
                writer.heard_ns = self._clock.now_ns()
                await self._take(reader, writer, message, payload_bytes, header_bytes)
        except (EOFError, ProtocolError):
            await self._answer(writer)
            raise

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
        reader: BulkReader,
        writer: Writer,
        message: object,
        payload_bytes: int,
        header_bytes: int,
    ) -> None:
        if isinstance(message, End) and not payload_bytes:
            self._store.end(message)
            self._changed(message.seq)
            return
        if not isinstance(message, Delta):
            raise ProtocolError(f"{writer.name}: unexpected {type(message).__name__}")
        announced = sum(part.nbytes for part in message.parts)
        if min((part.nbytes for part in message.parts), default=0) < 0 or announced != payload_bytes:
            raise ProtocolError(f"{writer.name}: delta of {announced} bytes in {payload_bytes}")
        if payload_bytes > self._settings.replication.window_bytes:
            raise ProtocolError(f"{writer.name}: delta of {payload_bytes} bytes is over the window")
        outcome = await self._payloads.receive(reader, writer.name, message)
        writer.consumed += header_bytes + payload_bytes
        about = message.number, message.seq, message.epoch
        if isinstance(outcome, Refusal):
            log.debug("delta refused", peer=writer.name, seq=message.seq, reason=outcome.reason.name)
            reason, fence = outcome.reason, outcome.fence
            answer: Ack | Nack = Nack(*about, outcome.watermark, reason, writer.consumed, fence)
        else:
            answer = Ack(*about, outcome, writer.consumed)
            self._changed(message.seq)
        writer.answers.append(encode(answer))

    async def _answer(self, writer: Writer) -> None:
        """Send what is to be answered to `writer`. If that cannot be sent it is tried again with what comes
        next, or at its next ping: a later ack would hide that an earlier one is missing. Raises ProtocolError
        when too much waits."""
        if not writer.answers:
            return
        answers, consumed, writer.answers = writer.answers, writer.consumed, []
        if await self._send_frames(writer.identity, answers):
            writer.answered = consumed
            return
        writer.answers = answers + writer.answers
        if len(writer.answers) > MAX_ANSWERS_KEPT:
            raise ProtocolError(f"{writer.name}: does not read its answers")

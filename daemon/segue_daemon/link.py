"""A link to a peer: connects, ships deltas, takes answers, connects again.

Control is a ZeroMQ DEALER, bulk a TCP connection of its own, so an ack never queues behind data. The
link sends when there is credit and builds each delta only then. It holds no policy: what goes next is
the shipment's planner's affair. Invariants: at most `window_bytes` are unacked; the engine's memory is
never touched from here; a peer that does not answer within `peer_ms` is left, and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol

import structlog
import zmq
import zmq.asyncio

from segue_core.clock import Clock
from segue_core.errors import ProtocolError, SegueError, Unavailable
from segue_core.framing import decode
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
    Ping,
    Pong,
    Welcome,
)
from segue_core.messages.status import PeerStatus
from segue_daemon.engine import EngineSession
from segue_daemon.ledger import Changes
from segue_daemon.placement import holder
from segue_daemon.settings import DaemonSettings, PeerSettings
from segue_daemon.shipment import Shipment
from segue_daemon.wire import encode, send_bulk, tune

log = structlog.get_logger()

MAX_PENDING_ENDS = 100_000
PING_S = 0.5


class EngineSide(Protocol):
    """What a link needs of the engine's side of the daemon."""

    def drain(self) -> None:
        """Apply the journal: called after each copy out of the engine's memory."""
        ...

    def fence(self, seq: str, epoch: int) -> bool:
        """The peer says that `seq` went on elsewhere with `epoch`."""
        ...


class Link:
    """This daemon's way to one peer."""

    def __init__(
        self,
        peer: PeerSettings,
        settings: DaemonSettings,
        incarnation: int,
        context: zmq.asyncio.Context,
        clock: Clock,
        engine: EngineSide,
    ) -> None:
        self.name = peer.name
        self.connected = False
        self.detail = "not connected yet"
        self.sent_bytes = 0
        self.free_bytes = 0
        self._address = peer.control
        self._settings = settings
        self._peers = tuple(peer.name for peer in settings.peers)
        self._hello = Hello(PROTOCOL_VERSION, settings.name, incarnation)
        self._context = context
        self._clock = clock
        self._engine = engine
        self._peer_incarnation = 0
        self._shipments: dict[int, Shipment] = {}
        self._ends: dict[tuple[str, int], End] = {}
        self._wake = asyncio.Event()
        self._progressed = asyncio.Event()
        self._number = 0
        self._consumed = 0
        self._window = 0
        self._link_sent = 0
        self._heard_ns = 0
        self._logged = ""

    # -- what the daemon tells it -------------------------------------------------------------

    def add_engine(self, session: EngineSession) -> None:
        """Ship this engine life too."""
        self._shipments[session.incarnation] = self._shipment(session)
        self._wake.set()

    def _shipment(self, session: EngineSession) -> Shipment:
        settings = self._settings.replication
        # Two deltas fit the peer's window, so that one can be on its way while the other is acked.
        delta_bytes = min(settings.delta_bytes, self._window // 2) if self._window else settings.delta_bytes
        block_bytes = session.pages.geometry.block_bytes
        if self._window and block_bytes > self._window:
            log.error(
                "nothing can be replicated: a block is larger than the peer's window",
                peer=self.name,
                block_bytes=block_bytes,
                window_bytes=self._window,
                hint="raise replication.window_bytes there",
            )
        return Shipment(session, settings, delta_bytes, self._holds)

    def _holds(self, seq: str) -> bool:
        return holder(seq, self._peers) == self.name

    def drop_engine(self, session: EngineSession) -> None:
        """Its memory is about to go."""
        shipment = self._shipments.get(session.incarnation)
        if shipment is not None and shipment.session is session:
            del self._shipments[session.incarnation]

    def note(self, session: EngineSession, changes: Changes) -> None:
        """The engine's ledger moved."""
        shipment = self._shipments.get(session.incarnation)
        if shipment is not None:
            shipment.note(changes)
            self._wake.set()

    def end(self, session_incarnation: int, seq: str, epoch: int) -> None:
        """The sequence is over: tell the peer, now or when it is back."""
        shipment = self._shipments.get(session_incarnation)
        if shipment is not None:
            shipment.forget(seq)
        if len(self._ends) < MAX_PENDING_ENDS:
            self._ends[seq, epoch] = End(seq, epoch, session_incarnation)
        self._wake.set()

    def watermark(self, session: EngineSession, seq: str) -> int:
        """Tokens of `seq` verified at the peer."""
        shipment = self._shipments.get(session.incarnation)
        return shipment.watermark(seq) if shipment else 0

    async def flushed(self, session: EngineSession) -> None:
        """Return when nothing of this engine is left to send or to be acked, or the link is down."""
        while self.connected:
            shipment = self._shipments.get(session.incarnation)
            if shipment is None or shipment.session is not session or not shipment.lag_tokens():
                return
            self._progressed.clear()
            await self._progressed.wait()

    def status(self) -> PeerStatus:
        """For people and for `/status`."""
        shipments = self._shipments.values()
        return PeerStatus(
            peer=self.name,
            address=self._address,
            connected=self.connected,
            incarnation=self._peer_incarnation,
            sequences=sum(len(s.planner.progress) for s in shipments),
            lag_tokens=sum(s.lag_tokens() for s in shipments),
            in_flight_bytes=self._link_sent - self._consumed if self.connected else 0,
            sent_bytes=self.sent_bytes,
            acked_tokens=sum(p.acked for s in shipments for p in s.planner.progress.values()),
            torn_copies=sum(s.torn for s in shipments),
            free_bytes=self.free_bytes,
            detail=self.detail,
        )

    # -- the connection -----------------------------------------------------------------------

    async def run(self) -> None:
        """Connect and ship for ever; ends by cancellation."""
        while True:
            try:
                await self._connect_and_ship()
            except (SegueError, OSError, zmq.ZMQError) as error:
                self._disconnected(str(error))
            except TimeoutError:
                self._disconnected("no answer in time")
            await asyncio.sleep(self._settings.timeouts.reconnect_ms / 1000)

    def _disconnected(self, reason: str) -> None:
        self.connected = False
        self.detail = reason
        self._progressed.set()
        if reason != self._logged:
            log.warning("peer lost", peer=self.name, address=self._address, reason=reason)
            self._logged = reason

    async def _connect_and_ship(self) -> None:
        control = self._context.socket(zmq.DEALER)
        control.linger = 0
        control.sndhwm = control.rcvhwm = 10_000
        bulk: socket.socket | None = None
        try:
            control.connect(f"tcp://{self._address}")
            welcome = await self._greet(control)
            bulk = await self._open_bulk(welcome)
            self._start_link(welcome)
            tasks = [
                asyncio.create_task(self._ship(bulk)),
                asyncio.create_task(self._listen(control)),
                asyncio.create_task(self._keep_alive(control)),
                asyncio.create_task(_until_closed(bulk)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                raise Unavailable("the peer closed the connection")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self.connected = False
            control.close()
            if bulk is not None:
                bulk.close()

    async def _greet(self, control: zmq.asyncio.Socket) -> Welcome:
        async with asyncio.timeout(self._settings.timeouts.peer_ms / 1000):
            await control.send(encode(self._hello))
            while True:
                message = decode(await control.recv(), Control, peer=self.name)
                if isinstance(message, Welcome):
                    break
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"peer {self.name} speaks protocol {message.version}, this daemon {PROTOCOL_VERSION}",
                hint="run one Segue release everywhere",
            )
        if message.name != self.name:
            raise ProtocolError(
                f"{self._address} is {message.name!r}, not {self.name!r}",
                hint="check `peers` in the configuration",
            )
        return message

    async def _open_bulk(self, welcome: Welcome) -> socket.socket:
        host = self._address.rpartition(":")[0]
        bulk = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bulk.setblocking(False)
        try:
            async with asyncio.timeout(self._settings.timeouts.peer_ms / 1000):
                await asyncio.get_running_loop().sock_connect(bulk, (host, welcome.bulk_port))
                tune(bulk)
                await send_bulk(bulk, BulkHello(self._hello.incarnation, welcome.ticket))
        except BaseException:
            bulk.close()
            raise
        return bulk

    def _start_link(self, welcome: Welcome) -> None:
        same_life = welcome.incarnation == self._peer_incarnation
        self._peer_incarnation = welcome.incarnation
        self._window = welcome.window_bytes
        self._consumed = self._link_sent = 0
        self._heard_ns = self._clock.now_ns()
        if same_life:
            for shipment in self._shipments.values():
                shipment.reconnected()
        else:
            self._ends.clear()
            for incarnation, shipment in list(self._shipments.items()):
                self._shipments[incarnation] = self._shipment(shipment.session)
        self.connected = True
        self.detail = ""
        self._logged = ""
        self._wake.set()
        log.info("peer connected", peer=self.name, address=self._address)

    async def _ship(self, bulk: socket.socket) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ends:
                await send_bulk(bulk, self._ends.pop(next(iter(self._ends))))
            # A delta is at most half the window: with half of it free, the whole is never exceeded.
            while self._link_sent - self._consumed <= self._window // 2:
                ready = self._next_ready()
                if ready is None:
                    break
                delta, payload = ready
                sent = await send_bulk(bulk, delta, payload)
                self._link_sent += sent
                self.sent_bytes += sent
                if self._ends:
                    self._wake.set()

    def _next_ready(self) -> tuple[Delta, memoryview] | None:
        if not self._settings.replication.enabled:
            return None
        for shipment in self._shipments.values():
            ready = shipment.next_delta(self._number + 1, self._engine.drain)
            if ready is not None:
                self._number += 1
                return ready.delta, ready.payload
        return None

    async def _listen(self, control: zmq.asyncio.Socket) -> None:
        while True:
            message = decode(await control.recv(), Control, peer=self.name)
            self._heard_ns = self._clock.now_ns()
            if isinstance(message, Ack | Nack):
                self._consumed = min(max(self._consumed, message.consumed_bytes), self._link_sent)
                self._answered(message)
                self._wake.set()
                self._progressed.set()
            elif isinstance(message, Pong):
                self.free_bytes = message.free_bytes
                for shipment in self._shipments.values():
                    shipment.retry_refused(message.free_bytes)
                self._wake.set()

    def _answered(self, message: Ack | Nack) -> None:
        for shipment in self._shipments.values():
            if isinstance(message, Ack):
                shipment.acked(message)
                continue
            shipment.nacked(message)
            if message.reason == NackReason.FENCED:
                self._engine.fence(message.seq, message.epoch + 1)
        if isinstance(message, Nack) and message.reason not in (NackReason.GAP, NackReason.KEY_UNKNOWN):
            log.warning("peer refused", peer=self.name, seq=message.seq, reason=message.reason.name)

    async def _keep_alive(self, control: zmq.asyncio.Socket) -> None:
        number = 0
        while True:
            number += 1
            await control.send(encode(Ping(number)))
            await asyncio.sleep(PING_S)
            silent_ms = (self._clock.now_ns() - self._heard_ns) // 1_000_000
            if silent_ms > self._settings.timeouts.peer_ms + 1000 * PING_S:
                raise Unavailable(f"no answer for {silent_ms} ms")


async def _until_closed(bulk: socket.socket) -> None:
    """Return when the peer closes the bulk connection (it never sends on it)."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        await loop.sock_recv(bulk, 1)

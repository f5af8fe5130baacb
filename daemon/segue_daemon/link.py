"""A link to a peer: connects, ships deltas, takes answers, connects again.

Control is a ZeroMQ DEALER, bulk a TCP connection of its own, so an ack never queues behind data. The
link sends what its outbox gives it, and holds no policy: which sequences it carries is placement's affair,
what goes next the planner's, how much the throttle's. Invariants: the engine's memory is never touched from
here; a peer that does not answer within `peer_ms` is left, and tried again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from typing import Protocol

import structlog
import zmq
import zmq.asyncio

from segue_core.clock import Clock
from segue_core.errors import SegueError, Unavailable
from segue_core.framing import decode
from segue_core.messages.peer import Ack, Control, End, Nack, NackReason, Ping, Pong, Welcome
from segue_core.messages.status import PeerStatus
from segue_daemon.bucket import Bucket, SharedBudget, Throttle
from segue_daemon.confirmed import shipment_of
from segue_daemon.dial import Peer, control_socket, greet, hello_of, open_bulk, until_closed
from segue_daemon.ends import Ends
from segue_daemon.engine import EngineSession
from segue_daemon.keys import Keys
from segue_daemon.lag import LagMeter
from segue_daemon.ledger import Changes
from segue_daemon.outbox import Outbox
from segue_daemon.placement import Move, Placement
from segue_daemon.settings import DaemonSettings, PeerSettings
from segue_daemon.shipment import Shipment
from segue_daemon.tls import SecureSender
from segue_daemon.wire import Slices, encode, send_bulk, send_frames

log = structlog.get_logger()

PING_S = 0.5
MAX_REASONS = 16
"""Each reason why a peer is lost is logged once, until it is back."""


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
        placement: Placement,
        budget: SharedBudget | None = None,
        keys: Keys | None = None,
    ) -> None:
        """`placement` and `budget` are shared by all links of the daemon; no budget: no limit."""
        self.name = peer.name
        self.connected = False
        self.detail = "not connected yet"
        self.sent_bytes = 0
        self.free_bytes = 0
        self.lag = LagMeter()
        self._address = peer.control
        self._settings = settings
        self._placement = placement
        self._hello = hello_of(settings, incarnation, placement.labels)
        self._context = context
        self._keys = keys
        self._clock = clock
        self._engine = engine
        self._throttle = Throttle(peer.name, Bucket(peer.max_bytes_per_s), budget or SharedBudget(0))
        self._alarm: asyncio.TimerHandle | None = None
        self._peer_incarnation = 0
        self._outbox = Outbox(self._throttle)
        self._shipments = self._outbox.shipments
        self._ends = Ends()
        self._wake = asyncio.Event()
        self._progressed = asyncio.Event()
        self._heard_ns = 0
        self._pinged: tuple[int, int] = (0, 0)
        self._logged: set[str] = set()

    # -- what the daemon tells it -------------------------------------------------------------

    def add_engine(self, session: EngineSession) -> None:
        """Ship this engine life too."""
        self._shipments[session.incarnation] = self._shipment(session)
        self._wake.set()

    def _shipment(self, session: EngineSession) -> Shipment:
        settings = self._settings.replication
        delta_bytes = self._outbox.delta_bytes(settings.delta_bytes)
        block_bytes, window = session.pages.geometry.block_bytes, self._outbox.window
        if window and block_bytes > window:
            log.error(
                "nothing can be replicated: a block is larger than the peer's window",
                peer=self.name,
                block_bytes=block_bytes,
                window_bytes=window,
                hint="raise replication.window_bytes there",
            )
        now_ns = self._clock.now_ns()
        return shipment_of(session, settings, delta_bytes, self._holds, self.lag, now_ns)

    def _holds(self, seq: str) -> bool:
        return self._placement.holds(seq, self.name)

    def moved(self, session: EngineSession, moves: Collection[Move]) -> None:
        """Sequences of `session` changed holders: end here what went away, begin what came."""
        shipment = self._shipments.get(session.incarnation)
        if shipment is None:
            return
        back = {move.seq for move in moves if self.name in move.added}
        if back:
            self._ends.begun(back)
        for move in moves:
            if self.name in move.dropped and (epoch := shipment.forget(move.seq)):
                self._ends.add(End(move.seq, epoch, session.incarnation))
            elif self.name in move.added:
                shipment.begin(move.seq, self._clock.now_ns())
        self._wake.set()
        self._progressed.set()

    def drop_engine(self, session: EngineSession) -> None:
        """Its memory is about to go."""
        shipment = self._shipments.get(session.incarnation)
        if shipment is not None and shipment.session is session:
            del self._shipments[session.incarnation]
            self._progressed.set()

    def note(self, session: EngineSession, changes: Changes) -> None:
        """The engine's ledger moved."""
        shipment = self._shipments.get(session.incarnation)
        if shipment is not None:
            shipment.note(changes, self._clock.now_ns())
            self._wake.set()

    def end(self, session_incarnation: int, seq: str, epoch: int) -> None:
        """The sequence is over: tell the peer, now or when it is back."""
        shipment = self._shipments.get(session_incarnation)
        if shipment is not None:
            shipment.end(seq, epoch)
        if not any(s.speaks_for(seq) for s in self._shipments.values()):
            self._placement.forget(seq)
        self._ends.add(End(seq, epoch, session_incarnation))
        self._wake.set()

    def watermark(self, session: EngineSession, seq: str) -> int:
        """Tokens of `seq` verified at the peer."""
        shipment = self._shipments.get(session.incarnation)
        return shipment.watermark(seq) if shipment else 0

    def copies(self, session: EngineSession) -> tuple[int, int]:
        """(sequences that the peer is to hold, those of which it holds something)."""
        shipment = self._shipments.get(session.incarnation)
        return shipment.copies() if shipment is not None else (0, 0)

    async def flushed(self, session: EngineSession) -> None:
        """Send all there is of this engine, due or not. Return when nothing of it is left to send or to be
        acked, or the link is down."""
        last = self._shipments.get(session.incarnation)
        if last is not None and last.session is session:
            last.flush(self._clock.now_ns())
            self._wake.set()
        while self.connected and self._settings.replication.enabled:
            shipment = self._shipments.get(session.incarnation)
            if shipment is None or shipment.session is not session or not shipment.unflushed():
                return
            self._progressed.clear()
            await self._progressed.wait()

    def status(self) -> PeerStatus:
        """For people and for `/status`."""
        shipments = self._shipments.values()
        now_ns = self._clock.now_ns()
        return PeerStatus(
            peer=self.name,
            address=self._address,
            connected=self.connected,
            incarnation=self._peer_incarnation,
            sequences=sum(len(s.planner.progress) for s in shipments),
            lag_tokens=sum(s.lag_tokens() for s in shipments),
            lag_ms=round(max((s.lag_ms(now_ns) for s in shipments), default=0.0), 3),
            in_flight_bytes=self._outbox.in_flight if self.connected else 0,
            sent_bytes=self.sent_bytes,
            acked_tokens=sum(p.acked for s in shipments for p in s.planner.progress.values()),
            torn_copies=sum(s.torn for s in shipments),
            free_bytes=self.free_bytes,
            host=self._placement.peers[self.name].host,
            zone=self._placement.peers[self.name].zone,
            throttled_ms=self._throttle.waited_ns // 1_000_000,
            throttled_bytes=self._throttle.deferred_bytes,
            lag_p50_ms=round(self.lag.quantile_ms(0.5), 3),
            lag_p99_ms=round(self.lag.quantile_ms(0.99), 3),
            held_bytes=sum(s.held_bytes for s in shipments),
            detail=self.detail,
        )

    # -- the connection -----------------------------------------------------------------------

    async def run(self) -> None:
        """Connect and ship for ever; ends by cancellation."""
        while True:
            try:
                await self._connect_and_ship()
            except TimeoutError:  # an OSError too, and one without words
                self._disconnected("no answer in time")
            except (SegueError, OSError, zmq.ZMQError) as error:
                self._disconnected(str(error))
            await asyncio.sleep(self._settings.timeouts.reconnect_ms / 1000)

    def _disconnected(self, reason: str) -> None:
        self.connected = False
        self.detail = reason
        self._progressed.set()
        if reason not in self._logged and len(self._logged) < MAX_REASONS:
            log.warning("peer lost", peer=self.name, address=self._address, reason=reason)
            self._logged.add(reason)

    async def _connect_and_ship(self) -> None:
        control = control_socket(self._context, self._keys, self.name)
        bulk: socket.socket | SecureSender | None = None
        try:
            peer_s = self._settings.timeouts.peer_ms / 1000
            peer = Peer(self.name, self._address, peer_s, self._keys)
            welcome = await greet(control, self._hello, peer)
            bulk = await open_bulk(self._hello, welcome, peer)
            self._start_link(welcome)
            tasks = [
                asyncio.create_task(self._ship(bulk)),
                asyncio.create_task(self._listen(control)),
                asyncio.create_task(self._keep_alive(control)),
                asyncio.create_task(until_closed(bulk)),
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
            self._placement.lost(self.name, self._clock.now_ns())
            self._throttle.idle(self._clock.now_ns())
            control.close()
            if bulk is not None:
                bulk.close()

    def _start_link(self, welcome: Welcome) -> None:
        same_life = welcome.incarnation == self._peer_incarnation
        self._peer_incarnation = welcome.incarnation
        self._outbox.opened(welcome.window_bytes)
        self._heard_ns = self._clock.now_ns()
        if same_life:
            self._ends.again()
            for shipment in self._shipments.values():
                shipment.reconnected(self._heard_ns)
        else:
            self._ends.clear()
            for incarnation, shipment in list(self._shipments.items()):
                self._shipments[incarnation] = self._shipment(shipment.session)
        self._placement.up(self.name, host=welcome.host, zone=welcome.zone)
        self.connected = True
        self.detail = ""
        self._logged.clear()
        self._wake.set()
        log.info("peer connected", peer=self.name, address=self._address)

    async def _ship(self, bulk: socket.socket | SecureSender) -> None:
        slices = Slices(self._clock)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._ends:
                end = self._ends.say(self._outbox.number)
                self._throttle.take(await send_bulk(bulk, end), self._clock.now_ns())
                await slices.share()
            while self._settings.replication.enabled:
                ready = self._outbox.next_deltas(self._engine.drain, self._clock.now_ns())
                if isinstance(ready, int):
                    self._look_again(ready)
                    break
                # Charged before it is sent: another link may ask for the rest of the budget meanwhile.
                nbytes = sum(len(each.payload) for each in ready)
                self._throttle.take(nbytes, self._clock.now_ns())
                sent = await send_frames(bulk, [(each.delta, each.payload) for each in ready])
                self._throttle.take(sent - nbytes, self._clock.now_ns())
                self._outbox.sent(sent)
                self.sent_bytes += sent
                await slices.share()
                if self._ends:  # before anything of what may have begun anew since
                    self._wake.set()
                    break

    def _look_again(self, in_ns: int) -> None:
        """Wake the shipper after `in_ns`; 0: only when something happens."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if in_ns > 0:
            self._alarm = asyncio.get_running_loop().call_later(in_ns / 1e9, self._wake.set)

    async def _listen(self, control: zmq.asyncio.Socket) -> None:
        slices = Slices(self._clock)
        while True:
            messages = await control.recv_multipart()  # acks come several at once
            self._heard_ns = self._clock.now_ns()
            for message in messages:
                await slices.share()
                self._hear(decode(message, Control, peer=self.name))

    def _hear(self, message: Control) -> None:
        if isinstance(message, Ack | Nack):
            self._outbox.consumed(message.consumed_bytes)
            self._answered(message)
            self._ends.heard(message.number)
            self._wake.set()
            self._progressed.set()
        elif isinstance(message, Pong):
            if self._outbox.lacks_answer(message.consumed_bytes):
                raise Unavailable("an answer was lost")
            self._hear_room(message)
            for shipment in self._shipments.values():
                shipment.retry_refused(message.free_bytes, self._heard_ns)
            self._wake.set()

    def _hear_room(self, pong: Pong) -> None:
        self.free_bytes = pong.free_bytes
        if pong.number == self._pinged[0]:
            self.lag.breathe((self._heard_ns - self._pinged[1]) / 1e6)
        self._placement.room(
            self.name,
            pong.free_bytes,
            budget_bytes=pong.budget_bytes,
            running=pong.running,
            serving=pong.serving,
            link_ms=self.lag.recent_ms,
        )

    def _answered(self, message: Ack | Nack) -> None:
        for shipment in self._shipments.values():
            if isinstance(message, Ack):
                shipment.acked(message, self._heard_ns)
                self._placement.accepted(message.seq, self.name)
                continue
            shipment.nacked(message, self._heard_ns)
            if message.reason == NackReason.NO_ROOM and shipment.speaks_for(message.seq):
                self._placement.refused(message.seq, self.name, shipment.need_bytes(message.seq))
            if message.reason == NackReason.FENCED:
                self._engine.fence(message.seq, max(message.epoch + 1, message.fence))
        if isinstance(message, Nack) and message.reason not in (NackReason.GAP, NackReason.KEY_UNKNOWN):
            log.warning("peer refused", peer=self.name, seq=message.seq, reason=message.reason.name)

    async def _keep_alive(self, control: zmq.asyncio.Socket) -> None:
        number = 0
        while True:
            number += 1
            self._pinged = (number, self._clock.now_ns())
            await control.send(encode(Ping(number)))
            await asyncio.sleep(PING_S)
            silent_ms = (self._clock.now_ns() - self._heard_ns) // 1_000_000
            if silent_ms > self._settings.timeouts.peer_ms + 1000 * PING_S:
                raise Unavailable(f"no answer for {silent_ms} ms")

"""The writing side of the peer channel, without sockets. Stands for `Link` in segue_daemon/link.py.

`connect` is `_connect_and_ship` and `_greet`; `_welcomed` is `_open_bulk` and `_start_link`; `_ship`,
`listen`, `_answered` and `_keep_alive` are `_ship`, `_listen`, `_answered` and `_keep_alive`; `add_engine`,
`drop_engine`, `note`, `end` and `flushed` are themselves. `Shipment` (planner, differ) and `Ends` are real.
An event of `_ship` sends one delta, or several tails: between two of them anything may happen, as between two
awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import (
    BULK_HEADER,
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
    bulk_head,
)
from segue_daemon.confirmed import shipment_of
from segue_daemon.ends import Ends
from segue_daemon.engine import EngineSession
from segue_daemon.ledger import Changes
from segue_daemon.shipment import Shipment
from segue_daemon.wire import encode
from simulation.clockwork import MS
from simulation.network import Connection

if TYPE_CHECKING:
    from simulation.daemon import SimDaemon

PEER_MS = 120
PING_MS = 50
RECONNECT_MS = 20


class SimLink:
    """One daemon's way to one peer."""

    def __init__(self, daemon: SimDaemon, peer: str) -> None:
        self.daemon = daemon
        self.world = daemon.world
        self.name = peer
        self.connected = False
        self.shipments: dict[int, Shipment] = {}
        self.peer_incarnation = 0
        self._connection: Connection | None = None
        self.ends = Ends()
        self._number = 0
        self._consumed = self._window = self._link_sent = 0
        self._heard_ns = 0
        self._shipping = False
        self.connect()

    # -- what the daemon tells it -------------------------------------------------------------

    def add_engine(self, session: EngineSession) -> None:
        """Ship this engine life too."""
        self.shipments[session.incarnation] = self._shipment(session)
        self.wake()

    def _shipment(self, session: EngineSession) -> Shipment:
        settings = self.world.replication
        delta_bytes = min(settings.delta_bytes, self._window // 2) if self._window else settings.delta_bytes
        return shipment_of(session, settings, delta_bytes, self.holds, now_ns=self.world.now)

    def holds(self, seq: str) -> bool:
        """Whether this peer is to have a replica of `seq`: one peer a sequence, for good. Where replicas
        go is not what is simulated here."""
        peers = self.daemon.peers
        return max(peers, key=lambda peer: crc32(f"{peer} {seq}".encode())) == self.name

    def drop_engine(self, session: EngineSession) -> None:
        """Its memory is about to go."""
        shipment = self.shipments.get(session.incarnation)
        if shipment is not None and shipment.session is session:
            del self.shipments[session.incarnation]

    def note(self, session: EngineSession, changes: Changes) -> None:
        """The engine's ledger moved."""
        shipment = self.shipments.get(session.incarnation)
        if shipment is not None:
            shipment.note(changes, self.world.now)
            self.wake()

    def end(self, session_incarnation: int, seq: str, epoch: int) -> None:
        """The sequence is over: tell the peer, now or when it is back."""
        shipment = self.shipments.get(session_incarnation)
        if shipment is not None:
            shipment.end(seq, epoch)
        self.ends.add(End(seq, epoch, session_incarnation))
        self.wake()

    def flush(self, session: EngineSession) -> None:
        """Send all there is of this engine, due or not."""
        shipment = self.shipments.get(session.incarnation)
        if shipment is not None and shipment.session is session:
            shipment.flush(self.world.now)
            self.wake()

    def flushed(self, session: EngineSession) -> bool:
        """Nothing of this engine is left to send or to be acked, or the link is down."""
        shipment = self.shipments.get(session.incarnation)
        return not self.connected or shipment is None or not shipment.unflushed()

    def watermark(self, session: EngineSession, seq: str) -> int:
        """Tokens of `seq` verified at the peer."""
        shipment = self.shipments.get(session.incarnation)
        return shipment.watermark(seq) if shipment is not None else 0

    # -- the connection -----------------------------------------------------------------------

    def connect(self) -> None:
        """Greet the peer; without an answer in time, again."""
        target = self.world.daemon_named(self.name)
        if not target.alive:
            self.world.after(RECONNECT_MS * MS, self.daemon, self.connect)
            return
        connection = self._connection = Connection(self.world, self.world.new_identity(), self, target)
        connection.ask(encode(Hello(PROTOCOL_VERSION, self.daemon.name, self.daemon.incarnation)))
        self.world.after(PEER_MS * MS, self.daemon, self._greeted_in_time, connection)

    def _greeted_in_time(self, connection: Connection) -> None:
        if connection is self._connection and not self.connected:
            self.lost(connection, "no answer in time")

    def lost(self, connection: Connection, reason: str) -> None:
        """This connection is over; try again."""
        if connection is not self._connection:
            return
        self.world.say("{} loses {}: {}", self.daemon.name, self.name, reason)
        self.connected = False
        self._connection = None
        connection.close_here()
        self.world.after(RECONNECT_MS * MS, self.daemon, self.connect)

    def close(self) -> None:
        """The process is gone: the kernel closes its connections."""
        if self._connection is not None:
            self._connection.close_here()
            self._connection = None

    def _welcomed(self, connection: Connection, welcome: Welcome) -> None:
        hello = encode(BulkHello(self.daemon.incarnation, welcome.ticket))
        connection.send_bulk(bulk_head(hello, 0) + hello, b"")
        same_life = welcome.incarnation == self.peer_incarnation
        self.peer_incarnation = welcome.incarnation
        self._window = welcome.window_bytes
        self._consumed = self._link_sent = 0
        self._heard_ns = self.world.now
        if same_life:
            self.ends.again()
            for shipment in self.shipments.values():
                shipment.reconnected(self.world.now)
        else:
            self.ends.clear()
            for incarnation, shipment in list(self.shipments.items()):
                self.shipments[incarnation] = self._shipment(shipment.session)
        self.connected = True
        self.world.say("{} connects to {} ({})", self.daemon.name, self.name, "again" if same_life else "new")
        self._keep_alive(connection, 1)
        self.wake()

    def wake(self) -> None:
        """There may be something to send."""
        if self.connected and not self._shipping:
            self._shipping = True
            self.world.after(self.world.between(0.02, 0.3), self.daemon, self._ship)

    def _ship(self) -> None:
        self._shipping = False
        connection = self._connection
        if not self.connected or connection is None:
            return
        while self.ends:
            self._send(connection, self.ends.say(self._number), b"")
        if self._link_sent - self._consumed > self._window // 2:
            return
        now = self.world.now
        shipments = sorted(self.shipments.values(), key=lambda s: not s.urgent(now))
        for shipment in shipments:
            room = max(0, self._window // 2 - shipment.differ.delta_bytes)
            together = shipment.next_deltas(self._number + 1, self.daemon.drain, now, room)
            for ready in together:
                self._number = ready.delta.number
                self._link_sent += self._send(connection, ready.delta, bytes(ready.payload))
            if together:
                self.wake()
                return
        if any(s.waiting for s in shipments):
            self.wake()  # a copy was made, and another one may be
        due = [ns for s in shipments if (ns := s.planner.due_ns()) is not None]
        if due:
            self.world.after(max(0, min(due) - now), self.daemon, self.wake)

    def _send(self, connection: Connection, message: Delta | End, payload: bytes) -> int:
        header = encode(message)
        self.world.say("{} -> {}: {}", self.daemon.name, self.name, message)
        connection.send_bulk(bulk_head(header, len(payload)) + header, payload)
        return BULK_HEADER.size + len(header) + len(payload)

    def listen(self, connection: Connection, payload: bytes) -> None:
        """One control message arrived."""
        if connection is not self._connection:
            return
        message = decode(payload, Control, peer=self.name)
        if isinstance(message, Welcome):
            if not self.connected:
                self._welcomed(connection, message)
            return
        if not self.connected:
            return
        self._heard_ns = self.world.now
        if isinstance(message, Ack | Nack):
            self._consumed = min(max(self._consumed, message.consumed_bytes), self._link_sent)
            self.ends.heard(message.number)
            self._answered(message)
        elif isinstance(message, Pong):
            if min(message.consumed_bytes, self._link_sent) > self._consumed:
                self.lost(connection, "an answer was lost")
                return
            for shipment in self.shipments.values():
                shipment.retry_refused(message.free_bytes, self.world.now)
        self.wake()

    def _answered(self, message: Ack | Nack) -> None:
        for shipment in self.shipments.values():
            if isinstance(message, Ack):
                shipment.acked(message, self.world.now)
                continue
            shipment.nacked(message, self.world.now)
            if message.reason == NackReason.FENCED:
                self.daemon.fence(message.seq, max(message.epoch + 1, message.fence))
        self.world.checks.acked(self, message)

    def _keep_alive(self, connection: Connection, number: int) -> None:
        if connection is not self._connection:
            return
        if self.world.now - self._heard_ns > (PEER_MS + PING_MS) * MS:
            self.lost(connection, "silent")
            return
        connection.ask(encode(Ping(number)))
        self.world.after(PING_MS * MS, self.daemon, self._keep_alive, connection, number + 1)

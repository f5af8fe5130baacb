"""The network between daemons: ordered streams that stall, break anywhere, and damage what they carry.

A connection is what a link opens: control (whole messages, as ZeroMQ gives them) and bulk (bytes, as TCP
gives them), each in order by itself, neither in order with the other. Control may go dead without a word
(both ways), or say something twice; bulk bytes may be cut into pieces, changed, or end at any byte. A
partition holds everything back; what an old connection still carries can arrive after a new one was opened.
Invariant: nothing is delivered in another order than sent within one stream of one connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.clockwork import MS, Process

if TYPE_CHECKING:
    from simulation.daemon import SimDaemon
    from simulation.link import SimLink
    from simulation.world import World

HELD_MS = 7
"""A partitioned stream tries again after this."""


@dataclass
class Faults:
    """How likely each fault is, each time that it could happen."""

    break_bulk: float = 0.0
    corrupt: float = 0.0
    cut_control: float = 0.0
    repeat_control: float = 0.0
    no_room_to_answer: float = 0.0
    slow: float = 0.0


class Stream:
    """One direction of one channel, ordered."""

    def __init__(
        self, world: World, ends: tuple[str, str], process: Process, deliver: Callable[[bytes], None]
    ) -> None:
        self._world = world
        self._ends = ends
        self._process = process
        self._life = process.life
        self._deliver = deliver
        self._waiting: deque[bytes] = deque()
        self._scheduled = False

    def send(self, data: bytes) -> None:
        """Put it on its way."""
        self._waiting.append(data)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        slow = self._world.clockwork.chance(self._world.faults.slow)
        delay = self._world.between(5, 60) if slow else self._world.between(0.1, 2.0)
        self._world.after(delay, None, self._arrive)

    def _arrive(self) -> None:
        if frozenset(self._ends) in self._world.partitions:
            self._world.after(HELD_MS * MS, None, self._arrive)
            return
        data = self._waiting.popleft()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            self._schedule()
        self._world.clockwork.run_in(self._process, self._life, self._deliver, data)


class Connection:
    """One life of a link: control both ways, bulk one way. `number` is its ZeroMQ identity."""

    def __init__(self, world: World, number: int, link: SimLink, target: SimDaemon) -> None:
        self.number = number
        self.link = link
        self.target = target
        self.closed_here = self.closed_there = False
        self._world = world
        writer, receiver = link.daemon, target
        there, back = (writer.name, receiver.name), (receiver.name, writer.name)
        self._to_receiver = Stream(world, there, receiver, self._control_there)
        self._to_writer = Stream(world, back, writer, self._control_here)
        self._bulk = Stream(world, there, receiver, self._bulk_there)
        self._eof = Stream(world, back, writer, lambda _: link.lost(self, "the peer closed the connection"))
        self._broken = self._deaf = False

    # -- control ------------------------------------------------------------------------------

    def ask(self, message: bytes) -> None:
        """Writer to receiver."""
        self._control(self._to_receiver, message)

    def answer(self, message: bytes) -> None:
        """Receiver to writer; a peer that is gone is not waited for."""
        if not self.closed_here:
            self._control(self._to_writer, message)

    def _control(self, stream: Stream, message: bytes) -> None:
        clockwork, faults = self._world.clockwork, self._world.faults
        if clockwork.chance(faults.cut_control):
            self._world.say("net: control of {} -> {} is dead", self.link.daemon.name, self.target.name)
            self._deaf = True
        if self._deaf:
            return
        stream.send(message)
        if clockwork.chance(faults.repeat_control):
            stream.send(message)

    def _control_there(self, message: bytes) -> None:
        if not self.closed_here:
            self.target.receiver.control(self, message)

    def _control_here(self, message: bytes) -> None:
        if not self.closed_here:
            self.link.listen(self, message)

    # -- bulk ---------------------------------------------------------------------------------

    def send_bulk(self, header: bytes, payload: bytes) -> None:
        """A frame in pieces; the network may change a byte of the payload, or end inside."""
        clockwork, faults = self._world.clockwork, self._world.faults
        if self._broken or self.closed_here:
            return
        if payload and clockwork.chance(faults.corrupt):
            at = clockwork.rng.randrange(len(payload))
            payload = (
                payload[:at] + bytes([payload[at] ^ (1 << clockwork.rng.randrange(8))]) + payload[at + 1 :]
            )
            self._world.say("net: a byte changes between {} and {}", self.link.daemon.name, self.target.name)
        data = header + payload
        broken = clockwork.chance(faults.break_bulk)
        if broken:
            self._broken = True
            data = data[: clockwork.rng.randrange(len(data))]
            self._world.say("net: {} -> {} breaks", self.link.daemon.name, self.target.name)
        cut = clockwork.rng.randrange(len(data) + 1)
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._bulk.send(piece)
        if broken:
            self._bulk.send(b"")
            self._eof.send(b"")

    def _bulk_there(self, data: bytes) -> None:
        if not self.closed_there:
            self.target.receiver.bulk(self, data)

    # -- the end ------------------------------------------------------------------------------

    def close_here(self) -> None:
        """The writer's end goes: the receiver reads what is under way, then the end of the stream."""
        if not self.closed_here:
            self.closed_here = True
            self._bulk.send(b"")

    def close_there(self) -> None:
        """The receiver's end goes: the writer notices (`_until_closed`)."""
        if not self.closed_there:
            self.closed_there = True
            self._eof.send(b"")

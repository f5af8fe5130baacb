"""The channel between the daemons of one engine's ranks: rank 0 says where sequences go, the others report.

Runs over control: each follower connects to the leader's ROUTER. Holds no policy: what is decided, and what
is made of reports, is `group_placement`'s affair. Every report is answered, so both sides notice silence; a
link that broke begins anew with everything said again, and no message is larger than `MAX_WORDS` allows.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog
import zmq
import zmq.asyncio

from segue_core.clock import Clock
from segue_core.errors import ProtocolError, SegueError, Unavailable
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import Control, Join, Joined, Placements, Report
from segue_core.messages.status import GroupStatus
from segue_daemon.dial import control_socket
from segue_daemon.gate import Hush
from segue_daemon.group_placement import FollowingPlacement, LeadingPlacement
from segue_daemon.keys import Keys
from segue_daemon.placement import Placement
from segue_daemon.settings import DaemonSettings
from segue_daemon.wire import encode

log = structlog.get_logger()

REPORT_S = 0.25
MAX_MESSAGE_BYTES = 1 << 20

Send = Callable[[bytes, Joined | Placements], Awaitable[bool]]


def placement_of(settings: DaemonSettings) -> Placement:
    """The placement of a daemon: for its engine alone, as its group's leader, or as a follower."""
    names = [peer.name for peer in settings.peers]
    options: dict[str, Any] = {
        "host": settings.labels.host or socket.gethostname()[:64],
        "zone": settings.labels.zone,
        "replicas": settings.replication.replicas,
        "grace_ns": settings.replication.replace_after_ms * 1_000_000,
    }
    if settings.group.rank:
        return FollowingPlacement(names, **options)
    if settings.group.ranks > 1:
        return LeadingPlacement(names, ranks=settings.group.ranks, **options)
    return Placement(names, **options)


@dataclass
class Member:
    """A follower that has joined."""

    identity: bytes
    heard_ns: int


class Leader:
    """At rank 0; also where there is one rank only, and nobody may join."""

    def __init__(self, settings: DaemonSettings, placement: Placement, clock: Clock, send: Send) -> None:
        """`send(identity, message)` returns whether it went out."""
        self._settings = settings
        self._placement = placement if isinstance(placement, LeadingPlacement) else None
        self._clock = clock
        self._send = send
        self._members: dict[int, Member] = {}
        self._hush = Hush()
        self._wake = asyncio.Event()
        if self._placement is not None:
            self._placement.changed = self._wake.set

    async def hear(self, identity: bytes, message: Join | Report) -> None:
        """A follower says something. One that is not known, or not any more, hears nothing and joins anew."""
        if isinstance(message, Join):
            await self._join(identity, message)
            return
        for rank, member in self._members.items():
            if member.identity == identity and self._placement is not None:
                member.heard_ns = self._clock.now_ns()
                self._placement.reported(rank, message.peers, message.turned_away, member.heard_ns)
                if self._placement.follows(rank):
                    await self._tell(rank, member, message.number)
                else:
                    self._leave(rank, member)  # too much to tell: it hears nothing, and joins again
                return

    async def _join(self, identity: bytes, join: Join) -> None:
        refusal = self._refusal(join)
        await self._send(identity, Joined(PROTOCOL_VERSION, refusal))
        now_ns = self._clock.now_ns()
        if refusal or self._placement is None:
            if self._hush.is_news(join.name, refusal, now_ns):  # it tries again and again
                log.warning("another rank's daemon may not join", reason=refusal)
            return
        self._members[join.rank] = Member(identity, now_ns)
        self._placement.joined(join.rank, now_ns)
        self._wake.set()
        log.info("rank joined", rank=join.rank, ranks=join.ranks)

    def _refusal(self, join: Join) -> str:
        group, name = self._settings.group, self._settings.name
        if join.version != PROTOCOL_VERSION:
            return f"protocol {PROTOCOL_VERSION} is spoken here, not {join.version}: run one Segue release"
        if join.name != name:
            return f"this is the daemon of engine {name!r}, not {join.name!r}: check `group.leader`"
        if group.rank or join.ranks != group.ranks or not 0 < join.rank < group.ranks:
            return (
                f"this daemon is for rank {group.rank} of {group.ranks}, and rank {join.rank} of {join.ranks}"
                " wants to join: check `group` on both sides"
            )
        return ""

    def status(self) -> GroupStatus:
        """Who follows."""
        group = self._settings.group
        away = [rank for rank in range(1, group.ranks) if rank not in self._members]
        detail = f"not joined: rank {', '.join(map(str, away))}; nothing new is placed" if away else ""
        return GroupStatus(group.rank, group.ranks, tuple(sorted(self._members)), detail)

    async def run(self) -> None:
        """For ever: tell what changed, and notice who fell silent."""
        while True:
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now_ns = self._clock.now_ns()
            silent_ns = int(1e6 * self._settings.timeouts.peer_ms + 1e9 * REPORT_S)
            for rank, member in list(self._members.items()):
                if now_ns - member.heard_ns > silent_ns:
                    self._leave(rank, member)
                else:
                    await self._tell(rank, member, 0)

    async def _tell(self, rank: int, member: Member, number: int) -> None:
        """All that the follower has not been told, and at least an answer to report `number`."""
        while self._placement is not None and ((words := self._placement.words(rank)) or number):
            if not await self._send(member.identity, Placements(number, words)):
                self._leave(rank, member)
                return
            number = 0

    def _leave(self, rank: int, member: Member) -> None:
        if self._members.get(rank) is member and self._placement is not None:
            del self._members[rank]
            self._placement.left(rank, self._clock.now_ns())
            log.warning("a rank's daemon is gone; nothing new is placed until it is back", rank=rank)


class Follower:
    """At any other rank."""

    def __init__(
        self,
        settings: DaemonSettings,
        placement: FollowingPlacement,
        context: zmq.asyncio.Context,
        clock: Clock,
        keys: Keys | None,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._context = context
        self._clock = clock
        self._keys = keys
        self._heard_ns = 0
        self._detail = "not joined yet"
        self._logged = ""

    def status(self) -> GroupStatus:
        """Whether it follows."""
        group = self._settings.group
        return GroupStatus(group.rank, group.ranks, () if self._detail else (0,), self._detail)

    async def run(self) -> None:
        """Follow the leader for ever; ends by cancellation."""
        while True:
            try:
                await self._follow()
            except (SegueError, OSError, zmq.ZMQError) as error:
                self._lost(str(error) or "no answer in time")
            await asyncio.sleep(self._settings.timeouts.reconnect_ms / 1000)

    def _lost(self, reason: str) -> None:
        self._detail = reason
        if reason != self._logged:
            leader = self._settings.group.leader
            log.warning("no word from rank 0: nothing new is placed", leader=leader, reason=reason)
            self._logged = reason

    async def _follow(self) -> None:
        settings, group = self._settings, self._settings.group
        control = control_socket(self._context, self._keys, settings.name, max_bytes=MAX_MESSAGE_BYTES)
        try:
            control.connect(f"tcp://{group.leader}")
            async with asyncio.timeout(settings.timeouts.peer_ms / 1000):
                await control.send(encode(Join(PROTOCOL_VERSION, settings.name, group.rank, group.ranks)))
                joined = decode(await control.recv(), Control, peer="rank 0")
            if not isinstance(joined, Joined) or joined.refusal:
                raise ProtocolError(f"rank 0 at {group.leader}: {getattr(joined, 'refusal', 'no answer')}")
            self._placement.joined()
            self._heard_ns = self._clock.now_ns()
            self._detail = self._logged = ""
            log.info("joined rank 0", leader=group.leader)
            await self._converse(control)
        finally:
            control.close()

    async def _converse(self, control: zmq.asyncio.Socket) -> None:
        tasks = [asyncio.create_task(self._listen(control)), asyncio.create_task(self._report(control))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, control: zmq.asyncio.Socket) -> None:
        while True:
            message = decode(await control.recv(), Control, peer="rank 0")
            if isinstance(message, Placements):
                self._heard_ns = self._clock.now_ns()
                self._placement.told(message.words)

    async def _report(self, control: zmq.asyncio.Socket) -> None:
        number = 0
        while True:
            number += 1
            placement = self._placement
            await control.send(encode(Report(number, placement.views(), placement.turned_away())))
            await asyncio.sleep(REPORT_S)
            silent_ms = (self._clock.now_ns() - self._heard_ns) // 1_000_000
            if silent_ms > self._settings.timeouts.peer_ms + 1000 * REPORT_S:
                raise Unavailable(f"no answer for {silent_ms} ms")

"""Control messages: from strangers to the receiver, and from a hostile peer to a link.

Real: the receiver behind its ZeroMQ socket; the link with its outbox, planner and shipments, given messages
as its socket would give them.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from fuzz.daemon_world import DaemonWorld
from fuzz.on_journal import MAX_SEQUENCES, SEQS, SIZE, JournalTarget
from fuzz.target import Target, demand
from segue_core.content_key import TOKEN_BYTES
from segue_core.errors import SegueError
from segue_core.framing import encode_frame
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.local import Fenced
from segue_core.messages.peer import Ack, Hello, Nack, NackReason, Ping, Pong, Welcome
from segue_daemon.link import Link
from segue_daemon.placement import Placement
from segue_daemon.settings import DaemonSettings, PeerSettings

IDENTITIES = 5


class ControlTarget(Target):
    """Frames from several strangers to one receiver."""

    name = "control"
    world_frames = 20_000

    async def start(self) -> None:
        self.world = DaemonWorld()
        await self.world.start()
        self.context: zmq.asyncio.Context = zmq.asyncio.Context()
        self.number = 1 << 40
        self.links = [self._connect() for _ in range(IDENTITIES)]

    def _connect(self) -> zmq.asyncio.Socket:
        link = self.context.socket(zmq.DEALER)
        link.linger = 0
        link.connect(f"tcp://127.0.0.1:{self.world.receiver.control_port}")
        return link

    async def feed(self) -> int:
        index = self.rng.randrange(IDENTITIES)
        link = self.links[index]
        frames = self.rng.randrange(1, 60)
        for _ in range(frames):
            if self.mutate.chance(0.02):
                await link.send_multipart([b"x"] * self.rng.choice((2, 3, 50)))
            else:
                await link.send(self.mutate.message(self._message()))
        self.number += 1
        await link.send(msgspec.msgpack.encode(Ping(self.number)))
        async with asyncio.timeout(60):
            while not self._is_mine(await link.recv()):
                pass
        if self.mutate.chance(0.05):
            link.close()
            self.links[index] = self._connect()
        return frames

    def _is_mine(self, answer: bytes) -> bool:
        message = msgspec.msgpack.decode(answer)
        return bool(message[:2] == ["pong", self.number])

    def _message(self) -> msgspec.Struct:
        name = f"n{self.rng.randrange(3000)}" if self.mutate.chance(0.5) else "a"
        choices: tuple[msgspec.Struct, ...] = (
            Hello(PROTOCOL_VERSION, name, self.rng.randrange(3)),
            Hello(PROTOCOL_VERSION, name, 1, "host", "zone"),
            Ping(self.rng.randrange(100)),
            Ack(1, "s", 1, 1, 1),
            Nack(1, "s", 1, 1, NackReason.FENCED, 1),
            Welcome(PROTOCOL_VERSION, "a", 1, 1, 1, 1),
        )
        return self.rng.choice(choices)

    def sizes(self) -> dict[str, tuple[int, int]]:
        receiver = self.world.receiver
        return {
            "writers": (len(receiver._writers), 1024),
            "lost writers": (len(receiver._lost), 1024),
            "writers in another life": (len(receiver._reborn), 1024),
            "tasks": (len(receiver._tasks), 20),
        }

    def effects(self) -> dict[str, int]:
        return {"writers": len(self.world.receiver._writers)}

    async def stop(self) -> None:
        self.context.destroy(linger=0)
        await self.world.stop()


class Script:
    """A control socket that says what it was given, and then that it is over."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames

    async def recv_multipart(self) -> list[bytes]:
        if not self._frames:
            raise EOFError
        return [self._frames.pop(0) for _ in range(min(2, len(self._frames)))]


class LinkTarget(Target):
    """A hostile peer answers a link that ships what an engine does."""

    name = "link"
    world_frames = 20_000

    async def start(self) -> None:
        self.engine = JournalTarget(self.mutate)
        await self.engine.start()
        tree = {"name": "a", "socket": "/none", "peers": [{"name": "b", "control": "127.0.0.1:1"}]}
        settings = msgspec.convert(tree, DaemonSettings)
        self.told: list[bytes] = []
        self.acked = self.repaired = 0
        self.context: zmq.asyncio.Context = zmq.asyncio.Context()
        placement = Placement(["b"], host="h", zone="", replicas=1, grace_ns=1)
        peer = PeerSettings("b", "127.0.0.1:1")
        self.link = Link(peer, settings, 1, self.context, self.engine.clock, self, placement)
        self.placement = placement
        self.link.add_engine(self.engine.session)
        self.link._start_link(self._welcome())

    def drain(self) -> None:
        """As the engine's side of the daemon does."""
        session = self.engine.session
        for changes in session.drain():
            self.link.note(session, changes)
            for seq, epoch in changes.ended:
                self.link.end(session.incarnation, seq, epoch)

    def fence(self, seq: str, epoch: int) -> bool:
        """As the engine's side of the daemon does: the engine is told."""
        if self.engine.session.ledger.fence(seq, epoch):
            self.told = [*self.told[-10:], encode_frame(Fenced(seq, epoch))]
        return True

    def _welcome(self) -> Welcome:
        return Welcome(
            PROTOCOL_VERSION, "b", self.rng.randrange(3), 1, self.rng.choice((1, 1 << 20)), 1, "g", "z"
        )

    async def feed(self) -> int:
        frames = self.rng.randrange(1, 40)
        self._work()
        script: Any = Script([self._frame() for _ in range(frames)])
        try:
            await self.link._listen(script)
        except EOFError:
            pass
        except SegueError as error:
            self.link._disconnected(str(error))
            self.link._start_link(self._welcome())
        outbox = self.link._outbox
        demand(
            0 <= outbox.in_flight <= max(outbox.window * 4, 4 << 20), f"{outbox.in_flight} bytes under way"
        )
        for shipment in self.link._shipments.values():
            for seq, progress in shipment.planner.progress.items():
                self.acked += progress.acked
                demand(0 <= progress.acked <= progress.sent, f"{seq}: more acked than was sent")
        msgspec.json.encode(self.link.status())
        if self.mutate.chance(0.02):
            await self._mend()
        return frames

    async def _mend(self) -> None:
        """The peer is well again, in this life or the next: what goes to it is acked, whatever was before."""
        self.repaired += 1
        life = self.rng.choice((self.link._peer_incarnation, 1000 + self.repaired))
        self.link._start_link(Welcome(PROTOCOL_VERSION, "b", life, 1, 1 << 12, 1, "g", "z"))
        consumed = 0
        self._write(("good", SIZE))
        for _ in range(30):
            self.engine.clock.advance_ms(100)
            self._place()
            ready = self.link._outbox.next_deltas(self.drain, self.engine.clock.now_ns())
            for each in [] if isinstance(ready, int) else ready:
                delta, sent = each.delta, len(each.payload) + 50
                self.link._outbox.sent(sent)
                consumed += sent
                upto = delta.base + len(delta.token_ids) // TOKEN_BYTES
                ack = Ack(delta.number, delta.seq, delta.epoch, upto, consumed)
                with contextlib.suppress(EOFError):
                    await self.link._listen(Script([msgspec.msgpack.encode(ack)]))  # type: ignore[arg-type]
        acked = self.link.watermark(self.engine.session, "good")
        demand(acked == SIZE, f"a peer that is well again acked {acked} tokens of {SIZE}")
        self._write(ended=("good",))

    def _work(self) -> None:
        """The engine goes on and the link ships."""
        for _ in range(3):
            self._grow()
        self.engine.clock.advance_ms(self.rng.choice((0, 1, 700)))
        self._place()
        for _ in range(6):
            ready = self.link._outbox.next_deltas(self.drain, self.engine.clock.now_ns())
            if isinstance(ready, int):
                break
            self.link._outbox.sent(sum(len(each.payload) + 50 for each in ready))

    def _place(self) -> None:
        """What the engine wrote is heard, and its sequences are placed."""
        self.drain()
        now_ns = self.engine.clock.now_ns()
        self.placement.room("b", 1 << 20, budget_bytes=1 << 21, running=1, serving=True, link_ms=1.0)
        if self.placement.due(now_ns):
            moves = self.placement.review(list(self.engine.session.ledger.sequences), now_ns)
            self.link.moved(self.engine.session, moves)

    def _grow(self) -> None:
        """A sequence begins anew and is computed; another one may end."""
        seq, other = self.rng.sample(SEQS[: MAX_SEQUENCES - 1], 2)
        ended = (other,) if self.mutate.chance(0.1) else ()
        self._write((seq, SIZE * self.rng.randrange(1, 5)), ended=ended)

    def _write(self, *begun: tuple[str, int], ended: tuple[str, ...] = ()) -> None:
        """The engine begins sequences of so many tokens, computes them, and ends others."""
        engine, step = self.engine, self.engine.step + 1
        engine.step = step
        begins = tuple(
            SequenceBegin(seq, 1, b"", engine._ids(tokens), engine._blocks(tokens // SIZE), 0)
            for seq, tokens in begun
        )
        for record in (Begin(step, False, b"", begins, (), (), ended), Commit(step, begun)):
            engine.writer.append(msgspec.msgpack.encode(record))

    def _frame(self) -> bytes:
        """Mostly right: the first that is not ends the link."""
        message = self._message()
        return self.mutate.message(message) if self.mutate.chance(0.1) else msgspec.msgpack.encode(message)

    def _message(self) -> msgspec.Struct:
        rng = self.rng
        known = list(self.engine.session.ledger.sequences.values())
        seq, epoch = (known[0].seq, known[0].epoch) if known and self.mutate.chance(0.8) else ("s1", 1)
        number = max(0, self.link._outbox.number - rng.randrange(-2, 9))
        about = number, seq, epoch, rng.randrange(30)
        consumed = self.link._outbox._sent if self.mutate.chance(0.6) else self.mutate.integer() % (1 << 62)
        choices: tuple[msgspec.Struct, ...] = (
            Ack(*about, consumed),
            Nack(*about, rng.choice(list(NackReason)), consumed),
            Nack(number, seq, rng.choice((epoch, (1 << 63) - 1)), 0, NackReason.FENCED, consumed),
            Pong(rng.randrange(5), self.mutate.integer() % (1 << 62), 1 << 20, 3, True),
            self._welcome(),
        )
        return rng.choice(choices)

    def sizes(self) -> dict[str, tuple[int, int]]:
        link = self.link
        return {
            "ends": (len(link._ends.pending), 100_000),
            "ends that were said": (len(link._ends.said), 100_000),
        }

    def effects(self) -> dict[str, int]:
        return {
            "deltas": self.link._outbox.number,
            "acked": self.acked,
            "fenced": len(self.told),
            "well again": self.repaired,
        }

    async def stop(self) -> None:
        self.link.drop_engine(self.engine.session)
        await self.engine.stop()
        self.context.destroy(linger=0)

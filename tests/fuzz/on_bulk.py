"""Bulk frames into a real receiver and store, over TCP: headers that lie, payloads that do not fit.

After each connection the store's books are in order and no byte was written outside of a block.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec

from fuzz.daemon_world import DaemonWorld
from fuzz.deltas_of import DeltaMaker
from fuzz.mutate import Mutator
from fuzz.target import Target, demand
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import BULK_HEADER, BulkHello, Hello, bulk_head
from segue_daemon.replicas import Wanted

MAX_FRAMES = 8
AUDIT_EVERY = 100
"""Connections from one look at the store's books to the next."""


class BulkTarget(Target):
    """See the module."""

    name = "bulk"
    world_frames = 20_000

    def __init__(self, mutate: Mutator) -> None:
        super().__init__(mutate)
        self.world = DaemonWorld()
        self.maker = DeltaMaker(self.world.store, mutate)
        self.now_ns = 1
        self.found = self.connections = 0

    async def start(self) -> None:
        await self.world.start()
        self.listener = socket.create_server(("127.0.0.1", 0))

    async def feed(self) -> int:
        receiver = self.world.receiver
        identity, name = b"id" + bytes([self.rng.randrange(4)]), f"a{self.rng.randrange(4)}"
        await receiver._greet(identity, Hello(PROTOCOL_VERSION, name, 7))
        ticket = receiver._writers[identity].ticket
        greeting = msgspec.msgpack.encode(BulkHello(7, ticket))
        if self.mutate.chance(0.03):
            greeting = self.mutate.octets(greeting)
        frames = self.rng.randrange(1, MAX_FRAMES)
        stream = framed(greeting, b"") + b"".join(self._frame() for _ in range(frames))
        if self.mutate.chance(0.1):
            stream = stream[: self.rng.randrange(len(stream))]
        await self._send(stream)
        self._use()
        self.world.watch.check()
        self.connections += 1
        if not self.connections % AUDIT_EVERY:
            self.world.check()
        return frames

    def _frame(self) -> bytes:
        roll = self.rng.random()
        if roll < 0.1:
            return framed(self.mutate.message(self.maker.end()), b"")
        if roll < 0.45:
            delta, payload = self.maker.next()
            return framed(msgspec.msgpack.encode(delta), payload)
        if roll < 0.7:
            delta, payload = self.maker.nearly()
            return framed(msgspec.msgpack.encode(delta), payload)
        delta, payload = self.maker.next()
        if roll < 0.85:
            return framed(self.mutate.message(delta), payload)
        if roll < 0.93:
            return framed(msgspec.msgpack.encode(delta), self.mutate.octets(payload))
        head = (self.mutate.integer() % (1 << bits) for bits in (32, 64, 32))
        changed = bytearray(framed(msgspec.msgpack.encode(delta), payload))
        if self.mutate.chance(0.5):
            changed[: BULK_HEADER.size] = BULK_HEADER.pack(*head)
        else:
            changed[self.rng.randrange(len(changed) - len(payload))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    async def _send(self, stream: bytes) -> None:
        """One connection, from its first byte to its end."""
        ours = socket.create_connection(self.listener.getsockname())
        theirs, _ = self.listener.accept()
        with ours:
            theirs.setblocking(False)
            task = asyncio.create_task(self.world.receiver._serve_bulk(theirs, "fuzz"))
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            with contextlib.suppress(ConnectionError):  # it has hung up already
                for piece in self.mutate.cuts(stream) if self.mutate.chance(0.1) else [stream]:
                    await loop.sock_sendall(ours, piece)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_WR)
            await asyncio.wait([task])
            if not task.cancelled():  # a link that is over ends its task
                task.result()

    def _use(self) -> None:
        """Engines and routers ask meanwhile."""
        store = self.world.store
        self.now_ns += self.rng.randrange(30_000_000)
        replica = store.replicas.get(self.maker.seq())
        if replica is not None and self.mutate.chance(0.3):
            wanted = Wanted(
                replica.fingerprint,
                replica.salt,
                bytes(replica.token_ids) + bytes(8),
                replica.block_size,
                replica.block_bytes,
            )
            found = store.match(wanted, seq=replica.seq, computed=0, limit=1 << 20, now_ns=self.now_ns)
            self.found += found.tokens
            demand(found.tokens <= len(wanted.token_ids) // 4, "more was found than was asked for")
            if self.mutate.chance(0.5):
                store.release(found.lease, loaded=self.mutate.chance(0.5))
        store.expire(self.now_ns)
        if self.mutate.chance(0.02):
            store.promote(self.maker.seq(), self.rng.choice((1, 2, 3)), self.now_ns)

    def sizes(self) -> dict[str, tuple[int, int]]:
        receiver, store = self.world.receiver, self.world.store
        return {
            "writers": (len(receiver._writers), 1024),
            "lost writers": (len(receiver._lost), 1024),
            "writers in another life": (len(receiver._reborn), 1024),
            "losses": (receiver._losses._count, 10_000),
            "leases": (store.leases, 10_000),
            "tasks": (len(receiver._tasks), 20),
        }

    def effects(self) -> dict[str, int]:
        store = self.world.store
        counts = {"refused": store.refused, "corrupt": self.world.receiver.corrupt, "found": self.found}
        return counts | {"replicas": len(store.replicas), "sealed blocks": store.sealed_blocks}

    async def stop(self) -> None:
        try:
            self.world.check()
        finally:
            self.listener.close()
            await self.world.stop()


def framed(header: bytes, payload: bytes) -> bytes:
    """A bulk frame."""
    return bulk_head(header, len(payload)) + header + payload

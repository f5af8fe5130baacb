"""A daemon's engine side with engines that die, for what is kept of them: real ring, pages and store."""

from __future__ import annotations

import asyncio
import os
from array import array
from typing import Any

import msgspec
import numpy as np

from segue_core.clock import MonotonicClock
from segue_core.content_key import chain, root_key
from segue_core.geometry import Geometry, Region
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.local import Register
from segue_core.messages.peer import Delta, Part, PartKind
from segue_core.ring import Ring
from segue_core.shared_memory import seal_size, sealable_memory
from segue_daemon.arena import Bytes
from segue_daemon.engine_host import EngineHost
from segue_daemon.kept import OwnKeep
from segue_daemon.replicas import Loss, Refusal, Wanted
from segue_daemon.settings import DaemonSettings, TimeoutSettings
from segue_daemon.store import ReplicaStore

SIZE, BLOCKS, BLOCK = 4, 200, 64

GEOMETRY = Geometry(
    BLOCKS,
    SIZE,
    (BLOCKS * BLOCK,),
    (Region(0, 0, (BLOCKS, SIZE, 8), (BLOCK, 16, 2), 2, ("block", "slot", "dim")),),
)

FINGERPRINT = b"f" * 16

TTL_NS = 1000


class Connection:
    """The worker's end, as far as the host needs it. Its process is not visible."""

    pid = 0

    def __init__(self) -> None:
        self.told: list[Any] = []

    def send(self, message: Any) -> None:
        self.told.append(message)


class Life:
    """One life of an engine: its journal and its pages; block n is filled with n + `shade`."""

    def __init__(self, incarnation: int, fingerprint: bytes = FINGERPRINT, shade: int = 1) -> None:
        ring_fd, pages = sealable_memory("journal"), sealable_memory("pages")
        self.journal = Ring(ring_fd, create=1 << 16)
        seal_size(ring_fd)
        content = np.repeat(np.arange(BLOCKS, dtype=np.uint8) + shade, BLOCK)
        os.write(pages, content.tobytes())
        self.lifeline = Lifeline()
        self.message = Register(PROTOCOL_VERSION, "a", incarnation, "m", fingerprint, GEOMETRY)
        self.fds = [ring_fd, os.eventfd(0), os.dup(self.lifeline.fd), pages]
        self.connection: Any = Connection()
        self._free = 0

    def write(self, seq: str, tokens: int, *, epoch: int = 1, **more: Any) -> None:
        """A sequence with `tokens` computed tokens, in blocks of its own."""
        count = -(-tokens // SIZE)
        blocks = array("I", range(self._free, self._free + count)).tobytes()
        self._free += count
        begun = SequenceBegin(seq, epoch, b"", ids_of(seq, tokens), blocks, 0, **more)
        for record in (Begin(1, False, blocks, (begun,), (), (), ()), Commit(1, ((seq, tokens),))):
            assert self.journal.append(msgspec.msgpack.encode(record))


class Peer:
    """A link whose peer has what the test says."""

    name = "b"

    def __init__(self, *, connected: bool, has: dict[str, int] | None = None) -> None:
        self.connected = connected
        self.has = has or {}

    def watermark(self, _session: object, seq: str) -> int:
        return self.has.get(seq, 0)

    async def flushed(self, _session: object) -> None:
        return

    def add_engine(self, *_: object) -> None:
        return

    note = end = drop_engine = add_engine


class Host:
    """A daemon's engine host and store, without the daemon."""

    def __init__(
        self, blocks: int = 100, *peers: Peer, salvage_ms: int = 10_000, low: float = 1.0, **options: Any
    ) -> None:
        self.clock = options.pop("clock", MonotonicClock())
        self.losses: list[Loss] = []
        self.memory: Bytes = np.zeros(blocks * BLOCK, np.uint8)
        self.store = ReplicaStore(self.memory, lease_ns=10**9, low_watermark=low, on_loss=self.losses.append)
        self.keep = OwnKeep(self.store, ttl_ns=options.pop("ttl_ns", TTL_NS), **options)
        settings = DaemonSettings("a", "unused", timeouts=TimeoutSettings(salvage_ms=salvage_ms))
        self.salvages: list[asyncio.Task[None]] = []
        links: Any = peers
        spawn = lambda run: self.salvages.append(asyncio.create_task(run))  # noqa: E731
        self.host = EngineHost(settings, self.clock, links, self.keep, spawn, lambda: None)

    def register(self, life: Life) -> None:
        assert self.host.register(life.message, life.fds, life.connection) is None

    async def dies(self, life: Life) -> None:
        """The engine is killed; returns once its memory was let go."""
        self.begin_to_die(life)
        await asyncio.wait_for(self.salvages[-1], 20)

    def begin_to_die(self, life: Life) -> None:
        self.host.drain()
        session = self.host.live
        assert session is not None and session.incarnation == life.message.incarnation
        self.host.left(session, dead=True)

    def kept(self) -> dict[str, int]:
        return {seq: replica.watermark for seq, replica in self.store.replicas.items() if replica.own}

    def load(self, seq: str, tokens: int) -> int:
        """The engine that registered last asks for the KV of these tokens, and loads what there is."""
        assert self.host.session is not None
        wanted = Wanted(self.host.session.ledger.fingerprint, b"", ids_of(seq, tokens), SIZE, BLOCK)
        found = self.store.match(wanted, seq=seq, computed=0, limit=tokens, now_ns=self.clock.now_ns())
        self.store.release(found.lease, loaded=True)
        return found.tokens

    def bytes_of(self, seq: str) -> list[int]:
        """What each block of a replica is filled with."""
        blocks = [self.memory[b.offset : b.offset + b.nbytes] for b in self.store.replicas[seq].blocks]
        assert all((block == block[0]).all() for block in blocks)
        return [int(block[0]) for block in blocks]

    def from_peer(self, seq: str, tokens: int, *, base: int = 0, epoch: int = 1) -> int | Refusal:
        """A delta of a peer's."""
        keys = list(chain(root_key(FINGERPRINT, b""), ids_of(seq, tokens), SIZE))
        last = -(-tokens // SIZE)
        parts = tuple(
            Part(i, PartKind.WHOLE, keys[i] if i < len(keys) else b"", BLOCK)
            for i in range(base // SIZE, last)
        )
        new = ids_of(seq, tokens)[4 * base :]
        delta = Delta(1, seq, epoch, 77, FINGERPRINT, b"", SIZE, BLOCK, base, new, parts, 0)
        reservation = self.store.reserve(delta, "b", self.clock.now_ns())
        if isinstance(reservation, Refusal):
            return reservation
        return self.store.commit(reservation, {}, self.clock.now_ns())


def ids_of(seq: str, tokens: int) -> bytes:
    start = 1000 * (1 + sum(seq.encode()))
    return array("I", range(start, start + tokens)).tobytes()

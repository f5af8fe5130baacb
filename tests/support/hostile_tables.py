"""An engine that only publishes its tables, with an allocator that hands blocks on as soon as it can, and the
daemon's side of it in the same process: real journal, real pages, real shipment, real store.

The engine runs on while the daemon is in the middle of a copy. Its KV says which token of which position it
is and which time it was computed, so that a slot that was put together from two times is noticed.
"""

from __future__ import annotations

import mmap
import os
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from segue_core.clock import ManualClock
from segue_core.geometry import Geometry, Region
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Commit, SequenceBegin
from segue_core.messages.local import Register
from segue_core.messages.peer import Ack, End, Nack, NackReason, PartKind
from segue_core.ring import Ring, Word
from segue_core.shared_memory import seal_size, sealable_memory
from segue_daemon.confirmed import shipment_of
from segue_daemon.engine import EngineSession
from segue_daemon.pages import HostPages
from segue_daemon.replicas import Refusal, Wanted
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Ready
from segue_daemon.store import ReplicaStore
from segue_shim.plan import pack_u32
from segue_shim.published import PublishedTables
from segue_shim.table import LiveTable

SIZE, DIM, BLOCKS, LAYERS, TIMES = 4, 12, 10, 2, 5
FINGERPRINT = b"h" * 16
LAYER_BYTES = BLOCKS * SIZE * DIM * 2


def layout(*, slots: bool) -> Geometry:
    """[block, slot, dim], or [block, dim, slot] of which nothing is claimed; two layers."""
    axes = ("block", "slot", "dim") if slots else ("block", "opaque", "opaque")
    shape = (BLOCKS, SIZE, DIM) if slots else (BLOCKS, DIM, SIZE)
    strides = (SIZE * DIM * 2, shape[2] * 2, 2)
    regions = tuple(Region(0, i * LAYER_BYTES, shape, strides, 2, axes) for i in range(LAYERS))
    return Geometry(BLOCKS, SIZE, (LAYERS * LAYER_BYTES,), regions).validate()


def kv(token: int, position: int, time: int) -> np.ndarray[Any, Any]:
    """(LAYERS, DIM) int16 of one token, computed for the `time`-th time."""
    base = np.arange(LAYERS * DIM, dtype=np.int64).reshape(LAYERS, DIM)
    return ((base * 131 + token * 7919 + position * 10473 + time * 3571) % 30011 + 1).astype(np.int16)


@dataclass
class Live:
    """One sequence. `time`: how often it was computed from its start."""

    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    time: int = 0


class HostileEngine:
    """The engine and its journal. `publish_every`: steps between two publications."""

    def __init__(self, rng: random.Random, *, slots: bool, publish_every: int = 1) -> None:
        self.rng = rng
        self.slots = slots
        self.geometry = layout(slots=slots)
        self.live: dict[str, Live] = {}
        self.free = list(range(BLOCKS))
        self.steps = 0
        self.names = 0
        self.publish_every = publish_every
        self.stands_still = False
        self._between_steps = True
        self._tables = PublishedTables(num_blocks=BLOCKS, block_size=SIZE)
        self._table = LiveTable()
        self._table.announce_all()
        pages = os.memfd_create("pages")
        os.ftruncate(pages, LAYERS * LAYER_BYTES)
        self._map = mmap.mmap(pages, LAYERS * LAYER_BYTES)
        shape = (LAYERS, BLOCKS, SIZE, DIM) if slots else (LAYERS, BLOCKS, DIM, SIZE)
        self._pages = np.frombuffer(self._map, np.int16).reshape(shape)
        ring = sealable_memory("journal")
        self.ring = Ring(ring, create=1 << 13)
        seal_size(ring)
        self._lifeline = Lifeline()
        message = Register(PROTOCOL_VERSION, "a", 1, "m", FINGERPRINT, self.geometry, notice="after")
        fds = [ring, os.eventfd(0), os.dup(self._lifeline.fd), pages]
        self.session = EngineSession(message, fds, 0, ManualClock(start_ns=1), max_sequences=100)
        self._running = self._run()

    def tick(self) -> None:
        """The next piece of work: a part of a step, or a publication."""
        if not self.stands_still:
            next(self._running)

    def stand_still(self) -> None:
        """Bring the step to its end, then do nothing more; publishing is the caller's."""
        while not self._between_steps:
            next(self._running)
        self.stands_still = True

    def _run(self) -> Iterator[None]:
        while True:
            self._between_steps = False
            work = self._schedule()
            self.steps += 1
            yield
            for live, position in work:
                self._write(live, position)
                if self.rng.random() < 0.3:
                    yield
            for live in self.live.values():
                live.computed = max(live.computed, min(len(live.ids), len(live.blocks) * SIZE))
            if self.steps % self.publish_every == 0:
                self.publish()
            self._between_steps = True
            yield

    def _schedule(self) -> list[tuple[Live, int]]:
        """Decide about a whole step before it writes anything: who ends, who gives way, who gets what."""
        rng = self.rng
        gone = [seq for seq in self.live if rng.random() < 0.08]
        for seq in gone:
            self._give_back(self.live.pop(seq))
        waits = [live for live in self.live.values() if live.blocks and rng.random() < 0.12]
        for live in waits:
            self._give_back(live)
            live.computed, live.time = 0, (live.time + 1) % TIMES
        if len(self.live) < 4:
            self.names += 1
            prompt = [7] * SIZE * rng.randrange(3) + [rng.randrange(50) for _ in range(rng.randrange(1, 6))]
            self.live[f"s{self.names}"] = Live(prompt)
        work = []
        for live in self.live.values():
            if live in waits or (live.blocks and rng.random() < 0.2):
                continue
            if live.computed == len(live.ids):
                live.ids.append(rng.randrange(50))
            need = -(-len(live.ids) // SIZE) - len(live.blocks)
            if need <= len(self.free):
                live.blocks += [self.free.pop(rng.choice((0, -1))) for _ in range(need)]
                work += [(live, position) for position in range(live.computed, len(live.ids))]
        rng.shuffle(work)
        return work

    def _give_back(self, live: Live) -> None:
        self.free += live.blocks
        live.blocks = []

    def _write(self, live: Live, position: int) -> None:
        block, slot = live.blocks[position // SIZE], position % SIZE
        values = kv(live.ids[position], position, live.time)
        if self.slots:
            self._pages[:, block, slot] = values
        else:
            self._pages[:, block, :, slot] = values

    def publish(self) -> None:
        """What `TableExporter.publish` does."""
        tables = [
            SequenceBegin(seq, 1, b"", pack_u32(live.ids), pack_u32(live.blocks), live.computed)
            for seq, live in self.live.items()
        ]
        plan = self._tables.publish(tables, step=self.steps, running=len(tables))
        if self._tables.missed_steps or self.ring.get(Word.SNAPSHOT_WANTED):
            self.ring.set(Word.SNAPSHOT_WANTED, 0)
            self._table.announce_all()
        begin = self._table.begin(plan, self.steps, self.ring.free() // 4)
        commit = self._table.commit(plan, self.steps) or Commit(self.steps, ())
        for record in (begin, commit):
            if record is not None and not self.ring.append(msgspec.msgpack.encode(record)):
                self._table.announce_all()
                break

    def close(self) -> None:
        """Let go of everything."""
        self.session.close()
        self.ring.close()
        self._lifeline.let_go()


class RushedPages(HostPages):
    """Pages of an engine that runs on in the middle of a copy."""

    engine: HostileEngine

    def copy_block(self, block: int, out: np.ndarray[Any, Any]) -> None:
        super().copy_block(block, out)
        early = out[: len(out) // 2].copy()
        self._rush()
        super().copy_block(block, out)
        out[: len(early)] = early

    def copy_slots(self, block: int, first: int, last: int, out: np.ndarray[Any, Any]) -> int:
        nbytes = super().copy_slots(block, first, last, out)
        early = out[: nbytes // 2].copy()
        self._rush()
        super().copy_slots(block, first, last, out)
        out[: len(early)] = early
        return nbytes

    def _rush(self) -> None:
        for _ in range(self.engine.rng.choice((0, 0, 1, 3, 12))):
            self.engine.tick()


class Peer:
    """A peer of the engine's daemon, and what is on its way there."""

    def __init__(self, engine: HostileEngine, settings: ReplicationSettings, delta_bytes: int) -> None:
        self._engine = engine
        self._new_store()
        self.shipment = shipment_of(engine.session, settings, delta_bytes, lambda _: True)
        self.delivered = 0
        self.number = 0

    def _new_store(self) -> None:
        self.memory = np.zeros(200 * self._engine.geometry.block_bytes, np.uint8)
        self.store = ReplicaStore(self.memory, lease_ns=1)

    def lose_everything(self, seq: str) -> None:
        """Its store is empty, and says so of `seq`."""
        self._new_store()
        self.shipment.nacked(Nack(self.number, seq, 1, 0, NackReason.KEY_UNKNOWN, 0))

    def ship(self, drain: Callable[[], None]) -> list[str]:
        """The next move of what is on its way here. What the store should not have then."""
        ready = self.shipment.next_delta(self.number + 1, drain)
        if ready is None:
            return []
        self.number += 1
        seq, number = ready.delta.seq, ready.delta.number
        outcome: int | Refusal
        if self._engine.rng.random() < 0.1:  # lost on the way
            held = self.store.replicas.get(seq)
            outcome = Refusal(NackReason.GAP, held.watermark if held else 0)
        else:
            outcome = self._receive(ready)
        if isinstance(outcome, Refusal):
            self.shipment.nacked(Nack(number, seq, 1, outcome.watermark, outcome.reason, 0))
            return []
        self.delivered += 1
        self.shipment.acked(Ack(number, seq, 1, outcome, 0))
        return self._wrong_slots(seq)

    def _receive(self, ready: Ready) -> int | Refusal:
        payload = bytes(ready.payload)
        reservation = self.store.reserve(ready.delta, "a")
        if isinstance(reservation, Refusal):
            return reservation
        at, buffered = 0, {}
        for index, part in enumerate(ready.delta.parts):
            data = np.frombuffer(payload[at : at + part.nbytes], np.uint8)
            at += part.nbytes
            target = self.store.room_for(reservation, index)
            if target is not None:
                target[:] = data
            elif part.kind != PartKind.KEY:
                buffered[index] = data
        return self.store.commit(reservation, buffered)

    def _wrong_slots(self, seq: str) -> list[str]:
        """Each slot up to the watermark is, as a whole, one that this token had at this place; or is told."""
        geometry, replica = self._engine.geometry, self.store.replicas[seq]
        ids = array("I", bytes(replica.token_ids)).tolist()[: replica.watermark]
        wanted = Wanted(replica.fingerprint, b"", array("I", ids).tobytes(), SIZE, geometry.block_bytes)
        found = self.store.match(wanted, seq=seq, computed=0, limit=len(ids), now_ns=0)
        self.store.release(found.lease)
        wrong = []
        for position, token in enumerate(ids):
            offset, slot = found.extents[position // SIZE], position % SIZE
            block = self.memory[offset : offset + geometry.block_bytes].view(np.int16)
            if self._engine.slots:
                have = block.reshape(LAYERS, SIZE, DIM)[:, slot]
            else:
                have = block.reshape(LAYERS, DIM, SIZE)[:, :, slot]
            if not any(np.array_equal(have, kv(token, position, time)) for time in range(TIMES)):
                wrong.append(f"{seq}: token {position}, after {self._engine.steps} steps")
        return wrong


class Bench:
    """A hostile engine, its daemon and two peers; `wrong` is what a peer should not have."""

    def __init__(self, seed: int, *, slots: bool, publish_every: int = 1, hold_bytes: int = 1 << 20) -> None:
        rng = random.Random(seed)
        self.engine = engine = HostileEngine(rng, slots=slots, publish_every=publish_every)
        session = engine.session
        pages = RushedPages(engine.geometry, session._fds[3:])
        pages.engine = engine
        session.pages.close()
        session.pages = pages
        settings = ReplicationSettings(hold_bytes=hold_bytes, shadow_bytes=rng.choice((0, 1 << 12)))
        delta_bytes = rng.choice((1, 1 << 16))
        self.peers = [Peer(engine, settings, delta_bytes) for _ in range(2)]
        self.wrong: list[str] = []

    def drain(self) -> None:
        """What the daemon does when the doorbell rings."""
        for changes in self.engine.session.drain():
            for peer in self.peers:
                peer.shipment.note(changes)
                for seq, epoch in changes.ended:
                    peer.shipment.forget(seq)
                    peer.store.end(End(seq, epoch, 1))

    def ship(self, peer: Peer) -> bool:
        """The daemon's next move for `peer`; whether there was one."""
        self.drain()
        if not peer.shipment.waiting:
            return False
        self.wrong += peer.ship(self.drain)
        return True

    def run(self, moves: int) -> None:
        """Engine and daemon in turn, until the first wrong slot."""
        for _ in range(moves):
            if self.wrong:
                return
            if self.engine.rng.random() < 0.5:
                self.engine.tick()
            else:
                self.ship(self.engine.rng.choice(self.peers))

    def settle(self) -> None:
        """The engine stands still and says the same again until everything is sent."""
        self.engine.stand_still()
        for _ in range(8 * BLOCKS):
            self.engine.publish()
            for peer in self.peers:
                while self.ship(peer):
                    pass

    def close(self) -> None:
        """Let go of everything."""
        self.engine.close()

"""One daemon: the engine's side, the store, the links. Stands for EngineHost and Daemon.

`register`, `gone`, `left`, `_salvage`, `_unmap`, `drain`, `_apply`, `_end`, `_orphan`, `fence`, `epoch_of`
are those of segue_daemon/engine_host.py; `match`, `release`, `promote` and `replica_changed` those of app.py,
`_keep_store` is `StoreKeeper.tick`.
`EngineSession` (journal ring, ledger), `HostPages`, `ReplicaStore` and `OwnKeep` are the real ones. Copies
out of the engine's pages may be torn on purpose: the engine runs on between their halves.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np

from segue_core.geometry import Geometry
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import Register
from segue_core.shared_memory import seal_size, sealable_memory
from segue_daemon.arena import Bytes
from segue_daemon.engine import EngineSession
from segue_daemon.kept import OwnKeep
from segue_daemon.ledger import Changes, Sequence
from segue_daemon.pages import Pages, Piece, one_by_one, side_by_side
from segue_daemon.replicas import Wanted
from segue_daemon.store import ReplicaStore
from simulation.clockwork import MS, Killed, Process
from simulation.content import BLOCK_BYTES, SIZE, geometry
from simulation.engine import SimEngine
from simulation.link import SimLink
from simulation.live import Live
from simulation.receiver import SimReceiver

if TYPE_CHECKING:
    from simulation.world import World

LEASE_MS = 40
SALVAGE_MS = 40
KEEP_OWN_MS = 300
KEEP_SLICE_BLOCKS = 2
ORPHAN_MS = 450
SAMPLE_MS = 25
EXPIRE_MS = 30
FINGERPRINT = b"simulated engine"


class TornPages:
    """The engine's pages, copied in two halves between which the engine may run on."""

    def __init__(self, inner: Pages, daemon: SimDaemon, engine: SimEngine) -> None:
        self.geometry: Geometry = inner.geometry
        self.failure = ""
        self.gathers = daemon.number % 2 == 1
        self.batch_bytes = inner.batch_bytes
        self._inner = inner
        self._daemon = daemon
        self._engine = engine
        self._life = engine.life

    def buffer(self, nbytes: int) -> Bytes:
        return self._inner.buffer(nbytes)

    def copy_block(self, block: int, out: Bytes) -> None:
        self._inner.copy_block(block, out)
        if self._interrupted():
            later = np.empty_like(out)
            self._inner.copy_block(block, later)
            half = len(out) // 2
            out[half:] = later[half:]

    def copy_pieces(self, pieces: list[Piece]) -> Generator[int, None, None]:
        return one_by_one(self, pieces)

    def copy_blocks(self, blocks: list[int], out: Bytes) -> Generator[int, None, None]:
        return one_by_one(self, side_by_side(self.geometry, blocks, out))

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        self._interrupted()
        return self._inner.copy_slots(block, first, last, out)

    def _interrupted(self) -> bool:
        world = self._daemon.world
        if world.clockwork.chance(world.tearing):
            if self._engine.life == self._life:
                self._engine.rush(world.rng.randrange(1, 7))
            if world.clockwork.chance(world.crashing):
                self._daemon.crash()
                raise Killed
            return True
        return False

    def close(self) -> None:
        self._inner.close()


class SimDaemon(Process):
    """One daemon process beside engine `number`; each boot is another incarnation with an empty store."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(f"daemon{number}")
        self.world = world
        self.number = number
        self.peers: tuple[str, ...] = ()
        self.session: EngineSession | None = None
        self.links: list[SimLink] = []

    # -- life ---------------------------------------------------------------------------------

    def boot(self) -> None:
        """A new life."""
        world = self.world
        self.life += 1
        self.alive, self.stopped = True, False
        self.incarnation = world.new_identity()
        self.memory: Bytes = np.full(world.arena_blocks * BLOCK_BYTES, 0xA5, np.uint8)
        self.store = ReplicaStore(self.memory, lease_ns=LEASE_MS * MS, **world.store_options)
        self.store.written_here = self.epoch_of
        ttl_ns = KEEP_OWN_MS * MS if world.keeps_own else 0
        self._keep = OwnKeep(self.store, ttl_ns=ttl_ns, slice_bytes=KEEP_SLICE_BLOCKS * BLOCK_BYTES)
        self.receiver = SimReceiver(self)
        self.session = None
        self._orphans: dict[tuple[int, str, int], int] = {}
        world.say("{} boots as {}", self.name, self.incarnation)
        self.links = [SimLink(self, peer) for peer in self.peers]
        world.after(EXPIRE_MS * MS, self, self._keep_store)
        world.after(SAMPLE_MS * MS, self, self._sample)

    def crash(self) -> None:
        """SIGKILL: everything in memory is lost, every connection ends."""
        self.world.say("{} is killed", self.name)
        self.alive = False
        self.backlog.clear()
        for link in self.links:
            link.close()
        for writer in list(self.receiver.writers.values()):
            writer.connection.close_there()
        if self.session is not None:
            self.session.close()
        engine = self.world.engines[self.number]
        self.world.after(self.world.between(0.1, 2), engine, engine.hung_up, self.life)

    # -- the engine beside us -----------------------------------------------------------------

    @property
    def live(self) -> EngineSession | None:
        """The session, if its engine lives."""
        return self.session if self.session is not None and not self.session.dead else None

    def epoch_of(self, seq: str) -> int:
        """The epoch under which the living engine writes `seq`; 0: it does not."""
        session = self.live
        sequence = session.ledger.sequences.get(seq) if session is not None else None
        return sequence.epoch if sequence is not None else 0

    def register(self, engine: SimEngine, engine_life: int) -> None:
        """An engine brings journal and pages."""
        if engine.life != engine_life or engine.daemon_life != self.life or engine.ring is None:
            return
        current = self.session
        if current is not None and not current.dead:
            self.left(current)
        register = Register(
            version=PROTOCOL_VERSION,
            engine=engine.name,
            incarnation=engine.incarnation,
            model="simulated",
            fingerprint=FINGERPRINT,
            geometry=geometry(self.world.blocks, self.world.slotted),
            notice="after" if self.world.publishes else "before",
        )
        fds = [os.dup(fd) for fd in (engine.ring_fd, engine.doorbell, lifeline_fd(), engine.pages_fd)]
        session = EngineSession(register, fds, 0, self.world.clock, max_sequences=64)
        session.pages = TornPages(session.pages, self, engine)  # type: ignore[assignment]
        if current is not None:
            self._unmap(current)
        self.session = session
        for link in self.links:
            link.add_engine(session)
        self.world.say("{}: {} registers as {}", self.name, engine.name, engine.incarnation)
        self.drain_and_sleep()

    def gone(self, incarnation: int) -> None:
        """The engine's process is dead."""
        session = self.live
        if session is not None and session.incarnation == incarnation:
            self.left(session)

    def left(self, session: EngineSession) -> None:
        """The engine is dead: take what its journal still says, ship what is left, let its memory go."""
        for changes in session.last_words():
            self._apply(session, changes)
        session.dead = True
        for sequence in session.ledger.sequences.values():
            self._orphan(session, sequence.seq, sequence.epoch)
        for link in self.links:
            link.flush(session)
        self._salvage(session, self.world.now + SALVAGE_MS * MS)

    def _salvage(self, session: EngineSession, deadline: int, slices: Iterator[None] | None = None) -> None:
        flushed = all(link.flushed(session) for link in self.links)
        if slices is None and (flushed or self.world.now >= deadline - SALVAGE_MS * MS // 2):
            slices = self._keep.slices(session, self._protected(session), lambda: self.world.now)
        kept = slices is not None and next(slices, self) is self
        self.world.touched(self)
        if (flushed and kept) or self.world.now >= deadline:
            self.world.say("{}: memory of {} released", self.name, session.incarnation)
            self._unmap(session)
        else:
            self.world.after(2 * MS, self, self._salvage, session, deadline, slices)

    def _protected(self, session: EngineSession) -> Callable[[Sequence], bool]:
        return lambda sequence: any(
            link.connected and link.watermark(session, sequence.seq) >= sequence.shippable
            for link in self.links
        )

    def _unmap(self, session: EngineSession) -> None:
        for link in self.links:
            link.drop_engine(session)
        session.close()

    def _sample(self) -> None:
        self.world.after(SAMPLE_MS * MS, self, self._sample)
        self.drain_and_sleep()
        for key, deadline in list(self._orphans.items()):
            if deadline < self.world.now:
                self._end(*key)
        self._keep.expire(self.world.now)
        self.world.touched(self)

    def drain_and_sleep(self) -> None:
        """Apply the journal, then ask for the doorbell."""
        session = self.live
        if session is not None:
            self.drain()
            if not session.sleep():
                self.drain()

    def drain(self) -> None:
        """Apply the journal and pass on what changed."""
        session = self.live
        if session is not None:
            for changes in session.drain():
                self._apply(session, changes)

    def _apply(self, session: EngineSession, changes: Changes) -> None:
        for seq, epoch in changes.forgotten:
            self._orphan(session, seq, epoch)
        for seq in changes.grown:
            sequence = session.ledger.sequences.get(seq)
            if sequence is not None:
                self._orphans.pop((session.incarnation, seq, sequence.epoch), None)
        for seq, epoch in changes.ended:
            self._end(session.incarnation, seq, epoch)
            self._keep.over(session.incarnation, seq, epoch)
            self.world.touched(self)
        for link in self.links:
            link.note(session, changes)

    def _end(self, incarnation: int, seq: str, epoch: int) -> None:
        self._orphans.pop((incarnation, seq, epoch), None)
        for link in self.links:
            link.end(incarnation, seq, epoch)

    def _orphan(self, session: EngineSession, seq: str, epoch: int) -> None:
        self._orphans[session.incarnation, seq, epoch] = self.world.now + ORPHAN_MS * MS

    def fence(self, seq: str, epoch: int) -> None:
        """`seq` goes on elsewhere with `epoch`: stop shipping it, tell the engine."""
        session = self.live
        if session is not None and session.ledger.fence(seq, epoch):
            self.world.say("{}: {} fenced below epoch {}", self.name, seq, epoch)
            engine = self.world.engines[self.number]
            if engine.incarnation == session.incarnation:
                self.world.after(self.world.between(0.1, 1), engine, engine.fenced.append, (seq, epoch))

    def replica_changed(self, seq: str) -> None:
        """A delta or an end: if the engine here writes that sequence still, it is the last to know."""
        replica = self.store.replicas.get(seq)
        self.fence(seq, max(self.store.fence(seq), replica.epoch if replica is not None else 0))

    # -- questions ----------------------------------------------------------------------------

    def match(self, engine: SimEngine, live: Live) -> None:
        """What KV of these ids is held here? The answer's blocks are pinned."""
        session = self.live
        if session is None or session.incarnation != engine.incarnation:
            return
        ids = array("I", live.ids).tobytes()
        found = self.store.match(
            Wanted(session.ledger.fingerprint, live.salt, ids, SIZE, BLOCK_BYTES),
            seq=live.seq,
            computed=live.computed,
            limit=len(live.ids) - 1,
            now_ns=self.world.now,
        )
        self.world.checks.matched(self, live, found)
        self.world.after(self.world.between(0.1, 1), engine, engine.asked, live, found, self.memory)

    def release(self, arena: Bytes, lease: int, loaded: bool) -> None:
        """A lease is over."""
        if arena is self.memory:
            self.world.checks.released(self, lease)
            self.store.release(lease, loaded=loaded)
            self.world.touched(self)

    def promote(self, seq: str, epoch: int, want: int, deadline: int) -> None:
        """Wait a moment for the last delta, then refuse lower epochs; the router hears what is held."""
        world, router = self.world, self.world.router
        if self.store.fence(seq) >= epoch:
            world.after(world.between(0.1, 1), router, router.promoted, seq, epoch, None)
            return
        replica = self.store.replicas.get(seq)
        if (replica.watermark if replica else 0) < want and world.now < deadline:
            world.after(2 * MS, self, self.promote, seq, epoch, want, deadline)
            return
        watermark = self.store.promote(seq, epoch, world.now)
        world.say("{}: promote {} to epoch {}: {}", self.name, seq, epoch, watermark)
        if watermark is not None:
            world.checks.promoted(self, seq, epoch)
            for link in self.links:
                link.end(self.incarnation, seq, epoch)
        self.fence(seq, epoch)
        world.touched(self)
        world.after(world.between(0.1, 1), router, router.promoted, seq, epoch, watermark)

    def _keep_store(self) -> None:
        self.world.after(EXPIRE_MS * MS, self, self._keep_store)
        self.world.checks.expired(self)
        self.store.expire(self.world.now)
        self.store.evictor.trim(self.world.now)
        self.world.touched(self)


def lifeline_fd() -> int:
    """A page that stands for every engine's lifeline: nobody waits on it here."""
    global _lifeline
    if _lifeline < 0:
        _lifeline = sealable_memory("lifeline")
        os.ftruncate(_lifeline, 4096)
        seal_size(_lifeline)
    return _lifeline


_lifeline = -1

"""One run: a seed makes the cluster, its load, its faults; the checkers watch every event.

`run_seed` is the whole of it: chaos, then healing (everybody lives, the network works, nothing new comes:
all must converge), then the end (all hang up: nothing may be left). Everything follows from the seed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import structlog

from segue_core.messages.request import Replication
from segue_daemon.settings import ReplicationSettings
from simulation.checks import Checks
from simulation.clockwork import MS, Clockwork, Process, Violation, line_of
from simulation.content import BLOCK_BYTES, Writing, word_of
from simulation.daemon import SimDaemon
from simulation.engine import SimEngine
from simulation.link import PING_MS
from simulation.network import Faults
from simulation.router import Router

CHAOS_MS = 350
CALM_MS = 400
ORPHANED_MS = 900
"""Longer than the time after which replicas of lost writers go, and a watcher's period."""
DISASTER_MS = 6


class World:
    """A cluster: daemon and engine number n share a host."""

    def __init__(self, seed: int, *, loud: bool = False) -> None:
        self.clockwork = Clockwork(seed, loud=loud)
        self.rng = self.clockwork.rng
        self.clock = self.clockwork.clock
        self.say, self.after, self.chance = self.clockwork.say, self.clockwork.after, self.clockwork.chance
        self.between = self.clockwork.between
        rng = self.rng
        count = rng.choice((2, 2, 3, 4))
        self.blocks = rng.choice((10, 16, 24))
        self.slotted = rng.random() < 0.5
        self.runs_ahead = rng.random() < 0.4
        self.publishes = seed % 4 == 3
        """Engines only publish their tables between steps, as `TableExporter` does."""
        self.keeps_own = seed % 5 != 4
        """Daemons keep what their dead engine left."""
        self._words = seed % 6 == 5
        self.arena_blocks = rng.choice((8, 20, 64))
        self.tearing = rng.choice((0.0, 0.1, 0.4))
        self.crashing = rng.choice((0.0, 0.02, 0.1))
        self.draining = rng.choice((0.0, 0.01, 0.05))
        self.disasters = rng.choice((0.02, 0.1, 0.25))
        self.faults = Faults(
            break_bulk=rng.choice((0.0, 0.01, 0.05)),
            corrupt=rng.choice((0.0, 0.02, 0.1)),
            cut_control=rng.choice((0.0, 0.005, 0.02)),
            repeat_control=rng.choice((0.0, 0.05)),
            slow=rng.choice((0.0, 0.05, 0.2)),
            no_room_to_answer=0.1 if seed % 7 == 6 else 0.0,
        )
        self.replication = ReplicationSettings(
            sync_every_tokens=rng.choice((1, 1, 3)),
            sync_every_ms=rng.choice((0, 0, 8)),
            delta_bytes=rng.choice((1, 3, 8)) * BLOCK_BYTES,
            window_bytes=16 * BLOCK_BYTES,
            shadow_bytes=rng.choice((0, 2, 64)) * BLOCK_BYTES,
            hold_bytes=(0, 2, 64)[seed % 3] * BLOCK_BYTES,
        )
        high, low = rng.choice(((1.0, 1.0), (1.0, 1.0), (0.9, 0.7)))
        self.store_options: dict[str, Any] = {
            "high_watermark": high,
            "low_watermark": low,
            "session_ttl_ns": rng.choice((0, 0, 400)) * MS,
            "verify": rng.choice(("always", "load", "off")),
        }
        self.partitions: set[frozenset[str]] = set()
        self.truth: dict[tuple[str, int, int], Writing] = {}
        self.calm = False
        self._identities = 0
        self._touched: dict[SimDaemon, None] = {}
        self.checks = Checks(self)
        self.engines = [SimEngine(self, n) for n in range(count)]
        self.daemons = [SimDaemon(self, n) for n in range(count)]
        names = [daemon.name for daemon in self.daemons]
        for daemon in self.daemons:
            daemon.peers = tuple(name for name in names if name != daemon.name)
        self.router = Router(self)
        for process in (*self.daemons, *self.engines):
            process.boot()
        self.after(DISASTER_MS * MS, None, self._disaster)

    # -- what everybody may ask ---------------------------------------------------------------

    @property
    def now(self) -> int:
        """Nanoseconds."""
        return self.clock.now

    def new_identity(self) -> int:
        """Never the same twice."""
        self._identities += 1
        return self._identities

    def replication_of(self, seq: str) -> Replication:
        """What the client of `seq` says of replication: something in every sixth run."""
        return word_of(seq) if self._words else "normal"

    def daemon_named(self, name: str) -> SimDaemon:
        """By its name."""
        return self.daemons[int(name.removeprefix("daemon"))]

    def held(self, number: int, seq: str) -> int:
        """What the router's question after a sequence is answered with."""
        daemon = self.daemons[number]
        replica = daemon.store.replicas.get(seq) if daemon.alive and not daemon.stopped else None
        return replica.watermark if replica else 0

    def prompt(self) -> list[int]:
        """A prompt that may share its beginning, or a block further on, with others."""
        start = self.rng.choice(((1, 2, 3, 4), (5, 6, 7, 8), ()))
        middle = self.rng.choice(((9, 9, 9, 9), (9, 9, 9, 9, 8, 8, 8, 8), ()))
        return [*start, *middle, *(self.rng.randrange(10, 14) for _ in range(self.rng.choice((1, 2, 5))))]

    def sample(self, seq: str, epoch: int, incarnation: int, position: int) -> int:
        """The token an engine decides for: another writer may decide otherwise."""
        salt = incarnation if seq.startswith("local") else epoch
        return 100 + crc32(f"{seq} {salt} {position}".encode()) % 7

    def touched(self, daemon: SimDaemon) -> None:
        """Its store changed: check it after this event."""
        self._touched[daemon] = None

    # -- disasters ----------------------------------------------------------------------------

    def _disaster(self) -> None:
        """Now and then something dies, stops, or is cut off, for a while."""
        if self.calm:
            return
        self.after(DISASTER_MS * MS, None, self._disaster)
        if not self.chance(self.disasters):
            return
        process: Process = self.rng.choice((*self.daemons, *self.engines))
        kind = self.rng.choice(("kill", "stop", "cut"))
        if kind == "cut":
            pair = frozenset(daemon.name for daemon in self.rng.sample(self.daemons, 2))
            self.say("net: {} are cut off from each other", sorted(pair))
            self.partitions.add(pair)
            self.after(self.between(5, 250), None, self.partitions.discard, pair)
        elif process.alive and kind == "stop" and not process.stopped:
            self.say("{} stops", process.name)
            process.stopped = True
            self.after(self.between(3, 200), None, self._continue, process, process.life)
        elif process.alive and kind == "kill":
            process.crash()
            self.after(self.between(3, 60), None, self._boot, process)

    def _continue(self, process: Process, life: int) -> None:
        if process.life == life and process.alive and process.stopped:
            self.say("{} goes on", process.name)
            self.clockwork.wake(process)

    def _boot(self, process: Process) -> None:
        if not process.alive:
            process.boot()

    # -- the run ------------------------------------------------------------------------------

    def run(self) -> None:
        """Chaos, healing, end. Raises Violation."""
        start = self.now
        self._run_until(start + CHAOS_MS * MS)
        self.say("-- healing")
        self._heal()
        self._run_until(self.now + CALM_MS * MS)
        try:
            self.checks.converged()
        except Violation:  # room may have come free only now: the next sign of life tells the writer
            self._run_until(self.now + 4 * PING_MS * MS)
            self.checks.converged()
        self.say("-- the end")
        self.router.finish_all()
        self._run_until(self.now + ORPHANED_MS * MS)
        self.checks.empty()

    def _heal(self) -> None:
        self.calm = True
        self.partitions.clear()
        self.faults = Faults()
        self.tearing = self.draining = 0.0
        for process in (*self.daemons, *self.engines):
            self._boot(process)
            self._continue(process, process.life)
        for engine in self.engines:
            engine.idle = True

    def _run_until(self, until: int) -> None:
        self.clockwork.run_until(until, self._check)

    def _check(self) -> None:
        while self._touched:
            daemon, _ = self._touched.popitem()
            if daemon.alive:
                self.checks.store(daemon)

    def close(self) -> None:
        """Let go of memory files."""
        for daemon in self.daemons:
            if daemon.alive and daemon.session is not None:
                daemon.session.close()
        for engine in self.engines:
            engine.close()


@contextmanager
def quiet() -> Iterator[None]:
    """What the code under test logs about faults made on purpose is not shown."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def run_seed(seed: int, *, loud: bool = False) -> World:
    """Run one seed. Raises Violation with the trace's end and the line that runs it again."""
    with quiet():
        world = World(seed, loud=loud)
        try:
            world.run()
        except Exception as error:
            trace = "\n".join(line_of(entry) for entry in world.clockwork.trace)
            raise Violation(f"{trace}\n{error!r}\nagain: make sim SEED={seed}") from error
        finally:
            world.close()
    return world

"""A tiny engine: it writes tokens, seals blocks, reuses freed ones for others, preempts, shares prefixes.

What it tells its daemon goes through the shim's own table (`segue_shim.table.LiveTable`), the real record
encoding and a real journal ring in a memfd; its pages are real shared memory. `begin` and `commit` stand
for `Exporter.begin`, `_append`, `commit`, `_adopt` and `load` (segue_shim/exporter.py), `_publish` for
`TableExporter.publish`, `asked` for `MatchClient.match`. A step is three events (begin, half the writes, the
rest and commit), so that a crash, a stop or a copy by the daemon can fall between any two of them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.ring import Ring, Word
from segue_core.shared_memory import seal_size, sealable_memory
from segue_daemon.arena import Bytes
from segue_daemon.replicas import MatchResult
from segue_daemon.wire import encode
from segue_shim.plan import StepPlan, pack_u32
from segue_shim.published import PublishedTables
from segue_shim.table import LiveTable
from simulation.blocks import EngineBlocks
from simulation.clockwork import MS, Process
from simulation.content import BLOCK_BYTES, SIZE, Writing, by_slot, geometry, packed_by_slot, slot_values
from simulation.live import Live, Work, begin_of

if TYPE_CHECKING:
    from simulation.daemon import SimDaemon
    from simulation.world import World

RING_BYTES = 4096
ANNOUNCE_SHARE = 4
MATCH_TIMEOUT_MS = 20
REGISTER_AGAIN_MS = 15
CHUNK = 12
"""Most tokens of one prefill step."""


class SimEngine(Process):
    """One engine process per daemon; each boot is another incarnation with other memory."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(f"engine{number}")
        self.world = world
        self.number = number
        self.fds: list[int] = []
        self.ring: Ring | None = None
        self.live: dict[str, Live] = {}
        self.daemon_life = 0

    # -- life ---------------------------------------------------------------------------------

    def boot(self) -> None:
        """A new life: empty memory, no sequences, not registered yet."""
        world = self.world
        self.life += 1
        self.alive, self.stopped = True, False
        self.incarnation = world.new_identity()
        shape = geometry(world.blocks, world.slotted)
        memory = os.memfd_create("pages")
        os.ftruncate(memory, shape.handle_bytes[0])
        self.pages_fd = memory
        self._map = mmap.mmap(memory, shape.handle_bytes[0])
        self.pages = by_slot(np.frombuffer(self._map, np.uint8), world.blocks, world.slotted)
        self.table = LiveTable()
        self.tables = PublishedTables(num_blocks=world.blocks, block_size=SIZE)
        self.live = {}
        self.blocks = EngineBlocks(world.blocks)
        self.step = 0
        self.ended: list[str] = []
        self.paused: list[str] = []
        self.fenced: list[tuple[str, int]] = []
        self.idle = False
        self.local_requests = 0
        self.aborted: dict[str, int] = {}
        self._work: list[Work] = []
        self._noise: list[int] = []
        self._ticket = 0
        self._phase = self.begin
        world.say("{} boots as {}", self.name, self.incarnation)
        world.after(0, self, self.register)
        self._next(1.0)

    def crash(self) -> None:
        """SIGKILL: the memory lives on while the daemon maps it."""
        self.world.say("{} is killed", self.name)
        self.alive = False
        self.backlog.clear()
        self.live = {}
        self._drop_channel()
        os.close(self.pages_fd)
        daemon = self.world.daemons[self.number]
        self.world.after(self.world.between(0.2, 3), daemon, daemon.gone, self.incarnation)

    def close(self) -> None:
        """The run is over: let go of what the process would have had open."""
        if self.alive:
            self._drop_channel()
            os.close(self.pages_fd)

    def register(self) -> None:
        """Bring the daemon beside us journal and pages, again and again until it takes them."""
        daemon = self.world.daemons[self.number]
        if self.ring is not None:
            return
        if daemon.alive:
            fd = sealable_memory("journal")
            self.ring, self.ring_fd = Ring(fd, create=RING_BYTES), fd
            seal_size(fd)
            self.doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.daemon_life = daemon.life
            self.table.announce_all()
            self.world.after(self.world.between(0.1, 1), daemon, daemon.register, self, self.life)
        else:
            self.world.after(REGISTER_AGAIN_MS * MS, self, self.register)

    def hung_up(self, daemon_life: int) -> None:
        """The daemon's end of the connection closed."""
        if daemon_life == self.daemon_life and self.ring is not None:
            self._drop_channel()
            self.register()

    def _drop_channel(self) -> None:
        if self.ring is not None:
            self.ring.close()
            self.ring = None
            os.close(self.ring_fd)
            os.close(self.doorbell)

    # -- requests -----------------------------------------------------------------------------

    def start(self, seq: str, epoch: int, salt: bytes, ids: list[int]) -> None:
        """A request arrives; what the daemon holds of it is asked for first."""
        world = self.world
        if epoch <= self.aborted.get(seq, 0):
            return  # its client has hung up already
        before = self.live.get(seq)
        if before is not None:
            self._let_go(before)
        writing = world.truth.setdefault((seq, epoch, self.incarnation), Writing(salt))
        writing.extend(ids[len(writing.kv) :])
        live = self.live[seq] = Live(seq, epoch, salt, list(ids), writing, world.replication_of(seq))
        live.blocks = self.blocks.shared(live.writing.kv[: len(ids)])
        live.computed = len(live.blocks) * SIZE
        daemon = world.daemons[self.number]
        world.after(world.between(0.1, 1), daemon, daemon.match, self, live)
        world.after(MATCH_TIMEOUT_MS * MS, self, self.asked, live, MatchResult(), None)

    def asked(self, live: Live, found: MatchResult, arena: Bytes | None) -> None:
        """The daemon answered, or did not in time; a late answer's lease is let go."""
        if live.ready or self.live.get(live.seq) is not live:
            self._release(found, loaded=False, arena=arena)
            return
        live.ready = True
        if found.lease:
            live.load, live.arena = found, arena

    def abort(self, seq: str, epoch: int) -> None:
        """The client or the router hung up."""
        live = self.live.get(seq)
        self.aborted[seq] = max(epoch, self.aborted.get(seq, 0))
        if live is not None and live.epoch <= epoch:
            del self.live[seq]
            self._let_go(live)
            self.ended.append(seq)

    def _release(self, found: MatchResult, *, loaded: bool, arena: Bytes | None) -> None:
        daemon = self.world.daemons[self.number]
        if found.lease:
            delay = self.world.between(0.1, 1)
            self.world.after(delay, daemon, daemon.release, arena, found.lease, loaded)

    def _let_go(self, live: Live) -> None:
        for block in live.blocks:
            self.blocks.give_back(block)
        live.blocks, live.computed, live.begun = [], 0, False
        if not self._works_on(live):  # else the copy under way needs its lease
            self._release_load(live, loaded=False)

    def _release_load(self, live: Live, *, loaded: bool) -> None:
        if live.load is not None:
            self._release(live.load, loaded=loaded, arena=live.arena)
            live.load = None

    # -- a step -------------------------------------------------------------------------------

    def rush(self, events: int) -> None:
        """Run on while the daemon is in the middle of a copy."""
        for _ in range(events):
            if self.alive and not self.stopped:
                self._tick(self._ticket)

    def _next(self, delay_ms: float) -> None:
        self._ticket += 1
        self.world.after(self.world.between(0.2, delay_ms), self, self._tick, self._ticket)

    def _tick(self, ticket: int) -> None:
        if ticket == self._ticket:
            self._phase()

    def begin(self) -> None:
        """Say what is about to be overwritten; nothing is written yet."""
        self.step += 1
        self._phase = self.write
        self._next(1.5)
        if self.world.publishes:
            self._plan_step()
            return
        room = self._listen()
        self._plan_step()
        self._append(self.table.begin(self._plan, self.step, room))

    def _listen(self) -> int:
        """What the daemon wants; the room for announcements."""
        while self.fenced:
            self.table.fence(*self.fenced.pop())
        if self.ring is None:
            return 0
        if self.ring.get(Word.SNAPSHOT_WANTED):
            self.ring.set(Word.SNAPSHOT_WANTED, 0)
            self.table.announce_all()
        return self.ring.free() // ANNOUNCE_SHARE

    def _plan_step(self) -> None:
        assigned: list[int] = []
        begun: list[SequenceBegin] = []
        updated: list[SequenceUpdate] = []
        for live, upto in self._chosen():
            load = live.load if live.load is not None and live.load.tokens > live.computed else None
            new = [
                self.blocks.take(oldest=self.world.chance(0.5))
                for _ in range(-(-upto // SIZE) - len(live.blocks))
            ]
            live.blocks += new
            assigned += new
            known = len(live.ids) - (1 if self.world.runs_ahead and live.begun else 0)
            if live.begun:
                ids = pack_u32(live.ids[live.told : known])
                updated.append(SequenceUpdate(live.seq, ids, pack_u32(new)))
            else:
                packed = pack_u32(live.ids[:known]), pack_u32(live.blocks)
                begun.append(begin_of(live, *packed, live.computed))
                live.begun = True
                live.writing.computed = max(live.writing.computed, live.computed)
            live.told = max(live.told, known)
            live.writing.told = max(live.writing.told, known)
            self._work.append(Work(live, list(live.blocks), live.computed, upto, load))
        if self.blocks.free and self.world.chance(0.15) and not self.idle:
            self._noise = [self.blocks.take(oldest=self.world.chance(0.5))]
            assigned += self._noise
        self._plan = StepPlan(
            assigned=pack_u32(assigned),
            begun=tuple(begun),
            updated=tuple(updated),
            paused=tuple(seq for seq in self.paused if seq not in {start.seq for start in begun}),
            ended=tuple(self.ended),
            computed=tuple((work.live.seq, work.upto) for work in self._work),
            running=len(self.live),
        )
        self.ended, self.paused = [], []

    def _chosen(self) -> Iterator[tuple[Live, int]]:
        """What this step works on; who finds no block preempts somebody, or waits."""
        for live in list(self.live.values()):
            if not live.ready or (self.idle and live.computed >= len(live.ids)):
                continue
            if self.world.chance(0.25) or (self.world.publishes and live.seq in self.paused):
                continue
            upto = min(len(live.ids), live.computed + CHUNK)
            if live.load is not None and live.load.tokens > live.computed:
                upto = live.load.tokens
            need = -(-upto // SIZE) - len(live.blocks)
            if need > len(self.blocks.free):
                self._preempt(but=live)
            if need <= len(self.blocks.free):
                yield live, upto

    def _preempt(self, but: Live) -> None:
        victims = [v for v in self.live.values() if v is not but and v.begun and not self._works_on(v)]
        if victims and not self.idle and self.world.chance(0.3):
            victim = self.world.rng.choice(victims)
            self._let_go(victim)
            victim.told = 0
            self.paused.append(victim.seq)

    def _works_on(self, live: Live) -> bool:
        return any(work.live is live for work in self._work)

    def write(self) -> None:
        """The first half of what the step writes is in memory."""
        self._phase = self.commit
        self._next(1.5)
        for block in self._noise:
            self.pages[:, block] = self.world.rng.randrange(1 << 14)
        for work in self._work:
            self._fill(work, first_half=True)

    def commit(self) -> None:
        """The second half, and the word that the step is complete."""
        self._phase = self.begin
        self._next(2.0 if self._work else 60.0 if self.idle and not self.live else 10.0)
        failed: set[int] = set()
        for work in self._work:
            self._fill(work, first_half=False)
            failed.update(self._not_loaded(work))
        for work in self._work:
            if failed.isdisjoint(work.blocks):
                self._computed(work)
        if not self.world.publishes:
            self._append(self.table.commit(self._plan, self.step, failed))
        done, self._work = self._work, []
        for work in done:
            live = work.live
            self._release_load(live, loaded=work.load is not None and failed.isdisjoint(work.blocks))
            if live.begun and not failed.isdisjoint(work.blocks):
                self._let_go(live)  # everything of it is computed anew, and announced anew
                live.told = 0
        while self._noise:
            self.blocks.give_back(self._noise.pop())
        if self.world.publishes:
            self._publish()

    def _publish(self) -> None:
        """All sequences as they are between two steps; who has no blocks waits for some."""
        tables = []
        for live in self.live.values():
            blocks, computed = (live.blocks, live.computed) if live.begun else ([], 0)
            if live.writing.told:
                packed = pack_u32(live.ids[: live.writing.told]), pack_u32(blocks)
                tables.append(begin_of(live, *packed, computed))
        plan = self.tables.publish(tables, step=self.step, running=len(self.live))
        begin = self.table.begin(plan, self.step, self._listen())
        commit = self.table.commit(plan, self.step) or Commit(self.step, ())
        if self._append(begin):
            self._append(commit)

    def _fill(self, work: Work, *, first_half: bool) -> None:
        live, found = work.live, work.load
        if found is not None:
            assert live.arena is not None
            half = (len(found.extents) + 1) // 2
            for index in range(half) if first_half else range(half, len(found.extents)):
                offset = found.extents[index]
                packed = packed_by_slot(live.arena[offset : offset + BLOCK_BYTES], self.world.slotted)
                self.pages[:, work.blocks[found.first_block + index]] = packed[:, 0]
            return
        middle = (work.base + work.upto + 1) // 2
        low, high = (work.base, middle) if first_half else (middle, work.upto)
        for position in range(low, high):
            values = slot_values(live.writing.kv[position])
            self.pages[:, work.blocks[position // SIZE], position % SIZE] = values

    def _not_loaded(self, work: Work) -> list[int]:
        """Blocks that are void: the lease had run out when the copy was complete."""
        found = work.load
        if found is None or self.world.now < found.deadline_ns:
            return []
        return work.blocks[found.first_block : -(-found.tokens // SIZE)]

    def _computed(self, work: Work) -> None:
        live = work.live
        live.writing.computed = max(live.writing.computed, work.upto)
        self.world.checks.pages(self, live.seq, live.writing, work.blocks, work.upto)
        if self.live.get(live.seq) is not live or not live.blocks:
            return  # hung up in the middle of the step
        live.computed = work.upto
        self.blocks.remember(live.blocks, live.writing.kv, live.computed)
        if live.computed == len(live.ids) and not self.idle:
            token = self.world.sample(live.seq, live.epoch, self.incarnation, len(live.ids))
            live.ids.append(token)
            live.writing.extend([token])
            router, delay = self.world.router, self.world.between(0.1, 2)
            self.world.after(delay, router, router.tokens, live.seq, live.epoch, live.ids[:])

    def _append(self, record: Begin | Commit | None) -> bool:
        """Whether it is not missing in the journal."""
        if record is None or self.ring is None:
            return True
        written = self.ring.append(encode(record))
        if not written:
            self.world.say("{}: journal full", self.name)
            self.table.announce_all()
        if self.ring.doorbell_wanted():
            daemon: SimDaemon = self.world.daemons[self.number]
            self.world.after(self.world.between(0.02, 0.5), daemon, daemon.drain_and_sleep)
        return written

"""The daemon: puts its parts together and passes events between them.

Engine journal -> ledger -> links to peers; peers' deltas -> store; engine's questions -> store. Holds no
policy of its own. One event loop, one thread: nothing here needs a lock. Every long piece of work is
bounded by `replication.delta_bytes`, so that a question from the engine never waits long.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
import zmq.asyncio

from segue_core import __version__
from segue_core.clock import Clock, MonotonicClock
from segue_core.errors import ProtocolError
from segue_core.messages.local import Fenced, Match, Matched, Refused, Register, Release
from segue_core.messages.status import (
    DaemonStatus,
    EngineState,
    EngineStatus,
    SequenceStatus,
    StoreStatus,
)
from segue_core.ring import Word
from segue_daemon.arena import Arena
from segue_daemon.engine import EngineSession
from segue_daemon.ledger import Changes
from segue_daemon.link import Link
from segue_daemon.local import Connection, LocalServer
from segue_daemon.progress import ProgressJudge, Sample, cpu_ticks
from segue_daemon.receiver import Receiver
from segue_daemon.settings import DaemonSettings
from segue_daemon.store import ReplicaStore, Wanted

log = structlog.get_logger()

SAMPLE_S = 0.05
"""How often progress is judged; also the longest that a missed doorbell can go unnoticed."""
ORPHAN_S = 60.0
"""A dead engine's sequences stay restorable at the peers this long."""


class Daemon:
    """One daemon beside one engine. Implements `LocalHandler` for the unix socket."""

    def __init__(self, settings: DaemonSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.incarnation = secrets.randbits(63) | 1
        self.ready = False
        self._clock = clock or MonotonicClock()
        self._arena = Arena(settings.store.budget_bytes)
        self.store = ReplicaStore(self._arena.bytes, lease_ns=settings.store.lease_ms * 1_000_000)
        self._context = zmq.asyncio.Context()
        self.receiver = Receiver(
            settings,
            self.incarnation,
            self.store,
            self._arena.capacity,
            self._context,
            self._clock,
            self._replica_changed,
        )
        self.links = [
            Link(peer, settings, self.incarnation, self._context, self._clock, self._drain)
            for peer in settings.peers
        ]
        self._local = LocalServer(Path(settings.socket), self)
        self.session: EngineSession | None = None
        self._worker: Connection | None = None
        self._judge = self._new_judge()
        self._verdict: tuple[EngineState, int] = ("absent", 0)
        self._orphans: dict[tuple[int, str, int], float] = {}
        self._watermark_waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._status_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen and connect. Raises StartupError when something cannot be used."""
        await self._local.start()
        await self.receiver.start()
        for link in self.links:
            self._spawn(link.run())
        self._spawn(self._sample())
        self.ready = True

    async def stop(self) -> None:
        """Let go of everything, in an order that keeps what peers were told true."""
        self.ready = False
        await self._local.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.receiver.stop()
        if self.session is not None:
            self._unmap(self.session)
        self._context.destroy(linger=0)
        self._arena.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the daemon ended", exc_info=task.exception())

    # -- the engine ---------------------------------------------------------------------------

    def arena(self) -> tuple[int, int, int]:
        return self.incarnation, self._arena.fd, self._arena.capacity

    def register(self, message: Register, fds: list[int], connection: Connection) -> Refused | None:
        current = self.session
        if current is not None and not current.dead:
            if _alive(current.register.pid):
                return Refused(
                    f"engine process {current.register.pid} is registered with this daemon already;"
                    " start one segue-daemon per engine",
                    retry=True,
                )
            self._engine_died(current)
        if current is not None:
            self._unmap(current)
        if len(message.fingerprint) != 16:
            raise ProtocolError("register: a fingerprint has 16 bytes")
        session = EngineSession(
            message, fds, self._clock, max_sequences=self.settings.replication.max_sequences
        )
        self.session = session
        self._worker = connection
        self._judge = self._new_judge()
        asyncio.get_running_loop().add_reader(session.doorbell, self._doorbell, session)
        for link in self.links:
            link.add_engine(session)
        log.info(
            "engine registered",
            engine=message.engine,
            pid=message.pid,
            model=message.model,
            blocks=message.geometry.num_blocks,
            block_bytes=message.geometry.block_bytes,
            tails="slot runs" if message.geometry.slot_axis_known else "changed words",
        )
        self._drain_and_sleep()
        self._tell_watchers()
        return None

    def gone(self, connection: Connection) -> None:
        session = self.session
        if session is not None and self._worker is connection and not session.dead:
            self._engine_died(session)

    def _engine_died(self, session: EngineSession) -> None:
        log.warning("engine died", engine=session.register.engine, pid=session.register.pid)
        self._drain()
        session.dead = True
        asyncio.get_running_loop().remove_reader(session.doorbell)
        self._worker = None
        self._verdict = ("dead", 0)
        for sequence in session.ledger.sequences.values():
            self._orphan(session, sequence.seq, sequence.epoch)
        self._tell_watchers()
        self._spawn(self._salvage(session))

    async def _salvage(self, session: EngineSession) -> None:
        """Ship what peers do not have yet from the mapping that outlived the engine, then unmap."""
        started_ns = self._clock.now_ns()
        try:
            async with asyncio.timeout(self.settings.timeouts.salvage_ms / 1000):
                for link in self.links:
                    await link.flushed(session)
        except TimeoutError:
            log.warning("salvage ran out of time", engine=session.register.engine)
        self._unmap(session)
        log.info(
            "engine memory released",
            engine=session.register.engine,
            after_ms=(self._clock.now_ns() - started_ns) // 1_000_000,
        )

    def _unmap(self, session: EngineSession) -> None:
        for link in self.links:
            link.drop_engine(session)
        if not session.dead:
            asyncio.get_running_loop().remove_reader(session.doorbell)
        session.close()

    def _doorbell(self, session: EngineSession) -> None:
        session.hear()
        self._drain_and_sleep()

    def _drain_and_sleep(self) -> None:
        session = self.session
        if session is None or session.dead:
            return
        self._drain()
        if not session.sleep():
            self._drain()

    def _drain(self) -> None:
        """Apply the journal and pass on what changed."""
        session = self.session
        if session is None or session.dead:
            return
        for changes in session.drain():
            self._apply(session, changes)

    def _apply(self, session: EngineSession, changes: Changes) -> None:
        for seq, epoch in changes.forgotten:
            self._orphan(session, seq, epoch)
        for seq in changes.grown:
            sequence = session.ledger.sequences.get(seq)
            if sequence is not None and self._orphans:
                self._orphans.pop((session.incarnation, seq, sequence.epoch), None)
        for seq, epoch in changes.ended:
            self._end(session.incarnation, seq, epoch)
        for link in self.links:
            link.note(session, changes)

    def _end(self, incarnation: int, seq: str, epoch: int) -> None:
        self._orphans.pop((incarnation, seq, epoch), None)
        for link in self.links:
            link.end(incarnation, seq, epoch)

    def _orphan(self, session: EngineSession, seq: str, epoch: int) -> None:
        """Nobody speaks for this sequence now: if that stays so, it is over."""
        deadline = asyncio.get_running_loop().time() + ORPHAN_S
        self._orphans[session.incarnation, seq, epoch] = deadline

    async def _sample(self) -> None:
        """Judge the engine's progress; also the safety net for a missed doorbell, and the clock of leases."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._drain_and_sleep()
            self.store.expire(self._clock.now_ns())
            for key, deadline in list(self._orphans.items()):
                if deadline < loop.time():
                    self._end(*key)
            session = self.session
            if session is None or session.dead:
                continue
            ring = session.ring
            verdict = self._judge.judge(
                Sample(
                    now_ns=self._clock.now_ns(),
                    step_begun=ring.get(Word.STEP_BEGUN),
                    step_committed=ring.get(Word.STEP_COMMITTED),
                    running=ring.get(Word.RUNNING),
                    cpu_ticks=cpu_ticks(session.register.pid),
                )
            )
            changed = verdict[0] != self._verdict[0]
            self._verdict = verdict
            if changed:
                self._tell_watchers()

    def _new_judge(self) -> ProgressJudge:
        timeouts = self.settings.timeouts
        self._verdict = ("running", 0)
        return ProgressJudge(stall_ms=timeouts.stall_ms, step_ms=timeouts.step_ms)

    # -- the engine's questions ---------------------------------------------------------------

    def match(self, message: Match, connection: Connection) -> None:
        session = self.session
        if session is None or session.dead or session.register.fingerprint != message.fingerprint:
            connection.send(Matched(message.request, 0, 0, b"", 0, 0))
            return
        geometry = session.pages.geometry
        found = self.store.match(
            Wanted(
                fingerprint=session.ledger.fingerprint,
                salt=message.salt,
                token_ids=message.token_ids,
                block_size=geometry.block_size,
                block_bytes=geometry.block_bytes,
            ),
            seq=message.seq,
            computed=message.computed,
            limit=message.limit,
            now_ns=self._clock.now_ns(),
        )
        if found.lease:
            connection.leases.add(found.lease)
        connection.send(
            Matched(
                request=message.request,
                tokens=found.tokens,
                first_block=found.first_block,
                extents=array("Q", found.offsets).tobytes(),
                lease=found.lease,
                deadline_ns=found.deadline_ns,
            )
        )
        log.info(
            "match",
            seq=message.seq,
            epoch=message.epoch,
            tokens=found.tokens,
            asked=len(message.token_ids) // 4,
        )

    def release(self, message: Release, connection: Connection) -> None:
        if message.lease in connection.leases:
            connection.leases.discard(message.lease)
            self.store.release(message.lease, loaded=message.loaded > 0)

    # -- the router's questions ---------------------------------------------------------------

    async def promote(self, seq: str, epoch: int, want_tokens: int, wait_ms: int) -> int | None:
        """Wait until `want_tokens` are here (at most `wait_ms`), then fence lower epochs. Returns the
        watermark; None if an epoch as high stands already."""
        if self.store.fence(seq) >= epoch:
            return None
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while self.held(seq) < want_tokens:
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._watermark_waiters.setdefault(seq, []).append(waiter)
                    await waiter
        except TimeoutError:
            pass
        finally:
            if seq in self._watermark_waiters and wait_ms:
                self._watermark_waiters[seq] = [w for w in self._watermark_waiters[seq] if not w.done()]
                if not self._watermark_waiters[seq]:
                    del self._watermark_waiters[seq]
        watermark = self.store.promote(seq, epoch)
        self.fence(seq, epoch)
        return watermark

    def fence(self, seq: str, epoch: int) -> bool:
        """The sequence goes on elsewhere with `epoch`: the engine here is not its writer any more."""
        session = self.session
        if session is None or not session.ledger.fence(seq, epoch):
            return False
        if self._worker is not None:
            self._worker.send(Fenced(seq, epoch))
        log.info("sequence fenced", seq=seq, epoch=epoch)
        return True

    def held(self, seq: str) -> int:
        """Tokens of `seq` held here for a peer."""
        replica = self.store.replicas.get(seq)
        return replica.watermark if replica else 0

    def _replica_changed(self, seq: str) -> None:
        for waiter in self._watermark_waiters.get(seq, ()):
            if not waiter.done():
                waiter.set_result(None)

    def sequence_status(self, seq: str) -> SequenceStatus | None:
        """What is known of one sequence here; the engine's own goes before a replica of lower epoch."""
        session = self.session
        replica = self.store.replicas.get(seq)
        sequence = session.ledger.sequences.get(seq) if session is not None else None
        if session is not None and sequence is not None and (
            replica is None or sequence.epoch >= replica.epoch
        ):  # fmt: skip
            peers = {link.name: link.watermark(session, seq) for link in self.links}
            blocks = len(sequence.blocks)
            return SequenceStatus(
                seq=seq,
                role="owner",
                epoch=sequence.epoch,
                computed=sequence.computed,
                known=sequence.known,
                watermark=max(peers.values(), default=0),
                bytes=blocks * session.ledger.geometry.block_bytes,
                peers=peers,
            )
        if replica is None:
            return None
        return SequenceStatus(
            seq=seq,
            role="replica",
            epoch=max(replica.epoch, self.store.fence(seq)),
            computed=replica.watermark,
            known=replica.watermark,
            watermark=replica.watermark,
            bytes=len(replica.blocks) * replica.block_bytes,
        )

    # -- status -------------------------------------------------------------------------------

    def engine_status(self) -> EngineStatus:
        """The engine as seen from here."""
        session = self.session
        if session is None:
            return EngineStatus(engine="", state="absent", detail="no engine has registered yet")
        register = session.register
        state, age_ms = self._verdict
        live = not session.dead
        return EngineStatus(
            engine=register.engine,
            state=state,
            incarnation=session.incarnation,
            model=register.model,
            fingerprint=session.ledger.fingerprint.hex(),
            pid=register.pid,
            running=session.ring.get(Word.RUNNING) if live else 0,
            step=session.ledger.step,
            progress_age_ms=age_ms,
            sequences=len(session.ledger.sequences) if live else 0,
            journal_dropped=session.ring.get(Word.DROPPED) if live else 0,
            journal_broken=session.broken_records,
        )

    def status(self) -> DaemonStatus:
        """`GET /status`."""
        return DaemonStatus(
            name=self.settings.name,
            version=__version__,
            incarnation=self.incarnation,
            ready=self.ready,
            engine=self.engine_status(),
            peers=tuple(link.status() for link in self.links),
            store=StoreStatus(
                budget_bytes=self._arena.capacity,
                used_bytes=self.store.used_bytes,
                cached_bytes=self.store.cached_bytes,
                replicas=len(self.store.replicas),
                leases=self.store.leases,
                refused=self.store.refused,
                corrupt=self.receiver.corrupt,
                loaded_bytes=self.store.loaded_bytes,
            ),
        )

    def _tell_watchers(self) -> None:
        self._status_changed.set()
        self._status_changed = asyncio.Event()

    async def engine_changed(self, timeout_s: float) -> None:
        """Return at the next change of the engine's state, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._status_changed.wait()
        except TimeoutError:
            return


def _alive(pid: int) -> bool:
    return cpu_ticks(pid) >= 0

"""The engine beside this daemon, from registration to the release of its memory.

Owns the one engine session there is: takes it in, reads its journal when the doorbell rings, judges its
progress, hears of its death, ships what is left or has it kept here, and lets its memory go within
`salvage_ms`. Tells the links what changed and decides nothing about what they send. Invariants: one live
engine at a time; a sequence for which nobody speaks any more ends at the peers after `ORPHAN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from segue_core.clock import Clock
from segue_core.errors import ProtocolError
from segue_core.lifeline import exiting
from segue_core.messages.local import Fenced, Refused, Register
from segue_core.messages.status import EngineState, EngineStatus
from segue_core.ring import Word
from segue_daemon.engine import EngineSession
from segue_daemon.kept import OwnKeep
from segue_daemon.ledger import Changes
from segue_daemon.ledger import Sequence as LedgerSequence
from segue_daemon.link import Link
from segue_daemon.local import Connection
from segue_daemon.open_pages import let_go
from segue_daemon.pages import Pages
from segue_daemon.progress import ProgressJudge, Sample, cpu_ticks
from segue_daemon.settings import DaemonSettings
from segue_daemon.wire import Slices

log = structlog.get_logger()

SAMPLE_S = 0.05
"""How often progress is judged; also the longest that a missed doorbell can go unnoticed."""
LIFELINE_CONFIRM_MS = 1_000
"""A broken lifeline counts if its process is seen to exit within this time."""
COMPLETION_POLL_S = 0.001
"""How often a GPU that has not completed a committed step yet is looked at: a read of shared memory."""
ORPHAN_S = 60.0
"""A dead engine's sequences stay restorable at the peers this long."""
FINGERPRINT_BYTES = 16
MAX_RUNNING = 1 << 20
"""More sequences than any engine runs: what a broken one claims is passed on no further."""


class EngineHost:
    """See the module. `links` is filled by the daemon before anything registers."""

    def __init__(
        self,
        settings: DaemonSettings,
        clock: Clock,
        links: Sequence[Link],
        keep: OwnKeep,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
    ) -> None:
        """`spawn` runs a task that the daemon looks after; `changed` is called at changes of state."""
        self.session: EngineSession | None = None
        self._settings = settings
        self._clock = clock
        self._links = links
        self._keep = keep
        self._spawn = spawn
        self._changed = changed
        self._worker: Connection | None = None
        self._judge = self._new_judge()
        self._verdict: tuple[EngineState, int] = ("absent", 0)
        self._orphans: dict[tuple[int, str, int], float] = {}
        self._looking = False

    @property
    def live(self) -> EngineSession | None:
        """The session, if its engine lives."""
        return self.session if self.session is not None and not self.session.dead else None

    @property
    def running(self) -> int | None:
        """Sequences that the living engine works on, by its own word; None without one."""
        session = self.live
        return min(session.ring.get(Word.RUNNING), MAX_RUNNING) if session is not None else None

    def epoch_of(self, seq: str) -> int:
        """The epoch under which the living engine writes `seq`; 0: it does not, or not any more."""
        session = self.live
        sequence = session.ledger.sequences.get(seq) if session is not None else None
        return sequence.epoch if sequence is not None else 0

    # -- coming and going ---------------------------------------------------------------------

    def refusal(self, message: Register) -> Refused | None:
        """Why an engine cannot be taken in now, whatever it exports."""
        misplaced = self._settings.group.refusal(message.rank, message.ranks)
        if misplaced:
            return Refused(misplaced, retry=False)
        current = self.live
        if current is not None and cpu_ticks(current.pid) >= 0 and not exiting(current.pid):
            return Refused(
                f"engine process {current.pid} is registered with this daemon already;"
                " start one segue-daemon per engine",
                retry=True,
            )
        return None

    def register(
        self, message: Register, fds: list[int], connection: Connection, pages: Pages | None = None
    ) -> Refused | None:
        """Take an engine in, with the pages that were opened for it. Raises ProtocolError or GeometryError.
        Unless it is taken in, `fds` and `pages` stay the caller's."""
        refused = self.refusal(message)
        if refused is not None:
            return refused
        current = self.session
        if current is not None and not current.dead:
            self.left(current, dead=True)
        if len(message.fingerprint) != FINGERPRINT_BYTES:
            raise ProtocolError(f"register: a fingerprint has {FINGERPRINT_BYTES} bytes")
        if not all(map(math.isfinite, message.defaults.values())):  # JSON has no word for them
            raise ProtocolError(f"register: sampling defaults must be finite numbers: {message.defaults}")
        limit = self._settings.replication.max_sequences
        session = EngineSession(message, fds, connection.pid, self._clock, max_sequences=limit, pages=pages)
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(session.doorbell, self._doorbell, session)
        except OSError as error:
            session.pages.close()  # an exception keeps the session, and that an engine's whole memory
            raise ProtocolError(f"register: the doorbell is no eventfd: {error.strerror}") from error
        if current is not None:
            self._unmap(current)
        self.session = session
        self._worker = connection
        self._judge = self._new_judge()
        self._verdict = ("running", 0)
        watch = (session, loop)
        threading.Thread(target=self._watch_lifeline, args=watch, name="segue-lifeline", daemon=True).start()
        for link in self._links:
            link.add_engine(session)
        log.info(
            "engine registered",
            engine=message.engine,
            pid=session.pid,
            model=message.model,
            blocks=message.geometry.num_blocks,
            block_bytes=message.geometry.block_bytes,
            tails="slot runs" if message.geometry.slot_axis_known else "changed items",
        )
        self.drain_and_sleep()
        self._changed()
        return None

    def gone(self, connection: Connection) -> None:
        """A worker's connection ended: its engine is dead, or it lives and has hung up."""
        session = self.live
        if session is not None and self._worker is connection:
            dying = session.pid != 0 and exiting(session.pid)
            self.left(session, dead=session.lifeline.broken or dying)

    async def let_go(self) -> None:
        """Wait until the memory of an engine that hung up is let go, not for ever. What is salvaged of a dead
        one takes its own time."""
        if self.session is not None and self.session.closed:
            await let_go(self.session.pages, self.session.pages.geometry.gpu)

    def _watch_lifeline(self, session: EngineSession, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: report a killed engine before the kernel has torn it down."""
        if not session.lifeline.wait_broken():
            return
        deadline_ns = self._clock.now_ns() + LIFELINE_CONFIRM_MS * 1_000_000
        while not session.dead and self._clock.now_ns() < deadline_ns:
            if session.pid == 0 or exiting(session.pid):
                with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon stops
                    loop.call_soon_threadsafe(self._lifeline_broke, session)
                return
            time.sleep(0.0005)

    def _lifeline_broke(self, session: EngineSession) -> None:
        if self.live is session:
            self.left(session, dead=True)

    def left(self, session: EngineSession, *, dead: bool) -> None:
        """The engine is gone: say so, let its memory go. Salvage only what is `dead`: a living engine that
        hung up goes on overwriting its pages, and its journal does not tell any more."""
        log.warning(
            "engine died" if dead else "engine hung up", engine=session.register.engine, pid=session.pid
        )
        for changes in session.last_words():
            self._apply(session, changes)
        session.dead = True
        asyncio.get_running_loop().remove_reader(session.doorbell)
        self._worker = None
        self._verdict = ("dead" if dead else "absent", 0)
        for sequence in session.ledger.sequences.values():
            self._orphan(session, sequence.seq, sequence.epoch)
        self._changed()
        if dead:
            self._spawn(self._salvage(session))
        else:
            self._unmap(session)

    async def _salvage(self, session: EngineSession) -> None:
        """Ship what peers do not have yet from the mapping that outlived the engine, keep here what none of
        them gets in half the time, then unmap."""
        started_ns = self._clock.now_ns()
        most_s = self._settings.timeouts.salvage_ms / 1000
        flushed = asyncio.gather(*(link.flushed(session) for link in self._links))
        try:
            async with asyncio.timeout(most_s):
                await asyncio.wait({flushed}, timeout=most_s / 2 if self._keep.enabled else None)
                await self._keep_own(session)
                await flushed
        except TimeoutError:
            log.warning("salvage ran out of time", engine=session.register.engine)
        finally:
            flushed.cancel()
            self._unmap(session)
        released_ms = (self._clock.now_ns() - started_ns) // 1_000_000
        log.info("engine memory released", engine=session.register.engine, after_ms=released_ms)

    async def _keep_own(self, session: EngineSession) -> None:
        """Keep here what no connected peer has whole. Raises CancelledError when time is up."""

        def protected(sequence: LedgerSequence) -> bool:
            return any(
                link.connected and link.watermark(session, sequence.seq) >= sequence.shippable
                for link in self._links
            )

        slices = Slices(self._clock)
        for _ in self._keep.slices(session, protected, self._clock.now_ns):
            await slices.share()

    def _unmap(self, session: EngineSession) -> None:
        for link in self._links:
            link.drop_engine(session)
        if not session.dead:
            asyncio.get_running_loop().remove_reader(session.doorbell)
        session.close()

    def stop(self) -> None:
        """The daemon stops: let the engine's memory go."""
        if self.session is not None:
            self._unmap(self.session)

    # -- the journal --------------------------------------------------------------------------

    def _doorbell(self, session: EngineSession) -> None:
        if not session.hear():
            asyncio.get_running_loop().remove_reader(session.doorbell)
            log.warning("the doorbell is broken; looking every 50 ms", engine=session.register.engine)
        self.drain_and_sleep()

    def drain_and_sleep(self) -> None:
        """Apply the journal, then ask for the doorbell."""
        session = self.live
        if session is None:
            return
        self.drain()
        if not session.sleep():
            self.drain()
        if session.awaiting and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(COMPLETION_POLL_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self.drain_and_sleep()

    def drain(self) -> None:
        """Apply the journal and pass on what changed."""
        session = self.live
        if session is not None:
            for changes in session.drain():
                self._apply(session, changes)

    def _apply(self, session: EngineSession, changes: Changes) -> None:
        for seq, epoch in changes.forgotten:
            self._orphan(session, seq, epoch)
        if self._orphans:
            for seq in changes.grown:
                sequence = session.ledger.sequences.get(seq)
                if sequence is not None:
                    self._orphans.pop((session.incarnation, seq, sequence.epoch), None)
        for seq, epoch in changes.ended:
            self._end(session.incarnation, seq, epoch)
            self._keep.over(session.incarnation, seq, epoch)
        for link in self._links:
            link.note(session, changes)

    def _end(self, incarnation: int, seq: str, epoch: int) -> None:
        self._orphans.pop((incarnation, seq, epoch), None)
        for link in self._links:
            link.end(incarnation, seq, epoch)

    def _orphan(self, session: EngineSession, seq: str, epoch: int) -> None:
        """Nobody speaks for this sequence now: if that stays so, it is over."""
        deadline = asyncio.get_running_loop().time() + ORPHAN_S
        self._orphans[session.incarnation, seq, epoch] = deadline

    def fence(self, seq: str, epoch: int) -> bool:
        """`seq` goes on elsewhere with `epoch`: stop shipping it, tell the engine. A dead engine writes
        nothing more; what it left may still be shipped."""
        session = self.live
        if session is None or not session.ledger.fence(seq, epoch):
            return False
        if self._worker is not None:
            self._worker.send(Fenced(seq, epoch))
        log.info("sequence fenced", seq=seq, epoch=epoch)
        return True

    # -- is it alive? -------------------------------------------------------------------------

    async def watch_progress(self) -> None:
        """For ever: judge progress, end orphans; also the safety net for a missed doorbell."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.drain_and_sleep()
            for key, deadline in list(self._orphans.items()):
                if deadline < loop.time():
                    self._end(*key)
            self._keep.expire(self._clock.now_ns())
            session = self.live
            if session is None:
                continue
            if session.pages.failure:
                self._unreadable(session)
                continue
            ring = session.ring
            verdict = self._judge.judge(
                Sample(
                    now_ns=self._clock.now_ns(),
                    step_begun=ring.get(Word.STEP_BEGUN),
                    step_committed=ring.get(Word.STEP_COMMITTED),
                    running=ring.get(Word.RUNNING),
                    cpu_ticks=cpu_ticks(session.pid),
                )
            )
            before, self._verdict = self._verdict, verdict
            if verdict[0] != before[0]:
                log.warning("engine " + verdict[0], engine=session.register.engine, age_ms=verdict[1])
                self._changed()

    def _unreadable(self, session: EngineSession) -> None:
        """The engine lives, its memory cannot be read: let it go, and let it register anew."""
        log.error("engine memory lost", engine=session.register.engine, reason=session.pages.failure)
        if self._worker is not None:
            self._worker.send(Refused(session.pages.failure, retry=True))
        self.left(session, dead=False)

    def _new_judge(self) -> ProgressJudge:
        timeouts = self._settings.timeouts
        return ProgressJudge(stall_ms=timeouts.stall_ms, step_ms=timeouts.step_ms)

    def status(self) -> EngineStatus:
        """The engine as seen from here."""
        session = self.session
        if session is None:
            group = self._settings.group
            return EngineStatus(
                engine="",
                state="absent",
                detail="no engine has registered yet",
                rank=group.rank,
                ranks=group.ranks,
            )
        state, age_ms = self._verdict
        live = not session.dead
        return EngineStatus(
            engine=session.register.engine,
            state=state,
            incarnation=session.incarnation,
            model=session.register.model,
            fingerprint=session.ledger.fingerprint.hex(),
            pid=session.pid,
            running=min(session.ring.get(Word.RUNNING), MAX_RUNNING) if live else 0,
            step=session.ledger.step,
            progress_age_ms=age_ms,
            sequences=len(session.ledger.sequences) if live else 0,
            fenced=session.ledger.fenced if live else 0,
            journal_dropped=session.ring.get(Word.DROPPED) if live else 0,
            journal_broken=session.broken_records,
            sequences_refused=session.ledger.refused,
            generation_defaults=session.register.defaults,
            exact=session.register.exact,
            exact_detail=session.register.exact_detail,
            rank=session.register.rank,
            ranks=session.register.ranks,
        )

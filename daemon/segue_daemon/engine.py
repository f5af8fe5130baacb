"""One life of the engine beside us: its pages, its journal, its ledger.

Owns everything that was mapped for it, and lets all of it go in `close`. Reads the journal; decides
nothing about where data goes. Invariant: when records may have been lost, nothing is claimed about any
sequence until the engine has announced it anew.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

import msgspec
import structlog

from segue_core.clock import Clock
from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.geometry import Geometry
from segue_core.lifeline import LifelineWatch
from segue_core.messages.journal import Commit, Record
from segue_core.messages.local import Register
from segue_core.ring import Ring, Word
from segue_core.shared_memory import check_sealed
from segue_core.timeline import TimelineView
from segue_daemon.completion import HeldProgress
from segue_daemon.ledger import Changes, Ledger
from segue_daemon.open_pages import open_pages
from segue_daemon.pages import Pages
from segue_daemon.scan import BlockScan

log = structlog.get_logger()

MAX_RECORDS_PER_DRAIN = 10_000
"""An engine that decodes writes so many in ten seconds: more are there only if this daemon was stopped."""
MAX_LAST_DRAINS = 10
"""A second and a half of work, once, if this daemon was stopped for minutes before its engine died."""
UNREADABLE_NS = 100_000_000
"""A record that cannot be read for this long is not late but broken."""
RANKS = struct.Struct("<II")
"""Rank and number of ranks: another part of an engine has other KV of the same tokens."""
FIXED_FDS = 3
"""Journal, doorbell and lifeline come before the descriptors of the pages."""


def exported(register: Register, fds: Sequence[int]) -> tuple[Geometry, Sequence[int]]:
    """What an engine exports, checked, and which of its descriptors belong to that. Raises ProtocolError or
    GeometryError."""
    geometry = register.geometry.validate()
    first_page = FIXED_FDS + register.timeline
    if len(fds) != first_page + geometry.fd_count:
        raise ProtocolError(
            f"engine {register.engine}: {len(fds)} file descriptors for"
            f" {geometry.fd_count} exported allocations"
        )
    return geometry, fds[first_page:]


class EngineSession:
    """An engine process that registered. `fds` are journal, doorbell, lifeline, the timeline if there is one,
    then those of the geometry's handles."""

    def __init__(
        self,
        register: Register,
        fds: list[int],
        pid: int,
        clock: Clock,
        *,
        max_sequences: int,
        pages: Pages | None = None,
    ) -> None:
        """Map what the engine exports, unless `pages` are open already. Takes over `fds` and `pages`. Raises
        ProtocolError or GeometryError; they are still the caller's then."""
        self.register = register
        self.pid = pid
        self.dead = False
        self.broken_records = 0
        self.committed_at = 0
        """Where the newest commit that was applied ends in the journal, in bytes since its start."""
        self.scan = BlockScan() if register.notice == "after" else None
        self._clock = clock
        self._fds = fds
        self._unreadable_since = 0
        self._dropped = 0
        geometry, of_pages = exported(register, fds)
        if bool(geometry.gpu) != register.timeline or (register.timeline and self.scan is not None):
            raise ProtocolError("register: memory on a GPU needs a timeline and notice before each step")
        check_sealed(fds[0], "the journal")
        self.ring = Ring(fds[0])
        self.doorbell = fds[1]
        os.set_blocking(self.doorbell, False)
        self.lifeline = LifelineWatch(fds[2])
        self._timeline = TimelineView(fds[FIXED_FDS]) if register.timeline else None
        self._held = HeldProgress(self._computed)
        self.pages: Pages = open_pages(geometry, of_pages) if pages is None else pages
        place = RANKS.pack(register.rank, register.ranks)
        combined = hashlib.blake2b(register.fingerprint + geometry.digest + place, digest_size=16).digest()
        self.ledger = Ledger(geometry, combined, max_sequences=max_sequences)

    @property
    def incarnation(self) -> int:
        """The engine process's identity for this life."""
        return self.register.incarnation

    @property
    def closed(self) -> bool:
        """Whether its memory was let go."""
        return not self._fds

    def _computed(self, seq: str) -> int:
        sequence = self.ledger.sequences.get(seq)
        return sequence.computed if sequence is not None else 0

    @property
    def awaiting(self) -> bool:
        """Whether the GPU still works on a committed step. It rings no doorbell: drain again."""
        return bool(self._held)

    def drain(self) -> list[Changes]:
        """Take what the journal has, a bounded part of it in one call: while there is more, the ledger is
        `stale`. What is wrong with it costs protection for a moment, nothing else."""
        changes: list[Changes] = []
        start, upto = self.ring.position, self.written
        dropped = self.ring.get(Word.DROPPED)
        if dropped != self._dropped:
            self._dropped = dropped
            changes.append(self._lost("the journal was full"))
        for _ in range(MAX_RECORDS_PER_DRAIN):
            try:
                payload = self.ring.read()
                if payload is None:
                    break
                record = decode(payload, Record, peer="journal")
                if self._timeline is not None:
                    record = self._held.take(record, self._timeline.step)
                changes.append(self.ledger.apply(record))
                if isinstance(record, Commit):
                    self.committed_at = self.ring.get(Word.TAIL)
            except (ProtocolError, msgspec.MsgspecError) as error:
                changes.append(self._lost(str(error)))
                break
        self._release(changes)
        if self.ring.position > start:
            self._unreadable_since = 0
        elif self.ring.unread() > 0 and not self.dead:
            self._watch_unreadable(changes)
        self.ledger.stale = self.ring.position < upto
        return changes

    def last_words(self) -> list[Changes]:
        """The engine is gone: take all that its journal still says. If its end is too far, or cannot be
        read, nothing is claimed of what it left: the rest may have given its blocks away."""
        changes = self.drain()
        for _ in range(MAX_LAST_DRAINS):
            changes += self.drain() if self.ledger.stale else []
        if self.ledger.stale:
            changes.append(self._lost("the engine is gone, and its last records cannot be read"))
            self.ledger.stale = False
        return changes

    def _release(self, changes: list[Changes]) -> None:
        """Apply what was committed earlier and is complete on the GPU now."""
        commit = self._held.release(self._timeline.step) if self._timeline is not None else None
        if commit is not None:
            try:
                changes.append(self.ledger.apply(commit))
            except ProtocolError as error:
                changes.append(self._lost(str(error)))

    def _watch_unreadable(self, changes: list[Changes]) -> None:
        now = self._clock.now_ns()
        if not self._unreadable_since:
            self._unreadable_since = now
        elif now - self._unreadable_since > UNREADABLE_NS:
            changes.append(self._lost("a journal record is unreadable"))

    def _lost(self, reason: str) -> Changes:
        """Records are missing: forget everything, what is unread too, and have all announced anew.

        Unread records may be older than the missing one: applied now, they would bring back sequences
        whose blocks belong to somebody else by then.
        """
        self.broken_records += 1
        self._held.forget()
        self.ring.skip()
        self.ring.set(Word.SNAPSHOT_WANTED, 1)
        self._unreadable_since = 0
        log.warning(
            "journal lost records; asking for all sequences", engine=self.register.engine, reason=reason
        )
        return self.ledger.forget_all()

    @property
    def written(self) -> int:
        """Bytes that were written to the journal since its start, applied or not."""
        return self.ring.get(Word.HEAD)

    def sleep(self) -> bool:
        """Ask for the doorbell; False if something was written meanwhile (drain again)."""
        self._unreadable_since = self._unreadable_since if self.ring.unread() else 0
        self.ring.set(Word.SLEEPING, 1)
        return self.ring.unread() <= 0

    def hear(self) -> bool:
        """The doorbell rang: reset it. False if it is no doorbell (any more): do not listen to it."""
        try:
            os.eventfd_read(self.doorbell)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let the engine's memory go; safe to call twice."""
        self.dead = True
        self.lifeline.stopped = True
        self.pages.close()
        self.ring.close()
        if self._timeline is not None:
            self._timeline.close()
        while self._fds:
            os.close(self._fds.pop())

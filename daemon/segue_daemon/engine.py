"""One life of the engine beside us: its pages, its journal, its ledger.

Owns everything that was mapped for it, and lets all of it go in `close`. Reads the journal; decides
nothing about where data goes. Invariant: when records may have been lost, nothing is claimed about any
sequence until the engine has announced it anew.
"""

from __future__ import annotations

import hashlib
import os
import struct

import msgspec
import structlog

from segue_core.clock import Clock
from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.lifeline import LifelineWatch
from segue_core.messages.journal import Commit, Record
from segue_core.messages.local import Register
from segue_core.ring import Ring, Word
from segue_core.shared_memory import check_sealed
from segue_daemon.ledger import Changes, Ledger
from segue_daemon.pages import HostPages
from segue_daemon.scan import BlockScan

log = structlog.get_logger()

MAX_RECORDS_PER_DRAIN = 10_000
UNREADABLE_NS = 100_000_000
"""A record that cannot be read for this long is not late but broken."""
RANKS = struct.Struct("<II")
"""Rank and number of ranks: another part of an engine has other KV of the same tokens."""
FIXED_FDS = 3
"""Journal, doorbell and lifeline come before the descriptors of the pages."""


class EngineSession:
    """An engine process that registered. `fds` are journal, doorbell, lifeline, then one per
    geometry handle."""

    def __init__(
        self, register: Register, fds: list[int], pid: int, clock: Clock, *, max_sequences: int
    ) -> None:
        """Map what the engine exports. Takes over `fds`. Raises ProtocolError or GeometryError."""
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
        geometry = register.geometry.validate()
        if len(fds) != FIXED_FDS + len(geometry.handle_bytes):
            raise ProtocolError(
                f"engine {register.engine}: {len(fds)} file descriptors for"
                f" {len(geometry.handle_bytes)} exported allocations"
            )
        check_sealed(fds[0], "the journal")
        self.ring = Ring(fds[0])
        self.doorbell = fds[1]
        os.set_blocking(self.doorbell, False)
        self.lifeline = LifelineWatch(fds[2])
        self.pages = HostPages(geometry, fds[FIXED_FDS:])
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

    def drain(self) -> list[Changes]:
        """Take what the journal has. What is wrong with it costs protection for a moment, nothing else."""
        changes: list[Changes] = []
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
                changes.append(self.ledger.apply(record))
                if isinstance(record, Commit):
                    self.committed_at = self.ring.get(Word.TAIL)
            except (ProtocolError, msgspec.MsgspecError) as error:
                changes.append(self._lost(str(error)))
                break
        if self.ring.unread() > 0 and not self.dead:
            self._watch_unreadable(changes)
        return changes

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
        while self._fds:
            os.close(self._fds.pop())

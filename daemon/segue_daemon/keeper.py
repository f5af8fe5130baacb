"""Keeps the replica store in order in the background: leases, watermarks, the host's memory, the scrubber.

Does the I/O (clock, /proc/meminfo, pages given back) around decisions that are made elsewhere: `eviction.py`
and `scrub.py`. Invariant: a tick is short: long work (giving up many blocks, returning many pages) is done in
pieces between which the event loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from segue_core.clock import Clock
from segue_daemon.arena import Arena
from segue_daemon.eviction import HostPressure
from segue_daemon.scrub import Scrubber
from segue_daemon.settings import StoreSettings
from segue_daemon.store import ReplicaStore

log = structlog.get_logger()

TICK_S = 0.1
MAX_GIVE_BACK = 256 << 20
"""Bytes of pages returned to the host in one tick."""
GIVE_BACK_PIECE = 64 << 20
MEMINFO = Path("/proc/meminfo")


class StoreKeeper:
    """The store's housekeeping. `run` it as a task."""

    def __init__(
        self,
        settings: StoreSettings,
        store: ReplicaStore,
        arena: Arena,
        clock: Clock,
        *,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`available_bytes`: what the host could still hand out; by default from /proc/meminfo."""
        self.scrubber = Scrubber(bytes_per_s=settings.scrub_bytes_per_s)
        self._store = store
        self._arena = arena
        self._clock = clock
        self._watches_host = settings.min_host_free_bytes > 0
        self._pressure = HostPressure(arena.capacity, min_free_bytes=settings.min_host_free_bytes)
        self._available_bytes = available_bytes or host_available_bytes
        self._poisoned_logged = False

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """One round of everything."""
        now_ns = self._clock.now_ns()
        self._store.expire(now_ns)
        if self._watches_host:
            self._mind_the_host()
        more = self._store.evictor.trim(now_ns)
        while more:
            await asyncio.sleep(0)
            more = self._store.evictor.trim(now_ns)
        if self._store.budget.limit < self._arena.capacity:
            self._give_pages_back()
        self.scrubber.tick(now_ns, self._store.sealed_blocks, lambda: self._store.integrity.scrub_one(now_ns))
        if self._store.integrity.poisoned and not self._poisoned_logged:
            self._poisoned_logged = True
            log.error(
                "a replica's memory has changed by itself: the block is dropped and will not be loaded",
                blocks=self._store.integrity.poisoned,
                hint="check this host's memory; further ones are only counted (segue_store_poisoned_blocks)",
            )

    def _mind_the_host(self) -> None:
        before = self._store.budget.limit
        limit = self._pressure.observe(self._available_bytes(), self._arena.resident_bytes)
        self._store.budget.limit = limit
        if (limit < self._arena.capacity) != (before < self._arena.capacity):
            log.warning(
                "host is short of memory: replicas give way" if limit < before else "host has memory again",
                limit_bytes=limit,
                budget_bytes=self._arena.capacity,
            )

    def _give_pages_back(self) -> None:
        """Return free pages until the arena takes no more than its limit, the far end first: room is handed
        out from the near end. At most `MAX_GIVE_BACK` and a piece in one call."""
        enough = max(self._store.budget.limit, self._arena.resident_bytes - MAX_GIVE_BACK)
        for offset, nbytes in reversed(self._store.free_extents()):
            end = offset + nbytes
            while end > offset:
                if self._arena.resident_bytes <= enough:
                    return
                start = max(offset, end - GIVE_BACK_PIECE)
                self._arena.give_back(start, end - start)
                end = start


def host_available_bytes() -> int:
    """MemAvailable: what the host can hand out without swapping. Raises OSError or ValueError."""
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{MEMINFO}: no MemAvailable")

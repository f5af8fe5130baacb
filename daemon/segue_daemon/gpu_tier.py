"""The GPU tier: copies of sealed blocks in the memory of the engine's GPU, filled in the background.

An engine that takes a sequence over loads those at the speed of its own memory, and the rest from the arena.
Lives within one registration of an engine; owns the memory (`cuda.tier_memory`) and the index of what is in
it (`tier_index`), and says where a block is loaded from. Invariants: nobody waits for the tier; nothing is
given out before the engine has said that it can read it, or after it is over; only blocks that are sound are
copied; whatever fails ends the tier, and blocks come from the arena as before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from segue_core.clock import Clock
from segue_core.extents import MAX_TIERS, in_tier
from segue_core.messages.local import Tier, TierMapped
from segue_daemon.beside import beside
from segue_daemon.blocks import Block
from segue_daemon.engine import EngineSession
from segue_daemon.local import Connection
from segue_daemon.open_pages import LET_GO_S, let_go
from segue_daemon.store import ReplicaStore
from segue_daemon.tier_index import Slot, TierIndex
from segue_daemon.wire import Slices

if TYPE_CHECKING:
    from segue_daemon.cuda.tier_memory import TierMemory

log = structlog.get_logger()

ROOM_BYTES = 4 << 20
"""Checked and copied at once on its way to the GPU, at least a block; the event loop does that."""
RETRY_S = 0.25
"""How soon a block is tried again for which no slot was free: those that engines load from are kept."""
ANSWER_S = 300.0
"""An engine page-locks the arena first, which may be large."""
NO_ENGINE = "no engine that could load from it is registered"


class GpuTier:
    """Of one daemon; there is none before `open`. Implements `BlockWatch`."""

    def __init__(
        self,
        budget_bytes: int,
        store: ReplicaStore,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`budget_bytes` 0: there is never one. `spawn` runs a task that the daemon looks after."""
        self.detail = NO_ENGINE if budget_bytes else ""
        self._budget_bytes = budget_bytes
        self._store = store
        self._clock = clock
        self._spawn = spawn
        self._number = 0
        self._session: EngineSession | None = None
        self._worker: Connection | None = None
        self._memory: TierMemory | None = None
        self._last: TierMemory | None = None
        self._index = TierIndex(0, 1)
        self._mapped = False
        self._wake = asyncio.Event()
        self._opening = asyncio.Lock()
        self._alarm: asyncio.TimerHandle | None = None

    # -- coming and going -------------------------------------------------------------------------

    def engine_came(self, session: EngineSession, worker: Connection) -> None:
        """An engine was taken in: make a tier for it in the background, if one is wanted and of use to it."""
        if not self._budget_bytes:
            return
        self.engine_changed(session)
        self._session, self._worker = session, worker
        if session.register.tier and session.pages.geometry.gpu:
            self.detail = "it is being opened"
            self._spawn(self._open(session, worker))
        else:
            self.detail = "the engine's KV cache is in host memory, or its shim knows of no tier"

    def engine_changed(self, live: EngineSession | None) -> None:
        """The engine may have gone: the tier goes with the one that it was made for."""
        if self._session is not None and self._session is not live:
            self.close()
            self.detail = NO_ENGINE

    async def _open(self, session: EngineSession, worker: Connection) -> None:
        """One after the other, and after the one before is let go: there may be room for one only."""
        async with self._opening:
            if self._last is not None:
                await let_go(self._last, self._last.gpu)
            if self._session is session:
                await self._open_next(session, worker)

    async def _open_next(self, session: EngineSession, worker: Connection) -> None:
        """Open it and offer it."""
        gpu, block_bytes = session.pages.geometry.gpu, session.pages.geometry.block_bytes
        try:
            if not TierIndex(self._budget_bytes, block_bytes).slots:
                raise ValueError(f"a block has {block_bytes} bytes, `store.gpu_budget_bytes` is smaller")
            room = max(ROOM_BYTES, block_bytes)
            work = lambda: _open_memory(gpu, self._budget_bytes, room)  # noqa: E731
            memory = await beside("segue-gpu-tier-open", work, lambda memory: memory.close())
        except Exception as error:
            if self._session is session:
                self._over(str(error) or repr(error))
            return
        if self._session is not session:
            self._last = memory
            memory.close()
            return
        self._number = self._number % (MAX_TIERS - 1) + 1
        self._memory, self._index = memory, TierIndex(memory.nbytes, block_bytes)
        self.detail = "the engine has not mapped it yet"
        if not worker.send_with_fds(Tier(self._number, memory.nbytes), [memory.fd]):
            self._over("the engine's connection does not take it")
            return
        silent = f"the engine has not answered within {ANSWER_S:.0f} s"
        self._alarm = asyncio.get_running_loop().call_later(ANSWER_S, self._over, silent)

    def mapped(self, message: TierMapped, worker: Connection) -> None:
        """The engine answers, or has trouble later."""
        memory = self._memory
        if memory is None or message.number != self._number or worker is not self._worker:
            return
        if message.problem:
            self._over(f"the engine cannot load from it: {message.problem}")
        elif not self._mapped:
            self._mapped, self.detail = True, ""
            self._silence()
            log.info("copies of replicas go to the GPU", bytes=memory.nbytes, blocks=self._index.slots)
            self._store.watch(self)
            self._spawn(self._fill(memory))

    def close(self) -> None:
        """Let the memory go; safe to call twice."""
        memory, self._memory, self._session, self._worker = self._memory, None, None, None
        self._mapped = False
        self._silence()
        if memory is not None:
            self._last = memory
            self._store.watch(None)
            self._index = TierIndex(0, 1)
            self._wake.set()
            memory.close()

    def _silence(self) -> None:
        """The answer is there, or not waited for any more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def let_go(self) -> None:
        """Wait until memory that was closed is free, not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_S / 2), self._opening:
                pass
        if self._last is not None:
            await let_go(self._last, self._last.gpu)

    def _over(self, reason: str) -> None:
        """There is no tier for this engine any more."""
        session, worker = self._session, self._worker
        self.close()
        self._session, self.detail = session, reason
        log.warning("no copies of replicas on the GPU", reason=reason)
        if worker is not None:
            worker.send(Tier(self._number, 0))

    # -- what is in it ----------------------------------------------------------------------------

    def place(self, block: Block, until_ns: int) -> int:
        """The extent from which an engine may load `block` until `until_ns`."""
        offset = self._index.find(block, until_ns) if self._mapped else None
        return block.offset if offset is None else in_tier(self._number, offset)

    def wanted(self, block: Block) -> None:
        self._index.wanted(block)
        self._wake.set()

    def gone(self, key: bytes) -> None:
        self._index.gone(key)

    @property
    def nbytes(self) -> int:
        """Of GPU memory; 0: there is no tier."""
        return self._memory.nbytes if self._memory is not None else 0

    @property
    def blocks(self) -> int:
        """Blocks that have a copy."""
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Of GPU memory that copies take."""
        return len(self._index) * self._index.slot_bytes

    @property
    def hits(self) -> int:
        """Blocks that were given out from this tier."""
        return self._index.hits

    # -- filling it -------------------------------------------------------------------------------

    async def _fill(self, memory: TierMemory) -> None:
        """As long as there is this tier: copy what waits, a few blocks at a time."""
        try:
            await self._want_all()
            while self._memory is memory:
                await self._fill_some(memory)
        except Exception as error:
            if self._memory is memory:
                self._over(str(error) or repr(error))

    async def _want_all(self) -> None:
        """What replicas have already, as much as there is room for, the newest of them."""
        index, slices = self._index, Slices(self._clock)
        found: dict[bytes, Block] = {}
        for replica in sorted(self._store.replicas.values(), key=lambda replica: -replica.touched_ns):
            if len(found) >= index.slots:
                break
            if replica.block_bytes == index.block_bytes:
                found |= {block.key: block for block in replica.blocks if block.key}
            await slices.share()
        for block in reversed(found.values()):
            if block.key:
                index.wanted(block)
            await slices.share()

    async def _fill_some(self, memory: TierMemory) -> None:
        """Copy what comes next; else wait for something to copy."""
        index = self._index
        batch = self._gather(memory)
        if batch:
            offsets = [slot.offset for _, _, slot in batch]
            await beside("segue-gpu-tier-put", lambda: memory.put(offsets, index.block_bytes))
            for key, block, slot in batch:
                index.made(key, block, slot)
            return
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S if index.waits else None):
                await self._wake.wait()

    def _gather(self, memory: TierMemory) -> list[tuple[bytes, Block, Slot]]:
        """Copies of what comes next, in page-locked memory."""
        index, now_ns = self._index, self._clock.now_ns()
        batch: list[tuple[bytes, Block, Slot]] = []
        while (len(batch) + 1) * index.block_bytes <= len(memory.room):
            found = index.next(now_ns)
            if found is None:
                break
            _, block, slot = found
            if not self._store.integrity.sound(block, now_ns):
                index.failed(slot)
                continue
            at = len(batch) * index.block_bytes
            memory.room[at : at + index.block_bytes] = self._store.bytes_of(block)
            batch.append(found)
        return batch


def _open_memory(gpu: str, nbytes: int, room_bytes: int) -> TierMemory:
    from segue_daemon.cuda.tier_memory import TierMemory

    return TierMemory(gpu, nbytes, room_bytes)

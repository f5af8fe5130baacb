"""The GPU tier: copies of sealed blocks in the memory of the engine's GPU, filled in the background.

An engine that takes a sequence over loads those at the speed of its own memory, and the rest from the arena.
Lives as long as one registration of an engine; owns the memory (`cuda.tier_memory`) and the index of what is
in it (`tier_index`), and says where a block is loaded from. Invariants: nothing is given out before the
engine has said that it can read the tier, or after it is gone; only blocks that are sound are copied;
whatever fails on the GPU ends the tier, and blocks come from the arena as before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from segue_core.clock import Clock
from segue_core.errors import SegueError
from segue_core.extents import MAX_TIERS, in_tier
from segue_core.messages.local import TierMapped
from segue_daemon.blocks import Block
from segue_daemon.engine import EngineSession
from segue_daemon.store import ReplicaStore
from segue_daemon.tier_index import Slot, TierIndex

if TYPE_CHECKING:
    from segue_daemon.cuda.tier_memory import TierMemory

log = structlog.get_logger()

ROOM_BYTES = 4 << 20
"""Copied at once, at least a block: some tenths of a millisecond of the event loop and of the link."""
RETRY_S = 0.25
"""How soon a block is tried again for which no slot was free: those that engines load from are kept."""


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
        self.detail = ""
        self._budget_bytes = budget_bytes
        self._store = store
        self._clock = clock
        self._spawn = spawn
        self._number = 0
        self._session: EngineSession | None = None
        self._memory: TierMemory | None = None
        self._index = TierIndex(0, 1)
        self._mapped = False
        self._wake = asyncio.Event()

    async def open(self, session: EngineSession, live: Callable[[], EngineSession | None]) -> None:
        """Make one for the engine that has just registered, if it is on a GPU. `live()`: the engine that is
        there when the memory is. Raises nothing: without it everything works, only slower."""
        gpu, block_bytes = session.pages.geometry.gpu, session.pages.geometry.block_bytes
        if not self._budget_bytes or not gpu:
            return
        try:
            room = max(ROOM_BYTES, block_bytes)
            memory = await asyncio.to_thread(_open_memory, gpu, self._budget_bytes, room)
        except (SegueError, OSError) as error:
            self.detail = f"no GPU memory for copies of replicas: {error}"
            log.warning(self.detail, gpu=gpu, budget_bytes=self._budget_bytes)
            return
        if live() is not session:
            memory.close()
            return
        self.close()
        self._number = self._number % (MAX_TIERS - 1) + 1
        self._session, self._memory, self.detail = session, memory, "the engine has not mapped it yet"
        self._index = TierIndex(memory.nbytes, block_bytes)

    def offer(self) -> tuple[int, int, int] | None:
        """(number, bytes, descriptor) for the engine, if there is a tier."""
        memory = self._memory
        return (self._number, memory.nbytes, memory.fd) if memory is not None else None

    def mapped(self, message: TierMapped) -> None:
        """The engine answers."""
        memory = self._memory
        if memory is None or message.tier != self._number or self._mapped:
            return
        if message.problem:
            self._fail(f"the engine cannot map it: {message.problem}")
            return
        self._mapped, self.detail = True, ""
        log.info("copies of replicas go to the GPU", bytes=memory.nbytes, blocks=self._index.slots)
        self._store.watch(self)
        self._spawn(self._fill(memory))

    def keep_only(self, live: EngineSession | None) -> None:
        """The engine came, or went: the tier goes with the one that it was made for."""
        if self._session is not None and self._session is not live:
            self.close()

    def close(self) -> None:
        """Let the memory go; safe to call twice."""
        memory, self._memory, self._session, self._mapped = self._memory, None, None, False
        if memory is not None:
            self._store.watch(None)
            self._index = TierIndex(0, 1)
            self._wake.set()
            memory.close()

    def _fail(self, reason: str) -> None:
        self.close()
        self.detail = reason
        log.warning("no copies of replicas on the GPU any more", reason=reason)

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
        """Blocks that were given out from the tier, of the engine that is here."""
        return self._index.hits

    async def _fill(self, memory: TierMemory) -> None:
        """As long as there is this tier: copy what waits, a few blocks at a time."""
        index = self._index
        while self._memory is memory:
            batch = self._gather(memory)
            if not batch:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if index.waits else None):
                        await self._wake.wait()
                continue
            offsets = [slot.offset for _, _, slot in batch]
            try:
                await asyncio.to_thread(memory.put, offsets, index.block_bytes)
            except SegueError as error:
                if self._memory is memory:
                    self._fail(str(error))
                return
            for key, block, slot in batch:
                index.made(key, block, slot)

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

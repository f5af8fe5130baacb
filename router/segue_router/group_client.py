"""The daemons of an engine of several ranks, asked as if they were one.

All are asked at the same time, each within the deadline of one; what they say together is `group`'s affair.
Promotions go to every rank and are waited for at every rank, so that none is under way when the caller goes
on: with the next engine, after all have fenced the writers before it, or with a higher epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from segue_core.messages.status import EngineStatus, Promoted, PromoteRequest, SequenceStatus
from segue_router.daemons import DaemonClient, Superseded
from segue_router.group import Heard, engine_of, promoted_of, sequence_of

WATCH_RETRY_S = 0.2


class GroupClient:
    """A `DaemonClient` made of those of the ranks, in rank order."""

    def __init__(self, daemons: Sequence[DaemonClient]) -> None:
        self._daemons = tuple(daemons)
        self._engine: EngineStatus | None = None

    @property
    def _whole(self) -> bool:
        """Whether all ranks were in one life when they were last heard."""
        return self._engine is not None and self._engine.state == "running"

    async def sequence(self, seq: str, timeout_ms: int) -> SequenceStatus | None:
        """What every rank has of `seq`; None: none knows it."""
        known = await asyncio.gather(*(daemon.sequence(seq, timeout_ms) for daemon in self._daemons))
        return sequence_of(known, whole=self._whole)

    async def promote(self, seq: str, request: PromoteRequest, timeout_ms: int) -> Promoted | None:
        """Fence older writers at every rank. Raises Superseded if one was promoted as high before; None: one
        did not answer."""
        outcomes = await asyncio.gather(
            *(self._promote(daemon, seq, request, timeout_ms) for daemon in self._daemons)
        )
        answers = [outcome for outcome in outcomes if not isinstance(outcome, Superseded)]
        if len(answers) < len(outcomes):
            raise Superseded
        return promoted_of(answers, whole=self._whole)

    async def _promote(
        self, daemon: DaemonClient, seq: str, request: PromoteRequest, timeout_ms: int
    ) -> Promoted | Superseded | None:
        try:
            return await daemon.promote(seq, request, timeout_ms)
        except Superseded as superseded:
            return superseded

    async def fence(self, seq: str, epoch: int, timeout_ms: int) -> bool:
        """Tell every rank; returns whether all took it."""
        return all(await asyncio.gather(*(d.fence(seq, epoch, timeout_ms) for d in self._daemons)))

    async def watch(self) -> AsyncIterator[EngineStatus]:
        """What the ranks say together, whenever one of them says something or falls silent. Does not end."""
        heard = [Heard() for _ in self._daemons]
        changed = asyncio.Event()

        async def listen(rank: int) -> None:
            while True:
                async for status in self._daemons[rank].watch():
                    heard[rank] = Heard(status, fresh=True)
                    changed.set()
                heard[rank] = Heard(heard[rank].status, fresh=False)
                changed.set()
                await asyncio.sleep(WATCH_RETRY_S)

        listeners = [asyncio.create_task(listen(rank)) for rank in range(len(heard))]
        try:
            while True:
                await changed.wait()
                changed.clear()
                self._engine = engine_of(heard)
                if self._engine is not None:
                    yield self._engine
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

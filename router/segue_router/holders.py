"""What engines' daemons hold of a sequence: asked for all at once, each within a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from segue_core.messages.status import SequenceStatus
from segue_router.choose import Candidate
from segue_router.daemons import DaemonClient
from segue_router.engine import Engine


async def ask(engines: Sequence[Engine], seq: str, timeout_ms: int) -> list[Candidate]:
    """`engines` as candidates, with what their daemons hold of `seq`. Who does not answer holds nothing."""
    held = await asyncio.gather(*(held_by(engine.daemon, seq, timeout_ms) for engine in engines))
    return [candidate(engine, status) for engine, status in zip(engines, held, strict=True)]


async def held_by(daemon: DaemonClient | None, seq: str, timeout_ms: int) -> SequenceStatus | None:
    """What `daemon` knows of `seq`; None: nothing, or no answer in time."""
    return await daemon.sequence(seq, timeout_ms) if daemon is not None else None


def candidate(engine: Engine, held: SequenceStatus | None = None) -> Candidate:
    """`engine` as `choose` sees it. What the engine there has written itself is no replica."""
    loadable = held is not None and held.role in ("replica", "cached")
    return Candidate(
        name=engine.name,
        state=engine.health.state,
        active=engine.load,
        fingerprint=engine.fingerprint,
        watermark=held.watermark if held is not None and loadable else 0,
        replica_bytes=held.bytes if held is not None and loadable else 0,
    )

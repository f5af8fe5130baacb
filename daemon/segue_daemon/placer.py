"""Carries placement out: tells the links which sequences move, and counts copies. Decides nothing.

Only sequences of a living engine move: what a dead one left stays where it can be restored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from segue_core.clock import Clock
from segue_core.messages.status import CopiesStatus
from segue_daemon.engine_host import EngineHost
from segue_daemon.link import Link
from segue_daemon.placement import Placement

log = structlog.get_logger()

LOOK_S = 0.05


class Placer:
    """Moves sequences between the links of one daemon."""

    def __init__(self, placement: Placement, host: EngineHost, links: Sequence[Link], clock: Clock) -> None:
        self._placement = placement
        self._host = host
        self._links = links
        self._clock = clock

    async def run(self) -> None:
        """For ever: move what has to."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_ns = self._clock.now_ns()
            if self._placement.due(now_ns):
                self._review(now_ns)

    def _review(self, now_ns: int) -> None:
        session = self._host.live
        sequences = session.ledger.sequences if session is not None else {}
        moves = self._placement.review([seq for seq, s in sequences.items() if not s.fenced], now_ns)
        if session is None or not moves:
            return
        for link in self._links:
            link.moved(session, moves)
        dropped = sum(len(move.dropped) for move in moves)
        say = log.info if dropped else log.debug  # a place for what had none is no news
        say("sequences re-placed", sequences=len(moves), copies_ended_elsewhere=dropped)

    def status(self) -> CopiesStatus:
        """Copies of the living engine's sequences."""
        session = self._host.live
        sequences = session.ledger.sequences if session is not None else {}
        placed = achieved = 0
        for link in self._links:
            to_hold, held = link.copies(session) if session is not None else (0, 0)
            placed += to_hold
            achieved += held if link.connected else 0
        return CopiesStatus(
            wanted=sum(s.replicated and not s.fenced for s in sequences.values()) * self._placement.replicas,
            placed=placed,
            achieved=achieved,
            moves=self._placement.moves,
        )

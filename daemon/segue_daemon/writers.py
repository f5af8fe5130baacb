"""The peers that write to this daemon: who is here, who was lost, what they must still be told. Plain data.

Invariant: of each sequence at most its newest loss is kept, and of all at most `limit`: what who is longest
away was to hear goes first, for he may never be back. A writer that is not told learns it from the gap that
its next delta leaves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from segue_daemon.replicas import Loss


@dataclass(frozen=True)
class Lost:
    """A writer whose link ended at `since_ns`."""

    incarnation: int
    since_ns: int


@dataclass(eq=False)
class Writer:
    """A peer daemon that writes to us."""

    name: str
    identity: bytes
    incarnation: int
    ticket: int
    heard_ns: int
    consumed: int = 0
    answers: list[bytes] = field(default_factory=list, repr=False)
    """Acks and nacks to it that wait for each other, at the latest until its bulk is waited for."""
    answered: int = 0
    """`consumed` when they went last: nothing else that it is told may say more, or it would miss them."""
    bulk: asyncio.Task[None] | None = field(default=None, repr=False)


class Losses:
    """What the store gave up of replicas, until their writers were told; those that are away later."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._untold: dict[str, dict[str, Loss]] = {}

    def add(self, loss: Loss) -> None:
        """Keep `loss` for its writer; it replaces an older one of its sequence."""
        if loss.seq not in self._untold.get(loss.writer, {}):
            if self._count >= self._limit:
                self._drop_oldest()
            self._count += 1
        self._untold.setdefault(loss.writer, {})[loss.seq] = loss

    def _drop_oldest(self) -> None:
        writer, losses = next(iter(self._untold.items()))
        del losses[next(iter(losses))]
        if not losses:
            del self._untold[writer]
        self._count -= 1

    def take(self, writer: str) -> list[Loss]:
        """All that `writer` was not told yet."""
        found = list(self._untold.pop(writer, {}).values())
        self._count -= len(found)
        return found

"""What the schedule fuzzer computes with: KV whose bytes are a hash of their whole prefix, a model that is a
function of the last tokens, and daemons that hold replicas of anything.

Owns no schedule. Invariant: the content of a slot is right for exactly one prefix, so that one look at it
says whether it was computed, loaded or left from another request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from segue_core.clock import ManualClock
from segue_shim.match_group import GroupMatch
from segue_shim.plan import Source, unpack_u32

BLOCK_SIZE = 16
JUNK = -1
"""The content of a slot whose load failed, or that was computed on such a one."""
VOCABULARY = range(2, 42)
LEASE_MS = 1000


@lru_cache(maxsize=4096)
def contents(token_ids: bytes) -> tuple[int, ...]:
    """What the slots of these tokens (packed u32) must hold, one after another."""
    found: list[int] = []
    content = 0
    for token in unpack_u32(token_ids):
        content = hash((content, token)) & 0x7FFFFFFFFFFFFFFF
        found.append(content)
    return tuple(found)


def next_token(token_ids: Sequence[int]) -> int:
    """What the model answers to these."""
    return VOCABULARY[(hash(tuple(token_ids[-3:])) ^ len(token_ids) * 7919) % len(VOCABULARY)]


def answer(token_ids: Sequence[int], length: int) -> list[int]:
    """The `length` tokens with which the model goes on."""
    whole = list(token_ids)
    for _ in range(length):
        whole.append(next_token(whole))
    return whole[len(token_ids) :]


class Replicas:
    """Stands for `MatchGroup`: a daemon that holds as much of any sequence as the dice say. `leases` are the
    token ids that each lease in force covers."""

    def __init__(self, dice: random.Random, clock: ManualClock) -> None:
        self._dice = dice
        self._clock = clock
        self._last = 0
        self.leases: dict[int, list[int]] = {}

    def match(
        self, *, seq: str, epoch: int, salt: bytes, token_ids: bytes, computed: int, limit: int
    ) -> GroupMatch | None:
        tokens = unpack_u32(token_ids)
        held = self._dice.choice([0, len(tokens) - 1, self._dice.randrange(len(tokens) + 1)])
        held = min(limit, held)
        if held <= computed:
            return None
        self._last += 1
        self.leases[self._last] = list(tokens[:held])
        first, last = computed // BLOCK_SIZE, -(-held // BLOCK_SIZE)
        deadline_ns = self._clock.now_ns() + LEASE_MS * 1_000_000
        source = Source(1, self._last, deadline_ns, tuple(range(first, last)))
        return GroupMatch(held, first, deadline_ns, (source,))

    def release(self, daemon: int, lease: int, loaded: int) -> None:
        """The lease must be in force: nothing is given back twice."""
        del self.leases[lease]

    def drop(self, match: GroupMatch) -> None:
        self.release(1, match.sources[0].lease, 0)

    def close(self) -> None:
        pass

"""Faults of a few lines each, of the scheduler's half. See test_schedule_fuzz.py: each must be noticed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from segue_shim.vllm_scheduler import SchedulerHalf


class ClaimsAfterTakeover(SchedulerHalf):
    """A sequence's blocks are still claimed when its next owner waits and the last one is gone."""

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._taken_over.clear()


class CountsWhatIsBeingFilled(SchedulerHalf):
    """A prefix-cache hit counts although another request goes on filling its blocks in this very step."""

    def _start(
        self, request_id: str, blocks: list[int], begin: int, assigned: list[int], starts: list[Any]
    ) -> None:
        super()._start(request_id, blocks, begin, assigned, starts)
        self._assigned = assigned

    def _begin(self, tracked: Any, full_blocks: int, writing: frozenset[int]) -> Any:
        return super()._begin(tracked, full_blocks, frozenset(self._assigned))


class LeavesJunkInThePrefixCache(SchedulerHalf):
    """Blocks of a load that failed stay in vLLM's prefix cache."""

    def computed_in_vain(self, failed: Iterable[int]) -> set[int]:
        return set()


class ForgetsToPause(SchedulerHalf):
    """A preempted request keeps its claims."""

    def _pause(self, request_id: str, paused: list[str]) -> None:
        super()._pause(request_id, [])


class ClaimsDrafts(SchedulerHalf):
    """KV of drafts counts before it is known whether they are accepted."""

    def _count(self, request_id: str, begin: int, output: Any, computed: list[tuple[str, int]]) -> None:
        told = len(computed)
        super()._count(request_id, begin, output, computed)
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        computed[told:] = [(seq, tokens + drafts) for seq, tokens in computed[told:]]


SEEDS_NEEDED: dict[type[SchedulerHalf], tuple[str, range]] = {
    ForgetsToPause: ("sync", range(1)),
    ClaimsAfterTakeover: ("sync-spec", range(2)),
    ClaimsDrafts: ("sync-spec", range(1)),
    LeavesJunkInThePrefixCache: ("sync", range(4)),
    CountsWhatIsBeingFilled: ("sync", range(20, 24)),
}
"""Mode, and seeds within which each is noticed. (The last needs two requests to meet within a block: of the
first 23 seeds one sees it.)"""

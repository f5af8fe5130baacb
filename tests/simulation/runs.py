"""What tests have done beside them: many seeds, or seeds with a planted bug; other processes import it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from simulation.clockwork import Violation
from simulation.world import run_seed


def run_seeds(first: int, count: int) -> Counter[str]:
    """So many seeds from `first` on; what happened in them, counted. Raises Violation."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        world = run_seed(seed)
        for daemon in world.daemons:
            seen["refused"] += daemon.store.refused
            seen["loaded"] += daemon.store.loaded_bytes
            seen["torn"] += sum(s.torn for link in daemon.links for s in link.shipments.values())
            seen["restarted"] += daemon.life - 1
        seen["moved"] += sum(epoch > 1 for _, epoch, _ in world.truth)
    return seen


def notices(bug: Callable[[pytest.MonkeyPatch], None], seeds: int) -> bool:
    """Whether a checker notices `bug` within so many seeds. (That the code stumbles over it by itself does
    not count.)"""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for seed in range(seeds):
            try:
                run_seed(seed)
            except Violation as violation:
                if isinstance(violation.__cause__, Violation):
                    return True
    return False

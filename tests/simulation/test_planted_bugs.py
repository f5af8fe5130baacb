"""Whether the simulation would notice: each planted bug is caught within its stated number of seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.bugs import SEEDS_NEEDED
from simulation.clockwork import Violation
from simulation.world import run_seed


@pytest.mark.parametrize("bug", SEEDS_NEEDED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checker that lets this fault pass would let it pass in the product. (That the code stumbles over the
    fault by itself does not count.)"""
    bug(monkeypatch)
    for seed in range(SEEDS_NEEDED[bug]):
        try:
            run_seed(seed)
        except Violation as violation:
            if isinstance(violation.__cause__, Violation):
                return
    pytest.fail(f"{bug.__name__} was not noticed in {SEEDS_NEEDED[bug]} seeds")

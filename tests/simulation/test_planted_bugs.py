"""Whether the simulation would notice: each planted bug is caught within its stated number of seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.beside import Beside
from simulation.bugs import SEEDS_NEEDED
from simulation.runs import notices

pytestmark = pytest.mark.timeout(600)  # others come first

BUGS = [
    pytest.param(bug, marks=pytest.mark.beside(notices, bug, seeds), id=bug.__name__)
    for bug, seeds in SEEDS_NEEDED.items()
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Callable[[pytest.MonkeyPatch], None], beside: Beside) -> None:
    """A checker that lets this fault pass would let it pass in the product."""
    seeds = SEEDS_NEEDED[bug]
    assert beside.result(notices, bug, seeds), f"{bug.__name__} was not noticed in {seeds} seeds"

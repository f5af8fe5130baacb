"""Replication under everything that can go wrong at once: 2,000 clusters, each from its seed."""

from __future__ import annotations

import pytest

from simulation.beside import Beside
from simulation.clockwork import line_of
from simulation.runs import run_seeds
from simulation.world import World, quiet

pytestmark = pytest.mark.timeout(600)  # others come first

SEEDS = 2_000
CHUNK = 50
CHUNKS = [
    pytest.param(first, marks=pytest.mark.beside(run_seeds, first, CHUNK)) for first in range(0, SEEDS, CHUNK)
]


@pytest.mark.parametrize("first", CHUNKS)
def test_the_invariants_hold_whatever_fails(first: int, beside: Beside) -> None:
    """Daemons and engines die and stop, links break, delay and damage: no replica ever holds a wrong byte or
    too many tokens, no fenced writer is heard, and after healing everything converges and is freed."""
    beside.result(run_seeds, first, CHUNK)


def test_one_seed_is_one_trace() -> None:
    """A failing seed can be run again and fails in the same way."""
    traces = []
    for _ in range(2):
        with quiet():
            world = World(7)
            try:
                world.run()
            finally:
                world.close()
        traces.append([line_of(entry) for entry in world.clockwork.trace])
    assert traces[0] == traces[1] and len(traces[0]) == 40


@pytest.mark.beside(run_seeds, 0, CHUNK)
def test_the_simulation_makes_the_faults_happen(beside: Beside) -> None:
    """A simulation in which nothing goes wrong proves nothing: torn copies, promotions, salvage, loads and
    refusals all occur within a few seeds."""
    seen = beside.result(run_seeds, 0, CHUNK)
    assert all(seen[what] for what in ("torn", "refused", "loaded", "moved", "restarted")), seen

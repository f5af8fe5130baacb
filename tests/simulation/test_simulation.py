"""Replication under everything that can go wrong at once: 2,000 clusters, each from its seed."""

from __future__ import annotations

import pytest

from simulation.clockwork import line_of
from simulation.world import World, quiet, run_seed

SEEDS = 2_000
CHUNK = 50


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_the_invariants_hold_whatever_fails(first: int) -> None:
    """Daemons and engines die and stop, links break, delay and damage: no replica ever holds a wrong byte or
    too many tokens, no fenced writer is heard, and after healing everything converges and is freed."""
    for seed in range(first, first + CHUNK):
        run_seed(seed)


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


def test_the_simulation_makes_the_faults_happen() -> None:
    """A simulation in which nothing goes wrong proves nothing: torn copies, promotions, salvage, loads and
    refusals all occur within a few seeds."""
    seen = {"torn": 0, "refused": 0, "loaded": 0, "moved": 0, "restarted": 0}
    for seed in range(30):
        world = run_seed(seed)
        for daemon in world.daemons:
            seen["refused"] += daemon.store.refused
            seen["loaded"] += daemon.store.loaded_bytes
            seen["torn"] += sum(s.torn for link in daemon.links for s in link.shipments.values())
            seen["restarted"] += daemon.life - 1
        seen["moved"] += sum(epoch > 1 for _, epoch, _ in world.truth)
    assert all(seen.values()), seen

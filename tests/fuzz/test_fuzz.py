"""A few thousand hostile frames into every target; `make fuzz FRAMES=1000000` feeds many more."""

from __future__ import annotations

import pytest

from fuzz.mutate import Mutator
from fuzz.run import again, run_target
from fuzz.target import Target, Violation, demand
from fuzz.targets import TARGETS

FRAMES = {
    "journal": 8_000,
    "local": 300,
    "control": 3_000,
    "link": 4_000,
    "bulk": 800,
    "daemon-http": 150,
    "transcript": 5_000,
    "router": 60,
}


@pytest.mark.parametrize("name", sorted(TARGETS))
async def test_hostile_input_hurts_nobody_but_who_sent_it(name: str) -> None:
    """No crash, no growth, no byte outside of a block, no descriptor left, whatever arrives at this door."""
    report = await run_target(TARGETS[name][0], FRAMES[name], seed=7)
    assert not report.problems, report.problems[0]
    assert report.frames >= FRAMES[name]


class Careless(Target):
    """Something that breaks on its 30th frame."""

    name = "careless"
    world_frames = 100

    def __init__(self, mutate: Mutator) -> None:
        super().__init__(mutate)
        self.fed: list[bytes] = []

    async def feed(self) -> int:
        self.fed.append(self.mutate.octets(b"a frame that is right"))
        demand(len(self.fed) < 30, "it broke")
        return 1


async def test_a_violation_names_the_line_that_makes_it_again() -> None:
    """Whoever sees a failing frame in CI can run it at home."""
    report = await run_target(Careless, 1_000, seed=5)
    assert report.frames == 29
    assert "it broke" in report.problems[0] and again("careless", 5, 0) in report.problems[0]


async def test_one_seed_is_one_world() -> None:
    """A world that is run again gets the same frames."""
    fed = []
    for _ in range(2):
        target = Careless(Mutator("careless/5/0"))
        with pytest.raises(Violation):
            while True:
                await target.feed()
        fed.append(target.fed)
    assert fed[0] == fed[1] and len(set(fed[0])) > 20

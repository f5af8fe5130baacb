"""Which fault comes next: a seeded, endless list of proposals, and the rule that says which are allowed.

Pure: no clock, no process. The same seed proposes the same faults in the same order; a proposal that would
leave too little to stand on is passed over. Invariant: at any time at least two engines are not touched by
any fault of engines, and no process or wire has two faults at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "engine_kill",
    "engine_stop",
    "engine_term",
    "engine_cut",
    "engine_hole",
    "daemon_kill",
    "daemon_stop",
    "peer_cut",
    "peer_hole",
    "peer_slow",
    "watch_cut",
    "watch_hole",
    "router_stop",
]
"""engine_*, daemon_*, router_*: SIGKILL, SIGSTOP (and SIGCONT), SIGTERM; what has ended is started again.
engine_cut, engine_hole: the wire from the router to an engine. peer_*: between two daemons. watch_*: from the
router to a daemon."""

WEIGHTS: dict[Kind, int] = {
    "engine_kill": 30,
    "engine_stop": 12,
    "engine_term": 6,
    "engine_cut": 16,
    "engine_hole": 6,
    "daemon_kill": 6,
    "daemon_stop": 6,
    "peer_cut": 7,
    "peer_hole": 4,
    "peer_slow": 6,
    "watch_cut": 4,
    "watch_hole": 3,
    "router_stop": 1,
}
HOLD_MS: dict[Kind, tuple[int, int]] = {
    "engine_kill": (0, 300),
    "engine_stop": (100, 1_500),
    "engine_term": (0, 300),
    "engine_cut": (0, 50),
    "engine_hole": (300, 1_500),
    "daemon_kill": (0, 1_000),
    "daemon_stop": (50, 2_000),
    "peer_cut": (0, 500),
    "peer_hole": (200, 2_500),
    "peer_slow": (500, 3_000),
    "watch_cut": (0, 500),
    "watch_hole": (200, 1_500),
    "router_stop": (50, 400),
}
"""How long it lasts, or how long the dead stay dead: below and beyond every time-out of the cluster."""
PAUSE_MS = (0, 500)
"""Between two faults."""
UNTOUCHED_ENGINES = 2
MAX_OTHERS = 3
"""Faults at a time that touch no engine."""


@dataclass(frozen=True)
class Fault:
    """`target`: an engine, a daemon, `router`, or for peer faults two daemons, FROM>TO."""

    kind: Kind
    target: str
    hold_ms: int
    pause_ms: int

    @property
    def of_engine(self) -> bool:
        """Whether an engine cannot serve meanwhile."""
        return self.kind.startswith("engine_")

    @property
    def harms(self) -> str:
        """The process or wire that it is done to."""
        kind = self.kind
        if kind in ("engine_cut", "engine_hole"):
            return f"router>{self.target}"
        if kind.startswith("watch_"):
            return f"router>daemon-{self.target}"
        return f"{kind.partition('_')[0]} {self.target}"


@dataclass(frozen=True)
class Weather:
    """How often each kind of fault comes, how long it lasts, and the pause between two."""

    weights: Mapping[Kind, int]
    hold_ms: Mapping[Kind, tuple[int, int]]
    pause_ms: tuple[int, int]


ROUGH = Weather(WEIGHTS, HOLD_MS, PAUSE_MS)
"""For engines that start in a second."""


def proposals(
    seed: int, engines: Sequence[str], *, wired: Sequence[str], weather: Weather = ROUGH
) -> Iterator[Fault]:
    """Faults for ever. `wired`: engines that the router reaches, and whose daemons it hears, over wires."""
    chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
    kinds = list(weather.weights)
    while True:
        kind = chance.choices(kinds, list(weather.weights.values()))[0]
        target, other = chance.sample(list(engines), 2)
        hold_ms, pause_ms = chance.randint(*weather.hold_ms[kind]), chance.randint(*weather.pause_ms)
        if kind.startswith("peer_"):
            target = f"{target}>{other}"
        elif kind in ("engine_cut", "engine_hole", "watch_cut", "watch_hole"):
            target = chance.choice(list(wired))
        elif kind == "router_stop":
            target = "router"
        yield Fault(kind, target, hold_ms, pause_ms)


def allowed(fault: Fault, active: Iterable[Fault], engines: int, untouched: int = UNTOUCHED_ENGINES) -> bool:
    """Whether `fault` may come on top of those that are `active`."""
    active = list(active)
    if any(fault.harms == other.harms for other in active):
        return False
    if not fault.of_engine:
        return sum(not other.of_engine for other in active) < MAX_OTHERS
    touched = {other.target for other in active if other.of_engine}
    return fault.target not in touched and len(touched) < engines - untouched

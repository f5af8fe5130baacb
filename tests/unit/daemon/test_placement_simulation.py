"""Why placement looks at load and room: the same ten minutes of work under three rules.

Eight daemons on four hosts, two of them with little room; engines that are busy to different degrees. In the
middle one daemon is away for a minute; at the end one engine dies and its sequences go on where their
replicas are. `pytest -s` prints the table of docs/measurements.md.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from segue_daemon.placement import Placement

NAMES = [f"d{n}" for n in range(8)]
HOSTS = {name: f"h{n // 2}" for n, name in enumerate(NAMES)}
ROOM = {name: 4_000 if n in (2, 5) else 16_000 for n, name in enumerate(NAMES)}
BUSY = {name: 1 + n % 4 for n, name in enumerate(NAMES)}
SECONDS, AWAY = 600, range(300, 360)
AWAY_NAME, DEAD = "d4", "d3"


@dataclass(frozen=True)
class Request:
    """A sequence on `engine` from second `begins` to `ends`; a copy takes `megabytes`."""

    seq: str
    engine: str
    begins: int
    ends: int
    megabytes: int


def requests() -> list[Request]:
    """The work: busy engines get more of it."""
    rng = random.Random(11)
    found = []
    for second in range(SECONDS):
        for engine in NAMES:
            if rng.random() < 0.25 * BUSY[engine]:
                ends = second + rng.randint(20, 120)
                found.append(Request(f"{engine}-{len(found)}", engine, second, ends, rng.randint(20, 300)))
    return found


class Rule(Protocol):
    """Where the copy of a request goes, and how a rule hears what happens."""

    def holder(self, request: Request, tried: set[str]) -> str: ...

    def heard(self, second: int, free: dict[str, int], running: dict[str, int], away: set[str]) -> None: ...


class Neighbour:
    """Each engine's sequences go to one daemon on the next host."""

    def holder(self, request: Request, tried: set[str]) -> str:
        return NAMES[(NAMES.index(request.engine) + 2) % len(NAMES)]

    def heard(self, second: int, free: dict[str, int], running: dict[str, int], away: set[str]) -> None:
        """It does not look."""


class PlainHash(Neighbour):
    """A hash of the name spreads sequences evenly, whatever there is to spread them over."""

    def holder(self, request: Request, tried: set[str]) -> str:
        others = [name for name in NAMES if HOSTS[name] != HOSTS[request.engine]]
        return max(others, key=lambda n: hashlib.blake2b(f"{n} {request.seq}".encode()).digest())


class LoadAware:
    """The daemons' own placement, with what they tell each other once a second."""

    def __init__(self) -> None:
        self.of = {
            name: Placement([p for p in NAMES if p != name], host=HOSTS[name], grace_ns=2) for name in NAMES
        }
        self.live: dict[str, dict[str, Request]] = {name: {} for name in NAMES}

    def holder(self, request: Request, tried: set[str]) -> str:
        placement = self.of[request.engine]
        self.live[request.engine][request.seq] = request
        for name in tried & set(placement.holders(request.seq)):
            placement.refused(request.seq, name, request.megabytes)
            placement.review([request.seq], 0)
        return "".join(placement.holders(request.seq))

    def heard(self, second: int, free: dict[str, int], running: dict[str, int], away: set[str]) -> None:
        for owner, placement in self.of.items():
            for name, peer in placement.peers.items():
                if name in away:
                    placement.lost(name, second)
                    continue
                if not peer.connected:
                    placement.up(name, host=HOSTS[name])
                placement.room(name, free[name], budget_bytes=ROOM[name], running=running[name])
            live = self.live[owner]
            for seq in [seq for seq, request in live.items() if request.ends <= second]:
                placement.forget(seq)
                del live[seq]
            placement.review(list(live), second)


@dataclass
class Figures:
    """What the time under a rule was like."""

    worst_fill: float = 0.0
    unprotected_full: int = 0
    unprotected_away: int = 0
    taken_over: dict[str, int] = field(default_factory=dict)
    lost: int = 0

    @property
    def largest_share(self) -> float:
        """Of the dead engine's sequences with a copy, those that one survivor has to take."""
        return max(self.taken_over.values()) / sum(self.taken_over.values())


def run(rule: Rule) -> Figures:
    """Second by second: requests come and go, copies are made where there is room."""
    figures = Figures()
    waiting = requests()
    live: dict[str, Request] = {}
    at: dict[str, str] = {}
    for second in range(SECONDS):
        away = {AWAY_NAME} if second in AWAY else set()
        live = {seq: request for seq, request in live.items() if request.ends > second}
        at = {seq: name for seq, name in at.items() if seq in live and name not in away}
        used = dict.fromkeys(NAMES, 0)
        running = dict.fromkeys(NAMES, 0)
        for seq, request in live.items():
            running[request.engine] += 1
            if seq in at:
                used[at[seq]] += request.megabytes
        rule.heard(second, {name: ROOM[name] - used[name] for name in NAMES}, running, away)
        while waiting and waiting[0].begins <= second:
            request = waiting.pop(0)
            live[request.seq] = request
        for seq, request in live.items():
            tried: set[str] = set()
            while seq not in at:
                name = rule.holder(request, tried)
                if not name or name in tried or name in away:
                    break
                tried.add(name)
                if used[name] + request.megabytes <= ROOM[name]:
                    at[seq] = name
                    used[name] += request.megabytes
            if seq not in at:
                if second in AWAY:
                    figures.unprotected_away += 1
                else:
                    figures.unprotected_full += 1
        figures.worst_fill = max(figures.worst_fill, *(used[name] / ROOM[name] for name in NAMES))
    figures.taken_over = dict.fromkeys(NAMES, 0)
    for seq, request in live.items():
        if request.engine == DEAD:
            if seq in at:
                figures.taken_over[at[seq]] += 1
            else:
                figures.lost += 1
    return figures


@pytest.fixture(scope="module")
def results() -> dict[str, Figures]:
    return {"neighbour": run(Neighbour()), "hash": run(PlainHash()), "load-aware": run(LoadAware())}


def test_load_aware_placement_beats_a_fixed_neighbour(results: dict[str, Figures]) -> None:
    """Fewer unprotected seconds, and a dead engine's work is shared by many instead of doubling one's."""
    print(table(results))
    fixed, aware = results["neighbour"], results["load-aware"]
    assert aware.unprotected_full == 0 and fixed.unprotected_full > 1000
    assert aware.unprotected_away * 10 < fixed.unprotected_away
    assert aware.lost == 0
    assert aware.largest_share < 1 / 3 and fixed.largest_share == 1


def test_it_beats_spreading_without_looking_too(results: dict[str, Figures]) -> None:
    """A plain hash spreads, but fills the small ones and waits for the dead ones."""
    plain, aware = results["hash"], results["load-aware"]
    assert plain.unprotected_full > 0 == aware.unprotected_full
    assert aware.unprotected_away * 5 < plain.unprotected_away


def table(results: dict[str, Figures]) -> str:
    """As in docs/measurements.md."""
    columns = (
        ("WORST FILL", 12),
        ("UNPROTECTED: FULL", 20),
        ("PEER AWAY", 12),
        ("LARGEST SHARE", 16),
        ("LOST", 7),
    )
    head = f"{'RULE':12}" + "".join(f"{name:>{width}}" for name, width in columns)
    lines = [head]
    for name, f in results.items():
        lines.append(
            f"{name:12}{f.worst_fill:>11.0%} {f.unprotected_full:>19} {f.unprotected_away:>11}"
            f"{f.largest_share:>15.0%} {f.lost:>6}"
        )
    return "\n".join(lines)

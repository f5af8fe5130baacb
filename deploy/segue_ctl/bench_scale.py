"""`seguectl bench scale`: what a step costs the daemons when many sequences live and few of them grow.

An engine without a model keeps N sequences and lets some of them grow by a token a step, in turn; two real
daemons replicate them. What a daemon does should follow what changed, not what lives: the cost of a step, of
idling and of a look at `/status` is shown for several N.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import msgspec

from segue_core.errors import ConfigError
from segue_core.geometry import Geometry, Region
from segue_ctl.bench_daemons import BenchDaemon, two_daemons, wait_until
from segue_ctl.bench_engine import BenchEngine, packed
from segue_ctl.output import OK, check_writable, complain, table, write_json

BLOCK_SIZE, LAYERS, SLOT_BYTES = 64, 4, 256
PROMPT_TOKENS = 16
STATUS_ASKS = 50
BEGIN_AT_ONCE = 256
MAX_LIVE = 20_000
MAX_IDLE_S = 3600

_EPILOG = """\
what is measured (CPU time, user and system, all threads):
  step_us, token_us   of the engine's daemon for a step, and for a token that grew and was acked
  peer_token_us       of the peer's daemon for a token
  idle_us_per_s       of the engine's daemon per second in which nothing happens
  status_us           of the engine's daemon for an answer to GET /status
"""


class Row(msgspec.Struct, frozen=True):
    """One number of live sequences; `--help` explains each figure."""

    live: int
    active: int
    step_us: float
    token_us: float
    peer_token_us: float
    idle_us_per_s: float
    status_us: float


class Scale(msgspec.Struct, frozen=True):
    """What `--json` writes. Fields are only ever added."""

    rows: list[Row]
    steps: int


def add_parser(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `scale` to `seguectl bench`."""
    parser = parts.add_parser(
        "scale",
        help="the daemons' cost of a step, by the number of sequences that live",
        description="Measure whether replication costs what changes or what lives; needs no model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--live", type=int, nargs="+", default=[100, 1_000, 10_000], metavar="N")
    parser.add_argument("--active", type=int, default=256, metavar="A", help="a step (default: 256)")
    parser.add_argument("--steps", type=int, default=40, metavar="S", help="default: 40")
    parser.add_argument("--idle-s", type=float, default=2.0, metavar="T", help="idling (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the result there (-: standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if not all(1 <= live <= MAX_LIVE for live in args.live):
        raise ConfigError(f"--live: expected 1 to {MAX_LIVE}")
    if args.active < 1 or args.steps < 1 or not 0 < args.idle_s <= MAX_IDLE_S:
        raise ConfigError(f"--active, --steps: expected at least 1; --idle-s: above 0, up to {MAX_IDLE_S}")
    if args.json:
        check_writable(args.json, "--json")
    rows = []
    for live in args.live:
        rows.append(measured(live, min(args.active, live), args.steps, args.idle_s))
        complain(f"{live} live: {rows[-1].token_us:.0f} us a token")
    result = Scale(rows, args.steps)
    if args.json:
        write_json(result, args.json)
    if args.json != "-":
        print(render(result))
    return OK


def layout(blocks: int) -> Geometry:
    """Small blocks whose slots are known: what is measured is the work around the bytes."""
    strides = (BLOCK_SIZE * SLOT_BYTES, SLOT_BYTES, 2)
    shape = (blocks, BLOCK_SIZE, SLOT_BYTES // 2)
    layer = blocks * strides[0]
    regions = tuple(Region(0, n * layer, shape, strides, 2, ("block", "slot", "dim")) for n in range(LAYERS))
    return Geometry(blocks, BLOCK_SIZE, (LAYERS * layer,), regions).validate()


def measured(live: int, active: int, steps: int, for_s: float) -> Row:
    """One row, with daemons of its own."""
    cores = sorted(os.sched_getaffinity(0))
    cpus = [frozenset({cores[0]}), frozenset({cores[1]})] if len(cores) > 1 else [None, None]
    geometry = layout(live * blocks_each(live, active, steps))
    store = 2 * geometry.num_blocks * geometry.block_bytes + (64 << 20)
    replication = {"replication": {"max_sequences": max(live, 1)}}
    with (
        two_daemons(store_bytes=store, overrides=replication, cpus=cpus) as (a, b),
        BenchEngine(a.socket, "engine", geometry) as engine,
    ):
        herd = Herd(engine, b, live, blocks_each(live, active, steps))
        herd.begin()
        idle_s = _cpu_of(a, lambda: time.sleep(for_s))
        status_s = _cpu_of(a, lambda: [a.status() for _ in range(STATUS_ASKS)])
        herd.step(active)  # warm
        peer = b.cpu_s()
        spent_s = _cpu_of(a, lambda: herd.steps(active, steps))
        return Row(
            live=live,
            active=active,
            step_us=spent_s / steps * 1e6,
            token_us=spent_s / steps / active * 1e6,
            peer_token_us=(b.cpu_s() - peer) / steps / active * 1e6,
            idle_us_per_s=idle_s / for_s * 1e6,
            status_us=status_s / STATUS_ASKS * 1e6,
        )


def blocks_each(live: int, active: int, steps: int) -> int:
    """Blocks that each sequence needs for its prompt and for growing in turn."""
    turns = -(-(steps + 1) * active // live) + 1
    return -(-(PROMPT_TOKENS + turns) // BLOCK_SIZE)


class Herd:
    """Sequences of one engine, of which some grow at each step, in turn. `peer` holds their replicas."""

    def __init__(self, engine: BenchEngine, peer: BenchDaemon, live: int, blocks: int) -> None:
        self._engine = engine
        self._peer = peer
        self._tokens = [PROMPT_TOKENS] * live
        self._blocks = blocks
        self._next = 0

    def begin(self) -> None:
        """Start all of them; returns once the peer holds every prompt."""
        size = self._blocks * BLOCK_SIZE
        for first in range(0, len(self._tokens), BEGIN_AT_ONCE):
            numbers = range(first, min(first + BEGIN_AT_ONCE, len(self._tokens)))
            self._engine.begin(
                begun=[
                    (
                        f"s{n}",
                        packed(range(n * size, (n + 1) * size)),
                        range(n * self._blocks, (n + 1) * self._blocks),
                    )
                    for n in numbers
                ]
            )
            self._engine.commit((f"s{n}", PROMPT_TOKENS) for n in numbers)
            self._held(numbers[-1])
        for number in range(0, len(self._tokens), BEGIN_AT_ONCE):
            self._held(number)

    def steps(self, active: int, count: int) -> None:
        """Several steps."""
        for _ in range(count):
            self.step(active)

    def step(self, active: int) -> None:
        """The next `active` grow by a token; returns once the peer holds it."""
        live = len(self._tokens)
        grown = [(self._next + i) % live for i in range(active)]
        self._next = (self._next + active) % live
        self._engine.begin()
        for number in grown:
            self._tokens[number] += 1
        self._engine.commit((f"s{n}", self._tokens[n]) for n in grown)
        for number in (grown[-1], grown[0]):
            self._held(number)

    def _held(self, number: int) -> None:
        wait_until(lambda: self._peer.held(f"s{number}") == self._tokens[number], self._peer, poll_s=0.01)


def _cpu_of(daemon: BenchDaemon, work: Callable[[], object]) -> float:
    before = daemon.cpu_s()
    work()
    return daemon.cpu_s() - before


def render(result: Scale) -> str:
    """The table."""
    header = ["LIVE", "ACTIVE", "STEP US", "TOKEN US", "PEER TOKEN US", "IDLE US/S", "STATUS US"]
    rows = [
        [
            str(row.live),
            str(row.active),
            f"{row.step_us:.0f}",
            f"{row.token_us:.1f}",
            f"{row.peer_token_us:.1f}",
            f"{row.idle_us_per_s:.0f}",
            f"{row.status_us:.0f}",
        ]
        for row in result.rows
    ]
    return table(rows, header=header, right=range(7))

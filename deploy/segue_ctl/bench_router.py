"""`seguectl bench router`: what the router itself costs, with no model behind it.

Three ways from the same client to the same engine, interleaved over several rounds: `direct`, `passthrough`
(the least that a proxy can do with aiohttp and uvloop) and `segue` (segue-router as it is installed, with its
defaults). The proxies have a core of their own where there are two; engine and client share one event loop in
this process, on the others (see bench_router_load). Each round measures each way twice: in lockstep, for
tokens per CPU-second, and paced, for the delay that a token gets on its way.

Only what happens while tokens flow counts; opening and ending streams is reported apart.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop

from segue_core.errors import ConfigError
from segue_ctl.bench_router_engine import Engine
from segue_ctl.bench_router_load import Run, Shape
from segue_ctl.bench_router_ways import DIRECT, METHODS, PASSTHROUGH, SEGUE, Way, running_ways
from segue_ctl.output import OK, check_writable, complain, table, write_json
from segue_ctl.workload import run_until_terminated

GOAL_TOKENS_PER_CPU_S = 45_000
GOAL_ADDED_ITL_MS_P99 = 1.0
ELSEWHERE = {
    "vllm-router (Rust)": 64_000,
    "aiohttp + uvloop, bytes through": 48_000,
    "aiohttp + uvloop, json.loads of each event": 39_000,
    "LiteLLM": 2_800,
}
"""Tokens per CPU-second of other proxies, one core, events of 250 bytes."""

_EPILOG = """\
what is measured:
  tokens_per_s        in lockstep: a stream's next token is sent when the one before has arrived (--window 1),
                      so a proxy finds one event in a read, as behind an engine, and works all the time
  tokens_per_cpu_s,   the proxy process's CPU time (user and system) meanwhile; none for direct
  cpu_us_per_event
  added_itl_ms_p50,   paced at --rate: time from the engine's send to the client's receive, the proxy's
  added_itl_ms_p99    percentile less the median of direct (for direct itself: its own spread)
  paced_cpu_us_per_event  the proxy's CPU while paced, when it also wakes up for every event
  cpu_ms_per_stream   the proxy's CPU for opening and ending a stream
  ttft_ms_p50         from asking to the first token, streams opened one after the other

goals for segue: 45,000 tokens per CPU-second, and a p99 of added ITL below 1 ms at 5,000 tokens a second
"""


class Cost(msgspec.Struct, frozen=True):
    """Of one way from client to engine; `--help` explains each figure. `delay_ms_*`: nothing taken off."""

    tokens_per_s: float
    added_itl_ms_p50: float
    added_itl_ms_p99: float
    cpu_us_per_event: float
    tokens_per_cpu_s: float | None
    cpu_s: float
    events: int
    paced_cpu_us_per_event: float
    paced_tokens_per_s: float
    paced_events: int
    delay_ms_p50: float
    delay_ms_p99: float
    cpu_ms_per_stream: float
    ttft_ms_p50: float


class RouterCost(msgspec.Struct, frozen=True):
    """What `--json` writes. Fields are only ever added."""

    direct: Cost
    passthrough: Cost
    segue: Cost
    streams: int
    tokens: int
    rate: int
    window: int
    rounds: int
    own_core: bool
    """Whether the proxies had a core that engine and client do not use."""
    goal_tokens_per_cpu_s: int = GOAL_TOKENS_PER_CPU_S
    goal_added_itl_ms_p99: float = GOAL_ADDED_ITL_MS_P99
    measured_elsewhere_tokens_per_cpu_s: dict[str, int] = msgspec.field(default_factory=ELSEWHERE.copy)


class Part(msgspec.Struct, frozen=True):
    """One run of one way. `cpu_s`: while tokens flowed, `edges_cpu_s`: before and after."""

    events: int
    streams: int
    wall_s: float
    cpu_s: float
    edges_cpu_s: float
    delays_ns: Sequence[int]
    ttft_ns: Sequence[int]


def add_parser(parts: Any) -> None:
    """Add `router` to `seguectl bench`."""
    parser = parts.add_parser(
        "router",
        help="the router's own cost: tokens per CPU-second and added latency",
        description="Measure what the router itself costs; needs neither a model nor an engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=50, metavar="S", help="at the same time (default: 50)")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="per stream (default: 400)")
    parser.add_argument(
        "--rate", type=int, default=5000, metavar="R", help="tokens a second when paced (default: 5000)"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=1,
        metavar="W",
        help="tokens of a stream under way at once in lockstep (default: 1)",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", metavar="FILE", help="write the result there (-: standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    check(args)
    result = run_until_terminated(_measure(args), loop_factory=uvloop.new_event_loop)
    if args.json:
        write_json(result, args.json)
    if args.json != "-":
        print(render(result))
    return OK


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for what cannot work out."""
    least = {"streams": 1, "tokens": 3, "rate": 1, "window": 1, "rounds": 1}
    for name, bound in least.items():
        if getattr(args, name) < bound:
            raise ConfigError(f"--{name}: expected at least {bound}")
    if args.json:
        check_writable(args.json, "--json")


async def _measure(args: argparse.Namespace) -> RouterCost:
    usable = sorted(os.sched_getaffinity(0))
    own_core = len(usable) > 1
    lockstep = Shape(args.streams, args.tokens, window=args.window)
    paced = Shape(args.streams, args.tokens, rate=args.rate)
    parts: dict[tuple[str, Shape], list[Part]] = {(m, s): [] for m in METHODS for s in (lockstep, paced)}
    try:
        async with running_ways(frozenset(usable[:1]) if own_core else None) as (engine, ways):
            os.sched_setaffinity(0, usable[1:] if own_core else usable)
            for number in range(args.rounds):
                for method in METHODS if number % 2 == 0 else METHODS[::-1]:
                    for shape in (lockstep, paced):
                        one = Run(shape, ways[method].port, spin=own_core)
                        parts[method, shape].append(await _run(one, engine, ways[method]))
                complain(f"round {number + 1} of {args.rounds}")
    finally:
        os.sched_setaffinity(0, usable)
    direct_delay_ms = _delay_ms(parts[DIRECT, paced], 0.5)
    costs = {m: summarize(parts[m, lockstep], parts[m, paced], direct_delay_ms) for m in METHODS}
    return RouterCost(
        direct=costs[DIRECT],
        passthrough=costs[PASSTHROUGH],
        segue=costs[SEGUE],
        streams=args.streams,
        tokens=args.tokens,
        rate=args.rate,
        window=args.window,
        rounds=args.rounds,
        own_core=own_core,
    )


async def _run(one: Run, engine: Engine, way: Way) -> Part:
    """One run, with the proxy's CPU time before, while and after tokens flow."""
    engine.run = one
    readings = [way.cpu_s()]
    try:
        await one.begin()
        readings.append(way.cpu_s())
        began = time.monotonic()
        await one.flow()
        wall_s = time.monotonic() - began
        readings.append(way.cpu_s())
        await one.end()
        readings.append(way.cpu_s())
    finally:
        engine.run = None
        one.close()
    start, flowing, flown, ended = readings
    return Part(
        events=len(one.delays_ns),
        streams=one.shape.streams,
        wall_s=wall_s,
        cpu_s=flown - flowing,
        edges_cpu_s=(flowing - start) + (ended - flown),
        delays_ns=one.delays_ns,
        ttft_ns=one.ttft_ns,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all `values` do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _delay_ms(parts: Sequence[Part], share: float) -> float:
    return percentile([delay for part in parts for delay in part.delays_ns], share) / 1e6


def summarize(lockstep: Sequence[Part], paced: Sequence[Part], direct_delay_ms: float) -> Cost:
    """All runs of one way. `direct_delay_ms`: median delay of a token that takes no proxy."""
    events, paced_events = (sum(part.events for part in parts) for parts in (lockstep, paced))
    cpu_s, paced_cpu_s = (sum(part.cpu_s for part in parts) for parts in (lockstep, paced))
    both = [*lockstep, *paced]
    return Cost(
        tokens_per_s=events / sum(part.wall_s for part in lockstep),
        added_itl_ms_p50=_delay_ms(paced, 0.5) - direct_delay_ms,
        added_itl_ms_p99=_delay_ms(paced, 0.99) - direct_delay_ms,
        cpu_us_per_event=cpu_s / events * 1e6,
        tokens_per_cpu_s=events / cpu_s if cpu_s else None,
        cpu_s=cpu_s,
        events=events,
        paced_cpu_us_per_event=paced_cpu_s / paced_events * 1e6,
        paced_tokens_per_s=paced_events / sum(part.wall_s for part in paced),
        paced_events=paced_events,
        delay_ms_p50=_delay_ms(paced, 0.5),
        delay_ms_p99=_delay_ms(paced, 0.99),
        cpu_ms_per_stream=sum(part.edges_cpu_s for part in both) / sum(part.streams for part in both) * 1e3,
        ttft_ms_p50=percentile([wait for part in both for wait in part.ttft_ns], 0.5) / 1e6,
    )


def render(result: RouterCost) -> str:
    """The table, the goals and what others need."""
    header = ["", "TOKENS/S", "TOKENS/CPU-S", "US/EVENT", "PACED US/EVENT", "ADDED ITL P50 MS", "P99"]
    header += ["TTFT P50 MS", "CPU MS/STREAM"]
    costs = (result.direct, result.passthrough, result.segue)
    rows = [_row(name, cost) for name, cost in zip(METHODS, costs, strict=True)]
    goals = ["goal", "", f"{result.goal_tokens_per_cpu_s:,}", f"{1e6 / result.goal_tokens_per_cpu_s:.1f}"]
    rows.append([*goals, "", "", f"< {result.goal_added_itl_ms_p99:.3f}", "", ""])
    lines = [table(rows, header=header, right=range(1, len(header)))]
    lines.append(
        f"{result.streams} streams of {result.tokens} tokens, {result.rounds} rounds;"
        f" paced at {result.rate:,} tokens/s; lockstep with {result.window} under way; proxies"
        f" {'on a core of their own' if result.own_core else 'on the same core as engine and client'}"
    )
    others = "; ".join(f"{name} {tokens:,}" for name, tokens in ELSEWHERE.items())
    lines.append(f"measured elsewhere, tokens per CPU-second: {others}")
    return "\n".join(lines)


def _row(name: str, cost: Cost) -> list[str]:
    cells = [name, f"{cost.tokens_per_s:,.0f}"]
    if cost.tokens_per_cpu_s is None:
        cells += ["-", "-", "-"]
    else:
        cells += [f"{cost.tokens_per_cpu_s:,.0f}", f"{cost.cpu_us_per_event:.1f}"]
        cells += [f"{cost.paced_cpu_us_per_event:.1f}"]
    cells += [f"{cost.added_itl_ms_p50:.3f}", f"{cost.added_itl_ms_p99:.3f}", f"{cost.ttft_ms_p50:.2f}"]
    return [*cells, "-" if cost.tokens_per_cpu_s is None else f"{cost.cpu_ms_per_stream:.2f}"]

"""`seguectl bench replicate`: how fast KV gets from an engine's pages into a peer's arena, and at what cost.

The full path (an engine without a model, two real daemons, every byte verified) beside what a program could
do that only moved bytes: a bare socket pair with scatter and gather, ZeroMQ with a frame a unit, memcpy. All
in one run, with sender and receiver on a core each where there are two.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from segue_core.errors import ConfigError
from segue_ctl.bench_daemons import two_daemons
from segue_ctl.bench_engine import Arena, BenchEngine
from segue_ctl.bench_replicate_pairs import Timed, memcpy, pair
from segue_ctl.bench_replicate_segue import FullPath, Moved
from segue_ctl.bench_replicate_shapes import Shape, shapes, smallest
from segue_ctl.output import FAILED, OK, check_writable, complain, table, write_json

MEMCPY, SOCKET, ZMQ, SEGUE, SEGUE_TLS = "memcpy", "socket", "zmq", "segue", "segue-tls"
PAGES_MIB = 128
STORES_PER_PAGES = 8
"""The peer's room: what is over stays there as cache and has to be given up, as in real use."""
GOAL_RATIO = 0.8
MAX_MIB = 1 << 20
MAX_ROUNDS = 100
MAX_SAMPLES = 100_000
MAX_PAGES_MIB = 4096
MAX_DELTA_MIB = 1024

_EPILOG = """\
shapes:
  8b-block     whole blocks of 2 MiB in 64 pieces of 32 KiB, as of an 8B-class model
  small-block  whole blocks of 720 KiB in 30 pieces of 24 KiB: SmolLM2-135M as vLLM lays it out on a CPU
  8b-tail      one token of 128 KiB in 64 pieces of 2 KiB
  small-tail   one token of 22.5 KiB, its keys spread over the block in single items of 2 bytes; the other
               methods move it as if its bytes lay together

methods: memcpy in one thread; a socket pair with sendmsg and recvmsg_into; ZeroMQ with a frame a unit; segue,
and segue-tls with keys of `seguectl keygen` (mutual TLS on bulk, CURVE on control).

what is measured:
  gb_per_s         new KV per second, until the last byte is there
  p50_us, p99_us   one unit at a time: from the send (segue: from when the daemon hears of the commit) to the
                   answer that it is there (segue: verified)
  cpu_s_per_gb     CPU time of both sides
  ratio_to_socket  gb_per_s by that of the socket pair
  wire_per_kv      bytes on the bulk connection per byte of new KV
  verified         the peer's arena was compared with the engine's pages, byte for byte
"""


class Row(msgspec.Struct, frozen=True):
    """One method with one shape; `--help` explains each figure."""

    method: str
    shape: str
    gb_per_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_gb: float
    ratio_to_socket: float = 0.0
    """0: the socket pair was left out."""
    wire_per_kv: float | None = None
    verified: bool | None = None


class Replication(msgspec.Struct, frozen=True):
    """What `--json` writes. Fields are only ever added."""

    rows: list[Row]
    cores: int
    mib: int
    goal_ratio_to_socket: float = GOAL_RATIO


def add_parser(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replicate` to `seguectl bench`."""
    parser = parts.add_parser(
        "replicate",
        help="throughput and latency of replication beside bare transports",
        description="Measure the way from an engine's memory to a peer's; needs no model and no engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [shape.name for shape in shapes(0)]
    parser.add_argument("--mib", type=int, default=512, metavar="N", help="of KV a round (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="the median counts (default: 3)")
    parser.add_argument(
        "--pages-mib", type=int, default=PAGES_MIB, metavar="N", help=f"memory of KV (default: {PAGES_MIB})"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=520,
        metavar="N",
        help="single units for the latency (default: 520; below 512 segue's has some of the bulk in it)",
    )
    parser.add_argument(
        "--delta-mib", type=int, metavar="N", help="replication.delta_bytes of the daemons (default: theirs)"
    )
    parser.add_argument("--shape", nargs="+", default=names, choices=names, metavar="S", help="default: all")
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="leave the others out")
    parser.add_argument("--json", metavar="FILE", help="write the result there (-: standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    methods = (MEMCPY, SOCKET, ZMQ, SEGUE, SEGUE_TLS)
    if args.delta_mib is not None and not 1 <= args.delta_mib <= MAX_DELTA_MIB:
        raise ConfigError(f"--delta-mib: expected 1 to {MAX_DELTA_MIB}")
    limits = {"mib": MAX_MIB, "rounds": MAX_ROUNDS, "pages_mib": MAX_PAGES_MIB, "samples": MAX_SAMPLES}
    for name, most in limits.items():
        if not 1 <= getattr(args, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')}: expected 1 to {most}")
    if unknown := sorted(set(args.only) - set(methods)):
        raise ConfigError(f"--only: {unknown[0]} is none of {', '.join(methods)}")
    if args.json:
        check_writable(args.json, "--json")
    work = Work(args.mib << 20, args.samples, delta_bytes=(args.delta_mib or 0) << 20)
    rows = []
    for shape in shapes(args.pages_mib << 20):
        if shape.name in args.shape:
            rows += compared(shape, args.only or methods, work, args.rounds)
    result = Replication(rows, len(os.sched_getaffinity(0)), args.mib)
    if args.json:
        write_json(result, args.json)
    if args.json != "-":
        print(render(result))
    return FAILED if any(row.verified is False for row in rows) else OK


@dataclass(frozen=True)
class Work:
    """What each row does. `delta_bytes`: of the daemons, 0 for what they do by themselves."""

    total_bytes: int
    samples: int
    delta_bytes: int = 0


def compared(shape: Shape, methods: Sequence[str], work: Work, rounds: int) -> list[Row]:
    """A row for each method: its median round by throughput, the methods in turn in every round."""
    found: dict[str, list[Row]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in found:
            row = measured(method, shape, work)
            complain(f"{method} {shape.name}: {row.gb_per_s:.2f} GB/s")
            found[method].append(row)
    rows = [sorted(each, key=lambda row: row.gb_per_s)[len(each) // 2] for each in found.values()]
    sockets = [row.gb_per_s for row in rows if row.method == SOCKET]
    if not sockets:
        return rows
    return [msgspec.structs.replace(row, ratio_to_socket=row.gb_per_s / sockets[0]) for row in rows]


def measured(method: str, shape: Shape, work: Work) -> Row:
    """One method, once."""
    if method in (SEGUE, SEGUE_TLS):
        moved = full_path(shape, work, tls=method == SEGUE_TLS)
        return Row(
            method,
            shape.name,
            moved.kv_bytes / moved.wall_s / 1e9,
            moved.p50_us,
            moved.p99_us,
            moved.cpu_s / moved.kv_bytes * 1e9,
            wire_per_kv=moved.wire_bytes / moved.wire_kv_bytes,
            verified=moved.verified,
        )
    timed: Timed = (
        memcpy(shape, work.total_bytes)
        if method == MEMCPY
        else pair(method, shape, work.total_bytes, work.samples)
    )
    return Row(method, shape.name, timed.gb_per_s, timed.p50_us, timed.p99_us, timed.cpu_s_per_gb)


def full_path(shape: Shape, work: Work, *, tls: bool) -> Moved:
    """The shape through two daemons, started for it."""
    cores = sorted(os.sched_getaffinity(0))
    cpus = [frozenset({cores[0]}), frozenset({cores[1]})] if len(cores) > 1 else [None, None]
    store_bytes = STORES_PER_PAGES * shape.geometry.handle_bytes[0]
    overrides = {"replication": {"delta_bytes": work.delta_bytes}} if work.delta_bytes else {}
    with (
        two_daemons(store_bytes=store_bytes, overrides=overrides, cpus=cpus, tls=tls) as (a, b),
        BenchEngine(b.socket, "standby", smallest(shape)) as standby,
        BenchEngine(a.socket, "engine", shape.geometry) as engine,
    ):
        arena = Arena(b.socket, "standby", standby.incarnation)
        try:
            return FullPath(shape, engine, a, b, arena).run(work.total_bytes, work.samples)
        finally:
            arena.close()


def render(result: Replication) -> str:
    """The table."""
    rows = [
        [
            row.shape,
            row.method,
            f"{row.gb_per_s:.2f}",
            f"{row.p50_us:.0f}",
            f"{row.p99_us:.0f}",
            f"{row.cpu_s_per_gb:.3f}",
            f"{100 * row.ratio_to_socket:.0f}%" if row.ratio_to_socket else "",
            "" if row.wire_per_kv is None else f"{row.wire_per_kv:.3f}",
            {None: "", True: "yes", False: "NO"}[row.verified],
        ]
        for row in result.rows
    ]
    header = ["SHAPE", "METHOD", "GB/S", "P50 US", "P99 US", "CPU S/GB", "OF SOCKET", "WIRE/KV", "VERIFIED"]
    return table(rows, header=header, right=range(2, 8))

"""`seguectl bench seam`: is the answer the same, wherever its engine fails?

One greedy question, failed at `--runs` different tokens: the first, around block boundaries, inside tail
blocks, the last. Each answer is compared, token by token, with the one that nothing interrupted.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

import msgspec

from segue_core.errors import ConfigError
from segue_ctl import workload
from segue_ctl.cluster import Cluster
from segue_ctl.failure_run import Measured, Question, interrupted, measure, uninterrupted
from segue_ctl.output import FAILED, OK, complain, table, write_json

BLOCK_SIZE = 32
"""Slots of a block, as the launcher starts its engines."""


class SeamRun(msgspec.Struct, frozen=True):
    """One failure. `place`: where in the answer; `signal`: what the engine got."""

    place: str
    signal: str
    kill_after: int
    result: Measured


def add_parser(parts: Any) -> None:
    """Add `seam` to `seguectl bench`."""
    parser = parts.add_parser("seam", help="equal answers wherever the engine fails")
    parser.add_argument("--prompt-tokens", type=int, default=500, metavar="N", help="default: 500")
    parser.add_argument("--runs", type=int, default=20, metavar="R", help="places to fail at (default: 20)")
    parser.add_argument("--stop", action="store_true", help="SIGSTOP (a hang) instead of SIGKILL")
    parser.add_argument("--json", metavar="FILE", help="write all runs there (-: standard output)")
    workload.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; fails unless every answer is whole and equal."""
    workload.check(args, [args.prompt_tokens])
    if not 1 <= args.runs < args.max_tokens:
        raise ConfigError("--runs: expected at least 1 and fewer than --max-tokens")
    runs = workload.run_until_terminated(_measure(args))
    if args.json:
        write_json(runs, args.json)
    if args.json != "-":
        print(render(runs))
    return OK if all(is_good(one.result) for one in runs) else FAILED


def is_good(result: Measured) -> bool:
    """Nothing lost, nothing repeated, nothing different."""
    return not result.lost_tokens and not result.repeated_tokens and result.equal_tokens and result.equal_text


async def _measure(args: argparse.Namespace) -> list[SeamRun]:
    number = signal.SIGSTOP if args.stop else signal.SIGKILL
    runs: list[SeamRun] = []
    specs = workload.engine_pair(args)
    async with Cluster(specs, model_dir=args.model_dir, progress=complain, keep=args.keep) as cluster:
        chat = await workload.fitting_chat(cluster, args.prompt_tokens)
        await workload.warm_up(cluster, chat, "first")
        reference = await uninterrupted(
            cluster, cluster.router_url(), Question(chat, args.max_tokens, "reference")
        )
        for place, after in places(reference.prompt_tokens, args.max_tokens, args.runs):
            question = Question(chat, args.max_tokens, f"seam-{after}")
            failed = await interrupted(
                cluster, cluster.router_url(), question, after_tokens=after, number=number
            )
            result = measure(failed, reference, question)
            runs.append(SeamRun(place, number.name, after, result))
            complain(
                f"after {after} tokens ({place}): {'equal' if is_good(result) else 'NOT EQUAL'},"
                f" {result.recomputed_tokens} recomputed, gap {result.gap_ms:.0f} ms"
            )
            if args.stop:
                cluster.continue_engine(result.engine)
                await cluster.wait_router()
            else:
                await cluster.restart_engine(result.engine)
    return runs


def places(prompt_tokens: int, max_tokens: int, runs: int) -> list[tuple[str, int]]:
    """Where to fail: the edges first, then evenly in between. With k tokens out, the KV of
    prompt + k - 1 is complete."""
    boundary = BLOCK_SIZE - (prompt_tokens - 1) % BLOCK_SIZE
    chosen = {1: "first token", max_tokens - 1: "last token"}
    for shift, name in ((0, "block boundary"), (1, "one past a boundary"), (-1, "one before a boundary")):
        for start in range(boundary, max_tokens, BLOCK_SIZE):
            if 1 <= start + shift < max_tokens:
                chosen.setdefault(start + shift, name)
    names = sorted(chosen.items())[:runs] if len(chosen) > runs else list(chosen.items())
    rest = [k for k in range(2, max_tokens - 1) if k not in chosen]
    missing = runs - len(names)
    step = max(1, len(rest) // missing) if missing else 1
    names += [(k, "inside a block") for k in rest[::step][:missing]]
    return [(name, k) for k, name in sorted(names)]


def render(runs: list[SeamRun]) -> str:
    """A line per failure, and the sum."""
    rows = [
        [
            str(one.kill_after),
            one.place,
            one.result.detected_by,
            str(one.result.watermark_tokens),
            str(one.result.recomputed_tokens),
            f"{one.result.gap_ms:.0f}",
            f"{one.result.lost_tokens} / {one.result.repeated_tokens}",
            "yes" if is_good(one.result) else "NO",
        ]
        for one in runs
    ]
    header = [
        "AFTER",
        "PLACE",
        "DETECTED BY",
        "WATERMARK",
        "RECOMPUTED",
        "GAP MS",
        "LOST / REPEATED",
        "EQUAL",
    ]
    good = sum(is_good(one.result) for one in runs)
    most = max((one.result.recomputed_tokens for one in runs), default=0)
    last = f"{good} of {len(runs)} answers equal; at most {most} tokens recomputed"
    return table(rows, header=header, right=(0, 3, 4, 5)) + "\n" + last

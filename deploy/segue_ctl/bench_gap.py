"""`seguectl bench gap`: the pause that a client sees when its engine is killed, Segue beside replay.

All runs with Segue come first, then the daemons stop and the runs with replay follow, on the same engines.
Each failed engine is started again and warmed up before the next run.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import msgspec

from segue_ctl import workload
from segue_ctl.cluster import ROUTER, Cluster
from segue_ctl.failure_run import Measured, Question, interrupted, measure, uninterrupted
from segue_ctl.openai_stream import Answer
from segue_ctl.output import OK, complain, table, write_json

_REPLAY = "router-replay"


class GapRun(msgspec.Struct, frozen=True):
    """One failure of one kind at one prompt length."""

    kind: str
    asked_prompt_tokens: int
    result: Measured


def add_parser(parts: Any) -> None:
    """Add `gap` to `seguectl bench`."""
    parser = parts.add_parser("gap", help="the client's pause when its engine is killed")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[2000, 4000], metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="R", help="per length and kind (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write all runs there (-: standard output)")
    workload.add_failure_arguments(parser)
    workload.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    workload.check(args, args.prompt_tokens)
    runs = workload.run_until_terminated(_measure(args))
    if args.json:
        write_json(runs, args.json)
    if args.json != "-":
        print(render(runs))
    return OK


async def _measure(args: argparse.Namespace) -> list[GapRun]:
    specs = workload.engine_pair(args)
    runs: list[GapRun] = []
    async with Cluster(specs, model_dir=args.model_dir, progress=complain, keep=args.keep) as cluster:
        chats = {count: await workload.fitting_chat(cluster, count) for count in args.prompt_tokens}
        longest = chats[max(chats)]
        await workload.warm_up(cluster, longest, "first")
        references = {
            count: await uninterrupted(
                cluster, cluster.router_url(), Question(chat, args.max_tokens, f"reference-{count}")
            )
            for count, chat in chats.items()
        }
        for kind, router in (("segue", ROUTER), ("replay", _REPLAY)):
            if kind == "replay":
                for name in cluster.daemons_alive():
                    cluster.stop_daemon(name)
                await cluster.start_router(_REPLAY, replicated=False)
            for count, chat in chats.items():
                for number in range(args.runs):
                    question = Question(chat, args.max_tokens, f"{kind}-{count}-{number}")
                    measured = await _fail(cluster, router, question, references[count], args.kill_after)
                    runs.append(GapRun(kind, count, measured))
                    complain(f"{kind}, {measured.prompt_tokens} tokens: gap {measured.gap_ms:.0f} ms")
                    await cluster.restart_engine(measured.engine)
                    await workload.warm_up(cluster, longest, question.salt)
    return runs


async def _fail(
    cluster: Cluster, router: str, question: Question, reference: Answer, after_tokens: int
) -> Measured:
    failed = await interrupted(cluster, cluster.router_url(router), question, after_tokens=after_tokens)
    return measure(failed, reference, question)


def render(runs: list[GapRun]) -> str:
    """Medians, one line per length and kind."""
    groups: dict[tuple[int, str], list[Measured]] = {}
    for one in runs:
        groups.setdefault((one.asked_prompt_tokens, one.kind), []).append(one.result)
    rows = [
        [
            str(count),
            kind,
            str(len(results)),
            *(_median(results, name) for name in ("gap_ms", "detect_ms", "decide_ms", "first_token_ms")),
            f"{max(result.gap_ms for result in results):.0f}",
            _median(results, "recomputed_tokens"),
            f"{sum(result.equal_tokens for result in results)}/{len(results)}",
        ]
        for (count, kind), results in sorted(
            groups.items(), key=lambda item: (item[0][0], item[0][1] != "segue")
        )
    ]
    header = [
        "PROMPT",
        "KIND",
        "RUNS",
        "GAP MS",
        "DETECT",
        "DECIDE",
        "FIRST TOKEN",
        "WORST",
        "RECOMPUTED",
        "EQUAL",
    ]
    return table(rows, header=header, right=(0, 2, 3, 4, 5, 6, 7, 8, 9))


def _median(results: list[Measured], name: str) -> str:
    return f"{statistics.median(getattr(result, name) for result in results):.0f}"

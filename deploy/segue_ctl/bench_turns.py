"""`seguectl bench turns`: the time to the first token of a conversation's second turn, by where it goes.

To the same engine (its own prefix cache has the first turn), to another one after the first was killed, with
Segue (the daemon there has it) and without (the whole conversation is computed again). All runs with Segue
come first, then the daemons stop and the runs without follow, on the same engines.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from segue_ctl import workload
from segue_ctl.cluster import ROUTER, Cluster
from segue_ctl.failure_run import Question
from segue_ctl.output import OK, complain, table, write_json
from segue_ctl.turn_run import Said, Turn, lose_engine, next_question, take_turn

_REPLAY = "router-replay"
Way = Literal["same engine", "segue", "replay"]
WAYS: tuple[Way, ...] = ("same engine", "segue", "replay")


class TurnRun(msgspec.Struct, frozen=True):
    """One second turn. `new_tokens`: of its prompt, those that were not in the first turn. `equal_tokens`:
    whether the answer is that of the same engine, which never failed; null without one to compare with."""

    way: Way
    asked_prompt_tokens: int
    new_tokens: int
    equal_tokens: bool | None
    second: Turn


def add_parser(parts: Any) -> None:
    """Add `turns` to `seguectl bench`."""
    parser = parts.add_parser("turns", help="the next turn of a conversation whose engine was killed")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1000, 4000], metavar="N")
    parser.add_argument("--runs", type=int, default=3, metavar="R", help="per length and way (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write all runs there (-: standard output)")
    workload.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    workload.check(args, [count + args.max_tokens + 100 for count in args.prompt_tokens])
    runs = workload.run_until_terminated(_measure(args))
    if args.json:
        write_json(runs, args.json)
    if args.json != "-":
        print(render(runs))
    return OK


async def _measure(args: argparse.Namespace) -> list[TurnRun]:
    runs: list[TurnRun] = []
    specs = workload.engine_pair(args)
    async with Cluster(specs, model_dir=args.model_dir, progress=complain, keep=args.keep) as cluster:
        chats = {count: await workload.fitting_chat(cluster, count) for count in args.prompt_tokens}
        longest = chats[max(chats)]
        await workload.warm_up(cluster, longest, "first")
        references: dict[int, Said] = {}
        for way in WAYS:
            router = ROUTER
            if way == "replay":
                for name in cluster.daemons_alive():
                    cluster.stop_daemon(name)
                await cluster.start_router(_REPLAY, replicated=False)
                router = _REPLAY
            for count, chat in chats.items():
                for number in range(args.runs):
                    question = Question(chat, args.max_tokens, f"{way}-{count}-{number}")
                    first, second = await _talk(cluster, cluster.router_url(router), question, way)
                    reference = references.setdefault(count, second) if way == WAYS[0] else references[count]
                    runs.append(_run(way, count, first, second, reference))
                    complain(f"{way}, {second.turn.prompt_tokens} tokens: {second.turn.ttft_ms:.0f} ms")
                    if way != WAYS[0]:
                        await cluster.restart_engine(first.turn.engine)
                        await workload.warm_up(cluster, longest, question.salt)
    return runs


async def _talk(cluster: Cluster, router_url: str, question: Question, way: Way) -> tuple[Said, Said]:
    """Two turns; between them the engine of the first one dies, unless the second is to go there too."""
    first = await take_turn(cluster, router_url, question)
    if way != WAYS[0]:
        await lose_engine(cluster, router_url, first.turn.engine)
    return first, await take_turn(cluster, router_url, next_question(first))


def _run(way: Way, count: int, first: Said, second: Said, reference: Said) -> TurnRun:
    equal = None
    if second is not reference and second.question.messages == reference.question.messages:
        equal = reference.answer.token_ids == second.answer.token_ids
    return TurnRun(way, count, second.turn.prompt_tokens - first.tokens, equal, second.turn)


def render(runs: Sequence[TurnRun]) -> str:
    """Medians, a line for each length and way."""
    rows = []
    for count in sorted({each.asked_prompt_tokens for each in runs}):
        for way in WAYS:
            found = [each for each in runs if (each.asked_prompt_tokens, each.way) == (count, way)]
            if not found:
                continue
            turns = [each.second for each in found]
            compared = [each.equal_tokens for each in found if each.equal_tokens is not None]
            rows.append(
                [
                    str(count),
                    way,
                    str(len(found)),
                    _median([turn.ttft_ms for turn in turns]),
                    f"{max(turn.ttft_ms for turn in turns):.0f}",
                    _median([turn.prompt_tokens for turn in turns]),
                    _median([each.new_tokens for each in found]),
                    _median([turn.computed_tokens for turn in turns]),
                    f"{sum(compared)}/{len(compared)}",
                ]
            )
    header = ["PROMPT", "WAY", "RUNS", "TTFT MS", "WORST", "TURN 2", "NEW", "COMPUTED", "EQUAL"]
    return table(rows, header=header, right=(0, 2, 3, 4, 5, 6, 7, 8))


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f}"

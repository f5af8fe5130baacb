"""`seguectl bench overhead`: what Segue costs while nothing fails.

Two engines of the same kind on one core: `plain`, asked directly and without a connector, and `guarded`, with
connector, daemon and a second daemon that takes its replicas. The guarded one is asked directly, without
anything to protect, and through the router. Two processes of one engine differ by a few per cent among
themselves; what protection and router cost shows in the same process. Everything but the engines runs on
another core. Requests alternate, one at a time, so drift hits both alike, and each
waits until both engines are idle: one that was just busy spins for a while, on the core that both share.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from segue_core.errors import ConfigError
from segue_ctl import workload
from segue_ctl.cluster import Cluster
from segue_ctl.failure_run import Question, uninterrupted
from segue_ctl.openai_stream import Answer
from segue_ctl.output import OK, complain, table, write_json
from segue_ctl.vllm_server import EngineSpec

_PLAIN, _UNPROTECTED, _GUARDED, _SINK = "plain", "unprotected", "guarded", "standby"
_SIDES = (_PLAIN, _UNPROTECTED, _GUARDED)


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds over all requests of one side."""

    requests: int
    ttft_median_ms: float
    ttft_p99_ms: float
    itl_median_ms: float
    itl_p99_ms: float


class Overhead(msgspec.Struct, frozen=True):
    """What `--json` writes. Paired differences are medians over neighbouring requests: `paired` guarded less
    plain (two processes), `protection` guarded less unprotected (one process; replication and router)."""

    plain: Latency
    unprotected: Latency
    guarded: Latency
    paired_ttft_ms: float
    paired_itl_ms: float
    protection_ttft_ms: float
    protection_itl_ms: float
    equal_answers: bool


def add_parser(parts: Any) -> None:
    """Add `overhead` to `seguectl bench`."""
    parser = parts.add_parser("overhead", help="latency with and without Segue while nothing fails")
    parser.add_argument("--requests", type=int, default=10, metavar="R", help="per side (default: 10)")
    parser.add_argument("--prompt-tokens", type=int, default=500, metavar="N", help="default: 500")
    parser.add_argument("--json", metavar="FILE", help="write the result there (-: standard output)")
    workload.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    workload.check(args, [args.prompt_tokens])
    if args.requests < 2:
        raise ConfigError("--requests: expected at least 2")
    result = workload.run_until_terminated(_measure(args))
    if args.json:
        write_json(result, args.json)
    if args.json != "-":
        print(render(result))
    return OK


async def _measure(args: argparse.Namespace) -> Overhead:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise ConfigError("bench overhead needs two cores: one for the engines, one for everything else")
    engine_cpus, side_cpus = frozenset(usable[:1]), frozenset(usable[1:])
    specs = [
        EngineSpec(_PLAIN, engine_cpus, protected=False, extra_args=tuple(args.engine_arg)),
        EngineSpec(_GUARDED, engine_cpus, extra_args=tuple(args.engine_arg)),
    ]
    cluster = Cluster(
        specs,
        model_dir=args.model_dir,
        progress=complain,
        keep=args.keep,
        sinks=(_SINK,),
        routed=(_GUARDED,),
        side_cpus=side_cpus,
    )
    answers: dict[str, list[Answer]] = {side: [] for side in _SIDES}
    async with cluster:
        os.sched_setaffinity(0, side_cpus)
        try:
            chat = await workload.fitting_chat(cluster, args.prompt_tokens)
            await workload.warm_up(cluster, chat, "first")
            urls = {
                _PLAIN: cluster.engine_url(_PLAIN),
                _UNPROTECTED: cluster.engine_url(_GUARDED),
                _GUARDED: cluster.router_url(),
            }
            for number in range(args.requests):
                order = _SIDES if number % 2 == 0 else _SIDES[::-1]
                for side in order:
                    await cluster.wait_idle()
                    question = Question(chat, args.max_tokens, f"{side}-{number}")
                    answers[side].append(await uninterrupted(cluster, urls[side], question))
                complain(f"round {number + 1} of {args.requests}")
        finally:
            os.sched_setaffinity(0, usable)
    return summarize(*(answers[side] for side in _SIDES))


def summarize(plain: list[Answer], unprotected: list[Answer], guarded: list[Answer]) -> Overhead:
    """The three sides and their paired differences."""
    return Overhead(
        plain=_latency(plain),
        unprotected=_latency(unprotected),
        guarded=_latency(guarded),
        paired_ttft_ms=_paired(plain, guarded, lambda answer: answer.ttft_ms),
        paired_itl_ms=_paired(plain, guarded, _median_itl),
        protection_ttft_ms=_paired(unprotected, guarded, lambda answer: answer.ttft_ms),
        protection_itl_ms=_paired(unprotected, guarded, _median_itl),
        equal_answers=all(
            a.token_ids == b.token_ids == c.token_ids
            for a, b, c in zip(plain, unprotected, guarded, strict=True)
        ),
    )


def _paired(one: list[Answer], other: list[Answer], figure: Callable[[Answer], float]) -> float:
    return statistics.median(figure(b) - figure(a) for a, b in zip(one, other, strict=True))


def _median_itl(answer: Answer) -> float:
    return statistics.median(answer.itl_ms)


def _latency(answers: list[Answer]) -> Latency:
    ttft = [answer.ttft_ms for answer in answers]
    itl = [wait for answer in answers for wait in answer.itl_ms]
    return Latency(
        requests=len(answers),
        ttft_median_ms=statistics.median(ttft),
        ttft_p99_ms=_p99(ttft),
        itl_median_ms=statistics.median(itl),
        itl_p99_ms=_p99(itl),
    )


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def render(result: Overhead) -> str:
    """The table."""
    names = ("ttft_median_ms", "ttft_p99_ms", "itl_median_ms", "itl_p99_ms")
    sides = (
        ("without Segue", result.plain),
        ("with it, unprotected", result.unprotected),
        ("protected, by the router", result.guarded),
    )
    rows = [
        [side, str(latency.requests), *(f"{getattr(latency, name):.2f}" for name in names)]
        for side, latency in sides
    ]
    rows += [
        [what, "", f"{ttft:+.2f}", "", f"{itl:+.3f}", ""]
        for what, ttft, itl in (
            ("paired, to without", result.paired_ttft_ms, result.paired_itl_ms),
            ("paired, to unprotected", result.protection_ttft_ms, result.protection_itl_ms),
        )
    ]
    header = ["", "REQUESTS", "TTFT MEDIAN MS", "TTFT P99", "ITL MEDIAN MS", "ITL P99"]
    equal = "all answers equal" if result.equal_answers else "answers differ between the sides"
    return table(rows, header=header, right=(1, 2, 3, 4, 5)) + "\n" + equal

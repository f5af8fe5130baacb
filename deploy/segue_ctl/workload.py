"""What the demo and the benchmarks ask of their engines: shared arguments, the pair of engines, warm-up."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from segue_core.errors import ConfigError
from segue_ctl import article
from segue_ctl.cluster import Cluster
from segue_ctl.failure_run import Question, count_tokens, uninterrupted
from segue_ctl.model import DEFAULT_MODEL_DIR, is_model
from segue_ctl.output import check_writable
from segue_ctl.vllm_server import MAX_MODEL_LEN, EngineSpec, count_gpus, one_core_each

ENGINES = ("a", "b")
_WARM_UP_TOKENS = 4
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that every workload has."""
    parser.add_argument("--max-tokens", type=int, default=80, metavar="N", help="of the answer (default: 80)")
    parser.add_argument("--model-dir", type=Path, default=DEFAULT_MODEL_DIR, metavar="DIR")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for vLLM; repeatable",
    )
    parser.add_argument("--keep", action="store_true", help="keep configurations and logs afterwards")


def add_failure_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of workloads in which an engine fails."""
    parser.add_argument("--kill-after", type=int, default=30, metavar="K", help="tokens (default: 30)")


def check(args: argparse.Namespace, prompt_tokens: Sequence[int]) -> None:
    """Raise ConfigError for what cannot work out, before anything is started."""
    if not is_model(args.model_dir):
        raise ConfigError(f"--model-dir: no model in {args.model_dir}", hint="make setup")
    if getattr(args, "json", None):
        check_writable(args.json, "--json")
    if args.max_tokens < 2:
        raise ConfigError("--max-tokens: expected at least 2")
    if not 1 <= getattr(args, "kill_after", 1) < args.max_tokens:
        raise ConfigError("--kill-after: expected a number from 1 to below --max-tokens")
    most = MAX_MODEL_LEN - args.max_tokens - 1
    for count in prompt_tokens:
        if not article.MIN_PROMPT_TOKENS <= count <= most:
            raise ConfigError(
                f"--prompt-tokens: expected {article.MIN_PROMPT_TOKENS} to {most}, found {count}"
            )


def engine_pair(args: argparse.Namespace) -> list[EngineSpec]:
    """Two engines, on a core each or on GPUs."""
    cores = [None] * len(ENGINES) if count_gpus() else one_core_each(len(ENGINES))
    return [
        EngineSpec(name, cpus, extra_args=tuple(args.engine_arg))
        for name, cpus in zip(ENGINES, cores, strict=True)
    ]


async def fitting_chat(cluster: Cluster, prompt_tokens: int) -> list[dict[str, str]]:
    """A chat of as near to `prompt_tokens` tokens as whole entries allow."""
    engine = next(iter(cluster.specs))
    return await article.fit(prompt_tokens, lambda chat: count_tokens(cluster, engine, chat))


async def warm_up(cluster: Cluster, messages: Sequence[dict[str, str]], salt: str) -> None:
    """First requests of an engine's life are slower; they must not count for either side."""
    for engine in cluster.specs:
        question = Question(messages, _WARM_UP_TOKENS, f"warm-up-{salt}-{engine}")
        await uninterrupted(cluster, cluster.engine_url(engine), question)


def run_until_terminated(
    work: Coroutine[Any, Any, T], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """Run `work`; Ctrl-C and SIGTERM cancel it, and everything that it started goes."""

    async def guarded() -> T:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None

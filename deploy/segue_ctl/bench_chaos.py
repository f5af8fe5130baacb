"""`seguectl bench chaos`: a cluster in a storm of failures, and whether anybody noticed.

Real daemons and a real router; toy engines (`python -m segue_shim.toy`), whose next token depends on every
byte of KV they hold. Clients stream without a pause while engines and daemons are killed, stopped and
started again and connections cut, until so many answers have moved. Then the storm ends, and nothing may be
left of it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from segue_core.errors import ConfigError
from segue_ctl.chaos import real
from segue_ctl.chaos.figures import Figures, render
from segue_ctl.chaos.plan import ROUGH, WEIGHTS
from segue_ctl.chaos.stage import MODEL, Stage, toy_command
from segue_ctl.chaos.storm import Storm, toy_asks
from segue_ctl.model import DEFAULT_MODEL_DIR, is_model
from segue_ctl.output import FAILED, OK, check_writable, complain, write_json
from segue_ctl.vllm_server import EngineSpec, count_gpus, one_core_each
from segue_ctl.workload import run_until_terminated

_EPILOG = """\
figures (--json):
  failovers          moves of answers from one engine to another
  lost_tokens,       of all answers, against what they had to be: 0
  repeated_tokens
  unequal_streams    whose tokens, text, finish or usage differ from that: 0
  failed_streams     that ended in an error: 0
  gap_ms_*           at the client: last token before a move to the first after it
  leaked_replicas    replicas and leases that daemons still hold after all streams are over: 0
  leaked_fds         descriptors that a process has more of, by kind, than before the storm: 0
                     (sockets are counted from 200 failovers on)

exit status: 0 if what must be 0 is 0, else 1
"""


def add_parser(parts: Any) -> None:
    """Add `chaos` to `seguectl bench`."""
    parser = parts.add_parser(
        "chaos",
        help="a storm of failures: is anything lost, repeated, different or left over",
        description="Break everything that may break, for minutes, under load; needs no model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--failovers", type=int, default=1000, metavar="N", help="default: 1000")
    parser.add_argument("--minutes", type=float, default=20, metavar="M", help="at most (default: 20)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of load and faults (default: 1)")
    parser.add_argument("--engines", type=int, default=4, metavar="E", help="default: 4")
    parser.add_argument("--streams", type=int, default=24, metavar="S", help="at once (default: 24)")
    parser.add_argument("--step-ms", type=float, default=20, metavar="MS", help="of an engine (default: 20)")
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="two real engines and one stream at a time; some tens of failovers are many then",
    )
    parser.add_argument("--model-dir", type=Path, default=DEFAULT_MODEL_DIR, metavar="DIR", help="for --vllm")
    parser.add_argument("--opaque", action="store_true", help="engines that spread a token over its block")
    parser.add_argument(
        "--without",
        action="append",
        choices=sorted(WEIGHTS),
        default=[],
        metavar="KIND",
        help="leave a kind of fault out; repeatable: " + ", ".join(sorted(WEIGHTS)),
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there (-: standard output)")
    parser.add_argument("--keep", action="store_true", help="keep configurations and logs afterwards")
    parser.add_argument("--quiet", action="store_true", help="no line for each fault")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, *, program: tuple[str, ...] = ("-m", "segue_shim.toy")) -> int:
    """Storm, then print. `program`: the toy engine that Python runs."""
    _check(args)
    figures = run_until_terminated(_storm(args, program), loop_factory=uvloop.new_event_loop)
    if args.json:
        write_json(figures, args.json)
    if args.json != "-":
        print(render(figures))
    return OK if figures.clean else FAILED


def _check(args: argparse.Namespace) -> None:
    for name, least in (("failovers", 1), ("engines", 2), ("streams", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name}: expected at least {least}")
    if args.engines > 16:
        raise ConfigError("--engines: expected at most 16")
    if args.minutes <= 0 or args.step_ms < 0:
        raise ConfigError("--minutes and --step-ms: expected a time")
    if args.vllm and not is_model(args.model_dir):
        raise ConfigError(f"--model-dir: no model in {args.model_dir}", hint="make setup")
    if args.json:
        check_writable(args.json, "--json")


async def _storm(args: argparse.Namespace, program: tuple[str, ...]) -> Figures:
    weather = real.WEATHER if args.vllm else ROUGH
    weights = {kind: weight for kind, weight in weather.weights.items() if kind not in args.without}
    if not weights:
        raise ConfigError("--without: no kind of fault is left")
    stage = _real_stage(args) if args.vllm else _toy_stage(args, program)
    prepared = real.Prepared(stage.cluster)
    storm = Storm(
        stage,
        prepared.asks() if args.vllm else toy_asks(args.seed),
        seed=args.seed,
        streams=real.STREAMS if args.vllm else args.streams,
        weather=replace(weather, weights=weights),
        uncounted="engine" if args.vllm else "-",
        say=complain,
        say_fault=(lambda _: None) if args.quiet else complain,
    )
    began = time.monotonic()
    try:
        await stage.connect()
        async with stage.cluster:
            if args.vllm:
                await prepared.ask()
            await storm.run(failovers=args.failovers, deadline=began + args.minutes * 60)
    finally:
        await asyncio.shield(stage.close())
    figures = storm.figures()
    if args.keep:
        complain(f"logs are in {stage.cluster.folder}")
    elif stage.cluster.folder.exists():
        figures = msgspec.structs.replace(figures, left_behind=(*figures.left_behind, "the run folder"))
    return figures


def _toy_stage(args: argparse.Namespace, program: tuple[str, ...]) -> Stage:
    specs = [EngineSpec(chr(ord("a") + number)) for number in range(args.engines)]
    command = toy_command(step_ms=args.step_ms, opaque=args.opaque, program=program)
    return Stage(specs, model_dir=MODEL, engine_command=command, say=complain, keep=args.keep)


def _real_stage(args: argparse.Namespace) -> Stage:
    cores = [None, None] if count_gpus() else one_core_each(2)
    specs = [
        EngineSpec(name, cpus, extra_args=real.ENGINE_ARGS) for name, cpus in zip("ab", cores, strict=True)
    ]
    return Stage(
        specs, model_dir=args.model_dir, router=real.ROUTER, daemon=real.DAEMON, say=complain, keep=args.keep
    )

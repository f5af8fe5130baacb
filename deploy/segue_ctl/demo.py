"""`seguectl demo`: kill an engine in the middle of an answer and watch the answer go on.

Three answers to one question: uninterrupted, with the engine killed under Segue, and with the engine
killed under replay (no daemons; the standby computes everything again). Every answer has a cache salt of
its own, so that none finds the KV of another. Owns the order of events; measuring is in `failure_run`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from segue_ctl import workload
from segue_ctl.cluster import Cluster
from segue_ctl.failure_run import (
    FailureRun,
    Question,
    interrupted,
    measure,
    uninterrupted,
)
from segue_ctl.openai_stream import Answer, Piece
from segue_ctl.output import FAILED, OK, Style, write_json
from segue_ctl.report import DemoResult, passed, render, verdict

REPLAY = "router-replay"

_EPILOG = """\
examples:
  seguectl demo
  seguectl demo --prompt-tokens 4000 --json result.json
  seguectl demo --engine-arg=--max-num-seqs=8

Starts two vLLM servers on one core each (or on NVIDIA GPUs), a daemon beside each and a router, asks for
a long answer and sends SIGKILL to the engine that is answering. Then the same with replication off.

--json writes {"segue": {...}, "replay": {...}, ...}: detected_by, detect_ms, prompt_tokens,
delivered_tokens, watermark_tokens, recomputed_tokens, loaded_bytes, gap_ms, lost_tokens,
repeated_tokens, equal_tokens, equal_text and further fields.

exit status: 0 if nothing was lost or repeated and the text is that of an uninterrupted answer, else 1
"""


def add_parser(verbs: Any) -> None:
    """Add `demo` to the command line."""
    parser = verbs.add_parser(
        "demo",
        help="kill an engine in the middle of an answer and watch it go on",
        description="Kill an engine in the middle of an answer and watch it go on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there (-: standard output)")
    parser.add_argument("--prompt-tokens", type=int, default=2000, metavar="N", help="default: 2000")
    workload.add_failure_arguments(parser)
    workload.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    workload.check(args, [args.prompt_tokens])
    stream = sys.stderr if args.json == "-" else sys.stdout
    result = workload.run_until_terminated(Demo(args, stream).play())
    if args.json:
        write_json(result, args.json)
    return OK if result.ok else FAILED


class Demo:
    """One performance, told to `stream`."""

    def __init__(self, args: argparse.Namespace, stream: Any) -> None:
        self._args = args
        self._stream = stream
        self._style = Style(stream)
        self._began = time.monotonic()

    async def play(self) -> DemoResult:
        """All of it. Raises SegueError if something does not start or an answer breaks."""
        args = self._args
        specs = workload.engine_pair(args)
        async with Cluster(specs, model_dir=args.model_dir, progress=self._note, keep=args.keep) as cluster:
            self._note(f"router {cluster.router_url()}, configuration {cluster.router_file()}")
            messages = await workload.fitting_chat(cluster, args.prompt_tokens)
            self._note("warming up")
            await workload.warm_up(cluster, messages, "first")
            reference = await self._reference(cluster, Question(messages, args.max_tokens, "reference"))
            segue = await self._segue(cluster, Question(messages, args.max_tokens, "segue"))
            self._note(f"starting engine {segue.engine} again")
            await cluster.restart_engine(segue.engine)
            replay_router = await self._without_replication(cluster, messages)
            replay = await self._replay(cluster, replay_router, Question(messages, args.max_tokens, "replay"))
        question = Question(messages, args.max_tokens, "")
        ours = measure(segue, reference, question)
        theirs = measure(replay, reference, question)
        result = DemoResult(ours, theirs, cluster.model, args.max_tokens, passed(ours, theirs))
        self._say("\n" + render(result, self._style))
        self._say("\n" + verdict(result, self._style))
        if args.keep:
            self._note(f"configurations and logs are in {cluster.folder}")
        return result

    async def _reference(self, cluster: Cluster, question: Question) -> Answer:
        self._note("asking without a failure, to know the answer")
        answer = await uninterrupted(cluster, cluster.router_url(), question)
        self._note(
            f"{answer.prompt_tokens:,} prompt tokens, {len(answer.token_ids)} answered, "
            f"first token after {answer.ttft_ms / 1e3:.1f} s"
        )
        return answer

    async def _segue(self, cluster: Cluster, question: Question) -> FailureRun:
        self._note(f"asking again; the engine will be killed after {self._args.kill_after} tokens")
        self._say("")
        return await self._perform(cluster, cluster.router_url(), question)

    async def _without_replication(self, cluster: Cluster, messages: list[dict[str, str]]) -> str:
        """Stop the daemons and start a router that knows of none; warm the new engine up."""
        for name in cluster.daemons_alive():
            cluster.stop_daemon(name)
        url = await cluster.start_router(REPLAY, replicated=False)
        await workload.warm_up(cluster, messages, "replay")
        return url

    async def _replay(self, cluster: Cluster, url: str, question: Question) -> FailureRun:
        self._note("the same with replication off: the router resumes, the standby computes all of it again")
        self._say("")
        return await self._perform(cluster, url, question)

    async def _perform(self, cluster: Cluster, url: str, question: Question) -> FailureRun:
        run = await interrupted(
            cluster,
            url,
            question,
            after_tokens=self._args.kill_after,
            on_piece=self._print_piece,
            on_failure=self._print_failure,
        )
        self._say("\n")
        return run

    def _print_piece(self, piece: Piece) -> None:
        print(piece.text, end="", file=self._stream, flush=True)

    def _print_failure(self, engine: str, tokens: int) -> None:
        mark = f"[kill -9 engine {engine} after {tokens} tokens]"
        print(self._style.bad(f" <<< {mark} >>> "), end="", file=self._stream, flush=True)

    def _note(self, text: str) -> None:
        self._say(self._style.dim(f"[{time.monotonic() - self._began:5.1f} s] {text}"))

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

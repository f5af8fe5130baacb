"""Fuzzes the scheduler's half of the shim inside vLLM's real scheduler and prefix cache, without a model.

    PYTHONPATH=tests .venv/bin/python tests/vllm/schedule_fuzz.py --mode ahead-gpu --seeds 200 [--first 0]

Requests come, end, are aborted, preempted, resumed and taken over at random, in a cache too small for them; a
seed is all there is. Real are vLLM's scheduler and its connector, and Segue's parts down to the ledger (see
schedule_journal.py); the worker (schedule_worker.py) is not. Invariants that it checks: see there; every
answer is the model's; when all have ended no block, lease or sequence is left.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from schedule_bugs import SEEDS_NEEDED
from schedule_content import BLOCK_SIZE, VOCABULARY, Replicas, answer
from schedule_journal import Journal
from schedule_worker import Worker
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from segue_core.clock import ManualClock
from segue_shim import vllm_compat
from segue_shim.options import ExporterOptions
from segue_shim.vllm_scheduler import SchedulerHalf, Scheduling
from support.tiny_model import tiny_model
from vllm import SamplingParams

ROOT = Path(__file__).parent.parent.parent
BLOCKS = 21
MAX_MODEL_TOKENS = 192
MAX_REQUESTS = 10
DRAFTS = 3
STEPS = 500
LAST_STEPS = 200
"""Steps at the end of a run in which nobody new arrives: all must end."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How the engine runs. `gpu`: its kernels end after its records are written."""

    ahead: bool = False
    drafts: bool = False
    gpu: bool = False


MODES = {
    "sync": Mode(),
    "sync-spec": Mode(drafts=True),
    "ahead": Mode(ahead=True),
    "ahead-gpu": Mode(ahead=True, gpu=True),
    "ahead-spec-gpu": Mode(ahead=True, drafts=True, gpu=True),
}


class Setting:
    """What all runs of a mode share: they are expensive to make, and nothing is kept in them."""

    def __init__(self, mode: Mode, model: str) -> None:
        self.mode = mode
        self.config: Any = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_TOKENS,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            enable_prefix_caching=True,
            num_gpu_blocks_override=BLOCKS,
            kv_transfer_config=KVTransferConfig(
                kv_connector="SegueConnector",
                kv_connector_module_path="segue_shim.vllm_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"socket": f"{tempfile.gettempdir()}/nobody.sock", "engine": "a"},
            ),
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": DRAFTS,
                "prompt_lookup_max": 3,
            }
            if mode.drafts
            else None,
        ).create_engine_config()
        self.config.scheduler_config.async_scheduling = mode.ahead  # which vLLM switches off on a CPU
        self.config.cache_config.num_gpu_blocks = BLOCKS
        heads = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.cache = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], heads)]
        )
        self.structured = StructuredOutputManager(self.config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


class Run:
    """One engine and its clients, from the first request to the last."""

    def __init__(self, setting: Setting, seed: int, half: type[SchedulerHalf] = SchedulerHalf) -> None:
        self._setting = setting
        self._mode = mode = setting.mode
        self._dice = random.Random(seed)
        self._clock = ManualClock(1)
        self.counts: Counter[str] = Counter()
        kind = AsyncScheduler if mode.ahead else Scheduler
        self._scheduler: Any = kind(
            setting.config, setting.cache, setting.structured, BLOCK_SIZE, log_stats=True
        )
        self._replicas = Replicas(self._dice, self._clock)
        self._journal = Journal(BLOCKS, mode.gpu, self._dice, self.counts)
        self._worker = Worker(self._journal, self._replicas, mode.ahead, mode.gpu, self._dice, self.counts)
        self._connector: Any = self._scheduler.connector
        self._connector._scheduler.close()
        self._connector._scheduler = half(
            self._replicas,  # type: ignore[arg-type]
            BLOCK_SIZE,
            ExporterOptions(),
            self._journal.flush,
            self._clock,
            scheduling=Scheduling(*vllm_compat.scheduling(setting.config)),
        )
        self._connector._resumer.can = {"output", "seed"}
        self._added = 0
        self._live: dict[str, tuple[Request, int]] = {}
        """Requests, with the length of their prompts."""
        self._on_their_way: deque[tuple[Any, int, Any]] = deque()

    def go(self) -> Counter[str]:
        """What happened how often; raises AssertionError if an invariant broke."""
        for step in range(STEPS):
            if step < STEPS - LAST_STEPS:
                self._arrive()
            self._disturb()
            self._clock.advance_ms(0.001)
            self._step()
            self._see_answers()
        assert not self._connector.broken and not self._connector._resumer.broken
        assert self.counts["drafts"] or not self._mode.drafts, "nothing was drafted"
        left = {each: request.status.name for each, request in self._scheduler.requests.items()}
        assert not left and not self._on_their_way, f"never end: {left}"
        self._worker.execute(self._scheduler.schedule())
        assert not self._journal.ledger.sequences, f"left: {list(self._journal.ledger.sequences)}"
        assert not len(self._journal.table) and not self._replicas.leases
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == BLOCKS - 1, f"{BLOCKS - 1 - free} blocks are left in use"
        return self.counts

    def _step(self) -> None:
        scheduler = self._scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            self.counts["preempted"] += len(output.preempted_req_ids or ())
            self._on_their_way.append((output, *self._worker.execute(output)))
        depth = 2 if self._mode.ahead else 1
        if self._on_their_way and (len(self._on_their_way) >= depth or not scheduler.has_requests()):
            output, step, outcome = self._on_their_way.popleft()
            self._worker.finish(step)
            scheduler.update_from_output(output, outcome)
            if self._mode.drafts and not self._mode.ahead:  # ahead, vLLM schedules drafts unasked
                scheduler.update_draft_token_ids(self._worker.propose(outcome.req_ids, DRAFTS))

    def _arrive(self) -> None:
        dice = self._dice
        if len(self._scheduler.requests) >= MAX_REQUESTS or dice.random() >= 0.25:
            return
        self._added += 1
        prompt = [5] * dice.choice([0, 16, 40])  # beginnings that they share
        prompt += [dice.choice(VOCABULARY) for _ in range(dice.randrange(1, 70))]
        max_tokens = dice.randrange(1, 60)
        segue: dict[str, Any] = {"seq": f"{dice.randrange(6)}-{self._added // 8}", "epoch": self._added}
        if dice.random() < 0.5:
            segue["resume"] = True
            if max_tokens > 1 and dice.random() < 0.6:
                segue["delivered"] = [{"ids": answer(prompt, dice.randrange(1, max_tokens))}]
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[dice.choice(VOCABULARY)] if dice.random() < 0.3 else None,
            extra_args={"kv_transfer_params": {"segue": segue}} if dice.random() < 0.9 else None,
        )
        params.update_from_generation_config({}, None)
        name = f"r{self._added}"
        request = Request(name, prompt, params, None, block_hasher=self._setting.hasher)
        self._live[name] = request, len(prompt)
        self._scheduler.add_request(request)
        self.counts["requests"] += 1

    def _disturb(self) -> None:
        scheduler, dice = self._scheduler, self._dice
        if dice.random() < 0.03 and scheduler.requests:
            aborted = dice.choice(list(scheduler.requests))
            scheduler.finish_requests([aborted], RequestStatus.FINISHED_ABORTED)
            self.counts["aborts"] += 1
        if dice.random() < 0.01 and not self._mode.ahead and not scheduler.kv_holding_waiting:
            scheduler.reset_prefix_cache(reset_running_requests=True)
            self.counts["prefix cache resets"] += 1

    def _see_answers(self) -> None:
        for name, (request, prompt) in list(self._live.items()):
            if request.is_finished():
                tokens = list(request.all_token_ids)
                expected = answer(tokens[:prompt], len(tokens) - prompt)
                assert tokens[prompt:] == expected, f"{name} answers {tokens[prompt:]}, not {expected}"
                del self._live[name]
                self.counts[request.status.name] += 1


def fuzz(
    setting: Setting, seeds: range, half: type[SchedulerHalf] = SchedulerHalf
) -> tuple[Counter[str], int | None, str]:
    """(what happened in all runs, the first seed that failed, how)."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = Run(setting, seed, half)
        try:
            run.go()
        except Exception:
            return counts, seed, traceback.format_exc()
        counts.update(run.counts)
    return counts, None, ""


def unnoticed(model: str) -> list[str]:
    """Planted bugs that no seed of theirs sees."""
    return [
        bug.__name__
        for bug, (mode, seeds) in SEEDS_NEEDED.items()
        if fuzz(Setting(MODES[mode], model), seeds, bug)[1] is None
    ]


def again(mode: str, seed: int) -> str:
    """The line that makes a run again."""
    return f"PYTHONPATH=tests {sys.executable} tests/vllm/schedule_fuzz.py --mode {mode} --first {seed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=MODES, action="append", help="default: each")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--planted-bugs", action="store_true", help="whether it sees those that were planted")
    arguments = parser.parse_args()
    model = str(tiny_model(ROOT / ".cache" / "models"))
    if arguments.planted_bugs:
        missed = unnoticed(model)
        print(f"not noticed: {', '.join(missed)}" if missed else "all noticed")
        return 1 if missed else 0
    for mode in arguments.mode or MODES:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        counts, failed, how = fuzz(Setting(MODES[mode], model), seeds)
        print(mode, dict(counts))
        if failed is not None:
            print(how, again(mode, failed), sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

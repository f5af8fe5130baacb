"""What this engine can continue exactly, found out by doing it, when the engine starts.

Runs in the worker before the first request, on vLLM's real classes (0.32) with small objects of its own, in
a fraction of a second. What is not shown here is not offered, and the router goes on by token ids.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.version import __version__

from segue_core.messages.status import Exact
from segue_shim import draws, vllm_front_end, vllm_worker_state
from segue_shim.plan import pack_u32
from segue_shim.vllm_worker_state import STATE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("segue_shim")

TESTED = ("0.32.",)
"""Versions of vLLM that this project's tests have run against."""
PROMPT, DELIVERED, NEXT = [5, 6, 7], [8, 9], 10
NAME = "segue-self-test"


class NotShownError(Exception):
    """A piece of this engine is not what exact continuation needs; says which."""


def verdict(vllm_config: VllmConfig) -> tuple[tuple[Exact, ...], str]:
    """(what can be continued, why not everything). Raises nothing."""
    parts: tuple[tuple[Exact, Callable[[VllmConfig], None]], ...] = (
        ("output", _output),
        ("seed", _seed),
        ("grammar", _grammar),
    )
    can: list[Exact] = []
    why: list[str] = []
    for name, show in parts:
        try:
            show(vllm_config)
            can.append(name)
        except NotShownError as reason:
            why.append(f"{name}: {reason}")
        except Exception as error:
            logger.exception("segue: the self-test of %s failed", name)
            why.append(f"{name}: {error!r}")
        if not can:
            break  # nothing is of use without the output
    detail = "; ".join(why)
    if detail:
        logger.warning("segue: not everything can be continued exactly here: %s", detail)
    return tuple(can), detail


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise NotShownError(what)


def _output(vllm_config: VllmConfig) -> None:
    _need(__version__.startswith(TESTED), f"not tested with vLLM {__version__}")
    _need(
        not vllm_config.use_v2_model_runner,
        "not tried on the V2 model runner: with VLLM_USE_V2_MODEL_RUNNER=0 vLLM takes the other one",
    )
    _need(vllm_front_end.installed(), "vLLM has not loaded the plugin 'segue': see VLLM_PLUGINS")
    _need(vllm_worker_state.installed(), "the model runner has another batch")
    _show_request()
    _show_scheduler()
    _show_batch()
    _show_front_end()


def _show_request() -> None:
    request = Request(NAME, PROMPT, SamplingParams(max_tokens=8), None)
    request.append_output_token_ids(DELIVERED)
    stats = request.take_prefill_stats()
    _need(
        list(request.all_token_ids) == PROMPT + DELIVERED
        and (request.num_prompt_tokens, request.num_output_tokens) == (len(PROMPT), len(DELIVERED))
        and request.prefill_stats is None
        and isinstance(stats, PrefillStats),
        "a request does not take output as expected",
    )


def _show_scheduler() -> None:
    """By the names in its code: building a scheduler would take too long."""
    names = Scheduler.__init__.__code__.co_names
    _need(
        {"structured_output_manager", "grammar_compile_error_reqs"} <= set(names),
        "the scheduler has no way to end a request that cannot be continued",
    )
    steps = inspect.unwrap(GPUModelRunner.execute_model).__code__.co_names
    _need(
        {"handle_preemptions", "_update_states"} <= set(steps)
        and steps.index("handle_preemptions") < steps.index("_update_states"),
        "the model runner does not ask the connector first",
    )


def _show_batch() -> None:
    batch = InputBatch(
        max_num_reqs=2,
        max_model_len=16,
        max_num_batched_tokens=16,
        device=torch.device("cpu"),
        vocab_size=32,
        block_sizes=[16],
        max_num_blocks_per_req=[1],
    )
    state = CachedRequestState(
        req_id=NAME,
        prompt_token_ids=list(PROMPT),
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=8, presence_penalty=1.0, temperature=0.0),
        generator=None,
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    output = state.output_token_ids
    STATE.begin({NAME: pack_u32(DELIVERED)})
    for _ in range(2):  # as new, and as one that comes back
        index = batch.add_request(state)
        batch.refresh_metadata()
        _need(
            output == DELIVERED
            and batch.sampling_metadata.output_token_ids[index] is output
            and batch.token_ids_cpu[index, : state.num_tokens].tolist() == PROMPT + DELIVERED
            and batch.num_prompt_tokens[index] == len(PROMPT)
            and batch.num_tokens_no_spec[index] == len(PROMPT) + len(DELIVERED),
            "the batch does not take output as expected",
        )
        batch.remove_request(NAME)
        batch.condense()
        batch.refresh_metadata()
        STATE.begin({})


def _show_front_end() -> None:
    wanted = [*DELIVERED, NEXT]
    (output,) = _said(one_by_one=False)
    (choice,) = output.outputs
    _need(
        list(choice.token_ids) == wanted and [next(iter(position)) for position in choice.logprobs] == wanted,
        "the front end does not begin with what was delivered",
    )
    apart = [list(output.outputs[0].token_ids) for output in _said(one_by_one=True)]
    _need(apart == [[token] for token in wanted], "the front end does not keep its outputs apart")


def _said(one_by_one: bool) -> list[Any]:
    """The outputs of a continued request, as an engine or, one by one, as a server gets them."""
    segue = {"seq": NAME, "epoch": 1, "delivered": [{"ids": DELIVERED}], "one_by_one": one_by_one}
    params = SamplingParams(
        max_tokens=8,
        logprobs=1,
        extra_args={"kv_transfer_params": {"segue": segue}},
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    request = EngineCoreRequest(
        request_id=NAME,
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=NAME,
    )
    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(params.output_kind, NAME) if one_by_one else None
    processor.add_request(request, None, queue=queue)
    stats = PrefillStats()
    stats.set(len(PROMPT) + len(DELIVERED), 0, 0)
    row = LogprobsLists(np.array([[NEXT, 1]]), np.zeros((1, 2), np.float32), np.ones(1, np.int64))
    output = EngineCoreOutput(NAME, [NEXT], new_logprobs=row, prefill_stats=stats)
    said: list[Any] = processor.process_outputs([output]).request_outputs
    while queue is not None and (waiting := queue.get_nowait()) is not None:
        said.append(waiting)
    return said


def _seed(vllm_config: VllmConfig) -> None:
    _need(vllm_config.speculative_config is None, "speculative decoding draws as often as it likes")
    model = vllm_config.model_config
    sampler = TopKTopPSampler(model.logprobs_mode, model.use_fp64_gumbel)
    device = torch.device(vllm_config.device_config.device)
    vocabulary = model.get_vocab_size()
    with torch.random.fork_rng(devices=[]):
        logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(1)).to(device)
        for way in draws.WAYS:
            if _same(sampler, logits, way, vocabulary):
                STATE.skip = way
                return
    raise NotShownError("the sampler draws in a way that is not known")


def _same(sampler: Any, logits: torch.Tensor, way: draws.Draw, vocabulary: int) -> bool:
    """Whether skipping three draws leads where three draws lead: to the same fourth, and the same state."""

    def draw(generator: torch.Generator) -> list[int]:
        tokens: list[int] = sampler(logits.clone(), {1: generator}, None, None)[0].flatten().tolist()
        return tokens[1:]

    stepped, skipped = (torch.Generator(logits.device).manual_seed(7) for _ in range(2))
    for _ in range(3):
        draw(stepped)
    way(skipped, 3, vocabulary)
    same_state = torch.equal(stepped.get_state(), skipped.get_state())
    return same_state and draw(stepped) == draw(skipped)


def _grammar(vllm_config: VllmConfig) -> None:
    """The manager hands the ids on to a grammar, and its answer back."""
    manager = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.enable_in_reasoning = True
    for accepts in (True, False):
        fed: list[int] = []

        def accept_tokens(name: str, ids: list[int], fed: list[int] = fed, accepts: bool = accepts) -> bool:
            fed += ids
            return accepts

        grammar = SimpleNamespace(accept_tokens=accept_tokens)
        structured = SimpleNamespace(grammar=grammar, reasoning_ended=None)
        request = SimpleNamespace(
            request_id=NAME, use_structured_output=True, structured_output_request=structured
        )
        answer = manager.accept_tokens(request, DELIVERED)
        _need(answer is accepts and fed == DELIVERED, "grammars are not advanced as expected")

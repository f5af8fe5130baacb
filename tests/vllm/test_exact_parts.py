"""The pieces of exact continuation that live in vLLM's own objects, one by one and without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from segue_shim.plan import pack_u32

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT = [5, 6, 7]


def core_request(name: str, segue: Any, parameters: Any = None, **settings: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    from vllm import SamplingParams

    if parameters is None:
        extra = {"kv_transfer_params": {"segue": segue, "other": 1}, "more": 2}
        parameters = SamplingParams(extra_args=extra, max_tokens=20, detokenize=False, **settings)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=parameters,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name,
    )


def core_output(name: str, ids: list[int], prompt_tokens: int, cached: int = 0) -> Any:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import PrefillStats

    stats = PrefillStats()
    stats.set(prompt_tokens, 0, cached)
    return EngineCoreOutput(name, ids, prefill_stats=stats)


@pytest.fixture
def processor() -> Any:
    from vllm.v1.engine.output_processor import OutputProcessor

    from segue_shim import vllm_front_end

    vllm_front_end.install()
    return OutputProcessor(None, log_stats=False)


def said(processor: Any, *outputs: Any) -> list[list[int]]:
    found = processor.process_outputs(list(outputs)).request_outputs
    return [list(choice.token_ids) for output in found for choice in output.outputs]


def test_ids_are_said_again_only_if_the_engine_core_took_them(processor: Any) -> None:
    """It says so by the prompt length in its statistics; they are then put right for usage and metrics."""
    segue = {"seq": "s", "epoch": 1, "delivered": [{"ids": [8, 9]}]}
    processor.add_request(core_request("a", segue), None)
    output = core_output("a", [10], prompt_tokens=5, cached=4)
    assert said(processor, output) == [[8, 9, 10]]
    stats = output.prefill_stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (3, 3, 1)
    assert stats.num_external_cached_tokens == 4
    processor.add_request(core_request("b", segue), None)
    assert said(processor, core_output("b", [10], prompt_tokens=3)) == [[10]]
    processor.add_request(core_request("c", segue), None)
    lost = core_output("c", [10], prompt_tokens=5)
    lost.prefill_stats = None
    assert said(processor, lost) == [[10]]


def test_an_error_is_not_said_to_be_an_answer(processor: Any) -> None:
    """The engine core refused the ids: an end without tokens."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    segue = {"seq": "s", "epoch": 1, "delivered": [{"ids": [8, 9]}]}
    processor.add_request(core_request("a", segue), None)
    assert said(processor, EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR)) == [[]]
    assert processor.__dict__["_segue_replays"] == {}


def test_every_choice_gets_its_own_part_of_shared_parameters(processor: Any) -> None:
    """Children without a seed share one object; other parameters in it stay."""
    from segue_shim.vllm_front_end import prepare

    parts = [{"ids": [8]}, {"ids": [9], "finish_reason": "stop", "stop_reason": 9}, {"ids": []}]
    segue = {"seq": "s", "epoch": 4, "resume": True, "delivered": parts}
    first = core_request("0_a", segue)
    children = [first] + [core_request(f"{i}_a", None, first.sampling_params) for i in (1, 2)]
    replays = [prepare(child, index, 3) for index, child in enumerate(children)]
    assert [replay and replay.ids for replay in replays] == [[8], [9], None]
    assert replays[1] is not None and str(replays[1].finish) == "stop" and replays[1].stop_reason == 9
    transfers = [child.sampling_params.extra_args["kv_transfer_params"] for child in children]
    assert [transfer["segue"]["seq"] for transfer in transfers] == ["s", "s.1", "s.2"]
    assert [transfer["segue"]["delivered"] for transfer in transfers] == [
        [part] for part in ({"ids": [8]}, parts[1], {})
    ]
    assert all(transfer["other"] == 1 and transfer["segue"]["resume"] for transfer in transfers)
    assert all(child.sampling_params.extra_args["more"] == 2 for child in children)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_that_do_not_fit_the_choices_are_nobodys(processor: Any, parts: int) -> None:
    """One part must not become the beginning of every choice: the engine core refuses more than one."""
    from segue_shim.vllm_front_end import prepare

    segue = {"seq": "s", "epoch": 1, "delivered": [{"ids": [8]}] * parts}
    children = [core_request(f"{index}_a", segue) for index in range(3)]
    assert [prepare(child, index, 3) for index, child in enumerate(children)] == [None] * 3
    transfers = [child.sampling_params.extra_args["kv_transfer_params"] for child in children]
    assert [len(transfer["segue"]["delivered"]) for transfer in transfers] == [2, 2, 2]


def test_choices_of_a_first_run_are_protected_under_their_own_names(processor: Any) -> None:
    """Nothing is delivered yet; a single choice keeps what it came with."""
    from segue_shim.vllm_front_end import prepare

    children = [core_request(f"{index}_a", {"seq": "s", "epoch": 1}) for index in range(2)]
    assert [prepare(child, index, 2) for index, child in enumerate(children)] == [None, None]
    names = [one.sampling_params.extra_args["kv_transfer_params"]["segue"]["seq"] for one in children]
    assert names == ["s", "s.1"]
    single = core_request("a", {"seq": "s", "epoch": 1})
    parameters = single.sampling_params
    assert prepare(single, 0, 1) is None and single.sampling_params is parameters


def test_a_choice_that_is_over_costs_the_engine_one_token(processor: Any) -> None:
    """Its request reaches the engine core with one prompt id, greedy and without anything else."""
    part = {"ids": [8, 9], "finish_reason": "length"}
    request = core_request(
        "a", {"seq": "s", "epoch": 1, "delivered": [part]}, temperature=1.0, presence_penalty=1.0, logprobs=2
    )
    processor.add_request(request, None)
    cheap = request.sampling_params
    assert (cheap.max_tokens, cheap.temperature, cheap.presence_penalty) == (1, 0.0, 0.0)
    assert cheap.extra_args is None and cheap.logprobs is None and request.prompt_token_ids == PROMPT[:1]
    output = core_output("a", [77], prompt_tokens=1)
    (found,) = processor.process_outputs([output]).request_outputs
    (choice,) = found.outputs
    assert (list(choice.token_ids), choice.finish_reason) == ([8, 9], "length")
    assert found.prompt_token_ids == PROMPT and len(choice.logprobs) == 2 and found.finished


@pytest.mark.parametrize("ids", [[8] * 21, [1 << 30]])
def test_a_choice_that_is_over_says_no_more_than_it_may(processor: Any, ids: list[int]) -> None:
    """Longer than the request allows, or not of the vocabulary: left to the engine core, which refuses it."""
    processor.tokenizer = SimpleNamespace(max_token_id=2047)
    part = {"ids": ids, "finish_reason": "length"}
    request = core_request("a", {"seq": "s", "epoch": 1, "delivered": [part]})
    processor.add_request(request, None)
    assert request.sampling_params.max_tokens == 20 and not processor.__dict__.get("_segue_replays")


def test_parameters_that_are_not_understood_change_nothing(processor: Any) -> None:
    """Nor do the parameters of others."""
    for number, segue in enumerate(({"seq": ""}, "x", {"seq": "s", "epoch": 1, "delivered": [{"ids": "x"}]})):
        request = core_request(f"a{number}", segue)
        before = request.sampling_params
        processor.add_request(request, None)
        assert request.sampling_params is before
        assert said(processor, core_output(f"a{number}", [10], prompt_tokens=3)) == [[10]]


def outputs_of(*ids: int) -> list[Any]:
    from vllm.outputs import CompletionOutput, RequestOutput

    def output(token: int) -> Any:
        choice = CompletionOutput(0, f"{token} ", [token], None, None)
        return RequestOutput("a", None, list(PROMPT), None, [choice], finished=False)

    return [output(token) for token in ids]


def collector() -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from segue_shim.vllm_collector import separate

    made = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    separate(made)
    separate(made)
    return made


async def take(queue: Any, count: int) -> list[list[int]]:
    taken = []
    for _ in range(count):
        output = queue.get_nowait() or await asyncio.wait_for(queue.get(), 5)
        taken.append(list(output.outputs[0].token_ids))
    return taken


async def test_what_is_said_again_stays_apart_and_what_is_new_is_merged() -> None:
    """New outputs are merged with each other, never with the replay."""
    queue = collector()
    queue.keeps = True
    for output in outputs_of(1, 2, 3):
        queue.put(output)
    queue.keeps = False
    for output in outputs_of(4, 5):
        queue.put(output)
    assert await take(queue, 4) == [[1], [2], [3], [4, 5]]
    assert queue.get_nowait() is None and not queue.ready.is_set()
    (late,) = outputs_of(6)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(late)
    assert await asyncio.wait_for(waiting, 5) is late


async def test_a_failure_is_heard_before_what_waits() -> None:
    """The engine is dead; nobody waits for the rest of a replay."""
    queue = collector()
    queue.keeps = True
    for output in outputs_of(1, 2, 3):
        queue.put(output)
    queue.put(ValueError("dead"))
    queue.put(outputs_of(4)[0])
    with pytest.raises(ValueError, match="dead"):
        await queue.get()
    assert queue.get_nowait() is None


def state_of(name: str, seed: int | None = None, **changes: Any) -> Any:
    import torch
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from vllm import SamplingParams

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    settings = {
        "req_id": name,
        "prompt_token_ids": list(PROMPT),
        "mm_features": [],
        "sampling_params": SamplingParams(seed=seed),
        "generator": generator,
        "block_ids": ([4],),
        "num_computed_tokens": 0,
        "output_token_ids": [],
    }
    return CachedRequestState(**settings | changes)


@pytest.fixture
def worker() -> Any:
    from segue_shim.vllm_worker_state import WorkerState

    return WorkerState()


BATCH: Any = SimpleNamespace(vocab_size=100)


def test_only_requests_of_this_step_get_their_output_once(worker: Any) -> None:
    """One that comes back, or is not named, is left alone."""
    worker.begin({"a": pack_u32([8, 9])})
    named, other = state_of("a"), state_of("b")
    output = named.output_token_ids
    for request in (named, other, named):
        worker.adopt(BATCH, request)
    assert output == [8, 9] and other.output_token_ids == []
    worker.begin({"a": pack_u32([8, 9])})
    worker.adopt(BATCH, named)
    assert output == [8, 9]
    worker.begin({})
    late = state_of("a")
    worker.adopt(BATCH, late)
    assert late.output_token_ids == []


def test_a_seeded_request_draws_on_where_its_answer_stood(worker: Any) -> None:
    """And may take draws in vain back, as every seeded request on a CPU."""
    import torch

    def draw(generator: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator).item())

    plain = torch.Generator().manual_seed(3)
    expected = [draw(plain) for _ in range(4)]
    worker.begin({"a": pack_u32([8, 9])})
    continued, fresh = state_of("a", seed=3), state_of("b", seed=3)
    for request in (continued, fresh):
        worker.adopt(BATCH, request)
    for request, skipped in ((continued, 2), (fresh, 0)):
        draw(request.generator)
        request.generator.set_offset(request.generator.get_offset() - 4)
        assert draw(request.generator) == expected[skipped]


def test_only_requests_without_their_replica_take_draws_back(worker: Any) -> None:
    """Those that hold a block that was not loaded, in the step in which they came."""
    import torch

    states = [state_of(name, seed=3, block_ids=([block],)) for name, block in (("a", 4), ("b", 5))]
    worker.begin({})
    for state in states:
        worker.adopt(BATCH, state)
        torch.randint(0, 2**31, (1,), generator=state.generator)
    drawn = states[1].generator.get_state()
    worker.load_failed({4})
    worker.begin({})
    assert torch.equal(states[0].generator.get_state(), torch.Generator().manual_seed(3).get_state())
    assert torch.equal(states[1].generator.get_state(), drawn)
    torch.randint(0, 2**31, (1,), generator=states[0].generator)
    drawn = states[0].generator.get_state()
    worker.load_failed({4})
    worker.begin({})
    assert torch.equal(states[0].generator.get_state(), drawn)


def config(**changes: Any) -> Any:
    model = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False, get_vocab_size=lambda: 300)
    given = {
        "use_v2_model_runner": False,
        "speculative_config": None,
        "model_config": model,
        "device_config": SimpleNamespace(device="cpu"),
    }
    return SimpleNamespace(**given | changes)


@pytest.fixture
def installed() -> None:
    from segue_shim import vllm_front_end, vllm_worker_state

    vllm_front_end.install()
    vllm_worker_state.install()


def test_the_self_test_shows_everything_here(installed: None) -> None:
    """On the vLLM that these tests run with."""
    from segue_shim.vllm_selftest import verdict

    assert verdict(config()) == (("output", "seed", "grammar"), "")


@pytest.mark.parametrize(
    ("changes", "exact", "why"),
    [
        ({"use_v2_model_runner": True}, (), "V2 model runner"),
        ({"speculative_config": object()}, ("output", "grammar"), "speculative"),
        ({"model_config": None}, ("output", "grammar"), "seed: AttributeError"),
    ],
)
def test_what_is_not_shown_is_not_offered(installed: None, changes: Any, exact: Any, why: str) -> None:
    """With the reason, for whoever looks at the engine's status."""
    from segue_shim.vllm_selftest import verdict

    found, detail = verdict(config(**changes))
    assert found == exact and why in detail


def test_another_vllm_costs_exact_continuation_only(monkeypatch: Any) -> None:
    """A name that the self-test needs and does not find: the connector says so, and goes on."""
    import sys

    from segue_shim import vllm_connector

    monkeypatch.delitem(sys.modules, "segue_shim.vllm_selftest", raising=False)
    monkeypatch.delattr("segue_shim.vllm_selftest", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", None)
    exact, detail = vllm_connector._self_test(config())
    assert exact == () and "gpu_model_runner" in detail


@pytest.mark.parametrize(
    ("module", "name", "wrong", "exact", "why"),
    [
        ("vllm_selftest", "__version__", "0.40.0", (), "0.40.0"),
        ("vllm_front_end", "installed", lambda: False, (), "plugin"),
        ("vllm_worker_state", "installed", lambda: False, (), "batch"),
        ("vllm_front_end", "_begin", lambda output, replay: [output], (), "front end"),
        ("vllm_front_end", "separate", lambda collector: None, (), "apart"),
        ("vllm_worker_state", "unpack_u32", lambda packed: [1], (), "the batch does not"),
        ("draws", "WAYS", (), ("output", "grammar"), "the sampler draws"),
    ],
)
def test_a_piece_that_does_not_work_is_noticed(
    installed: None, monkeypatch: Any, module: str, name: str, wrong: Any, exact: Any, why: str
) -> None:
    """By what it does."""
    import importlib

    from segue_shim.vllm_selftest import verdict

    monkeypatch.setattr(importlib.import_module(f"segue_shim.{module}"), name, wrong)
    found, detail = verdict(config())
    assert found == exact and why in detail

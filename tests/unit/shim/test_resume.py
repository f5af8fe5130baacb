"""The scheduler's part of exact continuation, with vLLM's objects in outline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from segue_core.messages.request import Delivered
from segue_shim.plan import unpack_u32
from segue_shim.vllm_resume import OutputResumer, refusal


class Stats:
    """vLLM's PrefillStats: remembers what was set."""

    def set(self, **values: int) -> None:
        self.values = values


def parameters(**changes: Any) -> Any:
    """vLLM's SamplingParams."""
    given = {
        "sampling_type": SimpleNamespace(name="GREEDY"),
        "prompt_logprobs": None,
        "thinking_token_budget": None,
        "eos_token_id": 1,
        "stop_token_ids": [2],
    }
    return SimpleNamespace(**given | changes)


class Request:
    """vLLM's Request: 10 prompt ids."""

    def __init__(self, name: str, delivered: Any, **changes: Any) -> None:
        self.request_id = name
        segue = {"seq": name, "epoch": 1} | ({} if delivered is None else {"delivered": delivered})
        self.kv_transfer_params: Any = {"segue": segue}
        self.prompt_token_ids: Any = list(range(10))
        self.num_prompt_tokens, self.num_output_tokens, self.max_tokens = 10, 0, 20
        self.prompt_embeds = self.pooling_params = None
        self.mm_features: list[Any] = []
        self.resumable = False
        self.sampling_params: Any = parameters()
        self.skip_reading_prefix_cache = False
        self.output: list[int] = []
        self.prefill_stats: Any = Stats()
        self.use_structured_output = False
        self.structured_output_request: Any = None
        vars(self).update(changes)

    def append_output_token_ids(self, ids: list[int]) -> None:
        self.output += ids

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)

    def take_prefill_stats(self) -> Any:
        stats, self.prefill_stats = self.prefill_stats, None
        return stats


class Scheduler:
    """vLLM's Scheduler, as far as it is among the callers of the hooks."""

    def __init__(self, resumer: OutputResumer) -> None:
        self.resumer = resumer
        self.grammar_compile_error_reqs: set[str] = set()
        self.structured_output_manager: Any = SimpleNamespace(accept_tokens=self.accept_tokens)
        self.accepted: list[list[int]] = []
        self.accepts = True

    def accept_tokens(self, request: Request, ids: list[int]) -> bool:
        self.accepted.append(ids)
        return self.accepts

    def announce(self, request: Any) -> None:
        self.resumer.on_new_request(request)

    def add(self, request: Any) -> bool:
        """Whether the request may start."""
        self.announce(request)
        return self.resumer.may_start(request)

    def start(self, *requests: Any, computed: int = 0, short: int = 0) -> dict[str, list[int]]:
        """A step with these new requests, `short` tokens less than they need."""
        self.new = [
            SimpleNamespace(
                req_id=one.request_id, num_computed_tokens=computed, sampling_params=one.sampling_params
            )
            for one in requests
        ]
        scheduled = {one.request_id: one.num_tokens - computed - short for one in requests}
        output: Any = SimpleNamespace(scheduled_new_reqs=self.new, num_scheduled_tokens=scheduled)
        return {name: unpack_u32(ids) for name, ids in self.resumer.build(output).items()}


@pytest.fixture
def scheduler() -> Scheduler:
    resumer = OutputResumer(vocabulary=100, max_model_len=50)
    resumer.can = ("output", "seed", "grammar")
    return Scheduler(resumer)


def structured(name: str, delivered: Any) -> Request:
    return Request(name, delivered, use_structured_output=True)


def test_delivered_ids_become_output_and_travel_to_the_worker(scheduler: Scheduler) -> None:
    """Once; and the statistics come back with what was taken in their prompt length."""
    request, fresh = Request("a", [{"ids": [7, 8, 9]}]), Request("b", None)
    assert scheduler.add(request) and scheduler.add(fresh)
    assert request.output == [7, 8, 9] and fresh.output == []
    assert request.prefill_stats is None and fresh.prefill_stats is not None
    scheduler.resumer.after_alloc(request, 4)  # type: ignore[arg-type]
    assert scheduler.start(request, fresh, computed=12) == {"a": [7, 8, 9]}
    assert request.prefill_stats.values == {
        "num_prompt_tokens": 13,
        "num_local_cached_tokens": 8,
        "num_external_cached_tokens": 4,
    }


def test_a_preempted_request_is_not_touched_again(scheduler: Scheduler) -> None:
    """The scheduler asks for cached KV once more; output, grammar and statistics are its own by now."""
    request = structured("a", [{"ids": [7, 8]}])
    assert scheduler.add(request)
    assert scheduler.resumer.may_start(request)  # type: ignore[arg-type]
    scheduler.start(request)
    assert scheduler.resumer.may_start(request)  # type: ignore[arg-type]
    assert scheduler.accepted == [[7, 8]] and request.output == [7, 8]
    assert request.prefill_stats is not None


@pytest.mark.parametrize(
    "delivered",
    [
        [{"ids": [100]}],
        [{"ids": [5] * 20}],
        [{"ids": [1 << 40]}],
        [{"ids": "x"}],
        "x",
        [{}, {}],
        [{"ids": [7, 1]}],
        [{"ids": [7, 2]}],
    ],
)
def test_what_cannot_be_taken_ends_the_request(scheduler: Scheduler, delivered: Any) -> None:
    """It never starts, and never has a part of the ids."""
    request = Request("a", delivered)
    assert not scheduler.add(request)
    assert request.output == [] and scheduler.grammar_compile_error_reqs == {"a"}
    assert scheduler.start(request) == {}


def test_what_is_being_ended_never_starts(scheduler: Scheduler) -> None:
    """vLLM does not listen to the connector where the prefix cache must not be read."""
    request = Request("a", [{"ids": [100]}], skip_reading_prefix_cache=True)
    assert not scheduler.add(request)
    assert request.skip_reading_prefix_cache is False


def test_a_thinking_budget_is_not_continued(scheduler: Scheduler) -> None:
    """vLLM loses its place in it when a request comes back with output."""
    assert not scheduler.add(
        Request("a", [{"ids": [7]}], sampling_params=parameters(thinking_token_budget=5))
    )


def test_log_probabilities_of_a_prompt_need_a_prefill_in_one_step(scheduler: Scheduler) -> None:
    """Else the prompt could be complete before there is a token, which ends vLLM."""
    wanted = parameters(prompt_logprobs=1)
    whole = Request("a", [{"ids": [7, 8]}], sampling_params=wanted)
    parted = Request("b", [{"ids": [7, 8]}], sampling_params=wanted)
    assert scheduler.add(whole) and scheduler.add(parted)
    assert scheduler.start(whole) == {"a": [7, 8]} and scheduler.new[0].sampling_params is wanted
    assert scheduler.start(parted, short=1) == {"b": [7, 8]}
    assert scheduler.new[0].sampling_params.prompt_logprobs is None and wanted.prompt_logprobs == 1
    assert scheduler.grammar_compile_error_reqs == {"b"} and parted.prefill_stats is None


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_features": [1]},
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"pooling_params": object()},
        {"resumable": True},
        {"num_output_tokens": 1},
    ],
)
def test_only_text_requests_are_continued(scheduler: Scheduler, changes: dict[str, Any]) -> None:
    """KV and output of the others depend on more than ids."""
    assert not scheduler.add(Request("a", [{"ids": [7]}], **changes))


def test_without_the_workers_consent_nothing_is_taken(scheduler: Scheduler) -> None:
    """The worker's self-test did not pass, or it never answered."""
    scheduler.resumer.can = ()
    request = Request("a", [{"ids": [7]}])
    assert not scheduler.add(request) and request.output == []


def test_what_the_worker_has_not_shown_is_not_tried(scheduler: Scheduler) -> None:
    """A request may need more than the output: draws, or a grammar."""
    scheduler.resumer.can = ("output",)
    seeded = parameters(sampling_type=SimpleNamespace(name="RANDOM_SEED"))
    assert scheduler.add(Request("a", [{"ids": [7]}]))
    assert not scheduler.add(Request("b", [{"ids": [7]}], sampling_params=seeded))
    assert not scheduler.add(structured("c", [{"ids": [7]}]))


def test_a_choice_that_has_not_begun_is_an_ordinary_request(scheduler: Scheduler) -> None:
    """No ids, no end."""
    request = Request("a", [{"ids": []}])
    assert scheduler.add(request)
    assert request.prefill_stats is not None and scheduler.start(request) == {}


def test_ids_that_the_grammar_rejects_end_the_request(scheduler: Scheduler) -> None:
    """They are output by then, but nobody counts on it."""
    scheduler.accepts = False
    request = structured("a", [{"ids": [7]}])
    assert not scheduler.add(request)
    assert scheduler.grammar_compile_error_reqs == {"a"} and scheduler.start(request) == {}


def test_a_bug_ends_those_that_wait_and_spares_the_others(scheduler: Scheduler) -> None:
    """Ids that were taken must not be forgotten: those requests end in an error."""
    waiting, fresh = structured("a", [{"ids": [7]}]), Request("b", None)
    scheduler.announce(waiting)
    scheduler.structured_output_manager = None
    assert not scheduler.resumer.may_start(waiting)  # type: ignore[arg-type]
    assert scheduler.resumer.broken and scheduler.add(fresh)
    later = Request("c", [{"ids": [7]}])
    assert scheduler.add(later) and later.output == []


def test_a_bug_in_a_step_ends_those_whose_ids_it_lost(scheduler: Scheduler) -> None:
    """Those before it in the same step go on; none is said to have what the worker does not know."""
    requests = [Request(name, [{"ids": [7, 8]}]) for name in "abc"]
    assert all(scheduler.add(one) for one in requests)
    scheduler.resumer._resumed["b"].stats = object()
    assert scheduler.start(*requests)["a"] == [7, 8]
    assert scheduler.grammar_compile_error_reqs == {"b", "c"}
    assert [one.prefill_stats is None for one in requests] == [False, True, True]
    for one in requests:
        scheduler.resumer.finished(one.request_id)
    assert not scheduler.resumer._resumed


def test_nothing_is_kept_of_requests_that_are_over(scheduler: Scheduler) -> None:
    """Aborted or finished."""
    request = Request("a", [{"ids": [7]}])
    scheduler.add(request)
    scheduler.resumer.finished("a")
    scheduler.resumer.finished("a")
    assert scheduler.start(request) == {}


def test_nobody_else_is_called_a_scheduler() -> None:
    """Called from elsewhere, the request starts from the beginning, and the front end hears nothing."""
    resumer = OutputResumer(vocabulary=100, max_model_len=50)
    resumer.can = ("output",)
    request: Any = Request("a", [{"ids": [7]}])
    resumer.on_new_request(request)
    assert request.output == [] and resumer.may_start(request) and request.prefill_stats is not None


def test_the_last_id_that_may_be_given_is_left_to_the_engine() -> None:
    """By the request's own limit and by the model's context."""
    ids = Delivered(ids=[1, 2, 3])
    limits: dict[str, Any] = {"ends": (), "vocabulary": 4, "max_tokens": 4, "room": 4}
    assert refusal([ids], **limits) == ""
    for limit in ({"vocabulary": 3}, {"max_tokens": 3}, {"room": 3}, {"ends": {3}}):
        assert refusal([ids], **limits | limit) != ""
    assert refusal([Delivered(ids=[1], finish_reason="stop")], **limits) != ""
    assert refusal([], **limits) != ""

"""Exact continuation, the scheduler's part: delivered token ids become output that a request already has.

Runs in vLLM's EngineCore. `Request.append_output_token_ids` makes vLLM count, hash, schedule and stop as if
it had produced them itself: that is the state of a request that was preempted. What else leans on vLLM
(0.32) is in this file:

* `prefill_stats` is taken off the request until the step is built, because vLLM asserts that the KV found
  in a cache never exceeds the prompt. It comes back with prompt + delivered as its prompt length: so the
  front end knows that the ids were taken (see `vllm_front_end`).
* The grammar is advanced when the scheduler first asks for cached KV: then it has been compiled, and the
  first mask has not been made.
* The scheduler is found among the callers of `on_new_request`; a request that cannot be continued joins
  those whose grammar failed to compile, which vLLM ends with an error, visibly.
* Log probabilities of a prompt must come with a token, or vLLM's scheduler asserts. A prefill in several
  steps could complete the prompt before the last of them: such a request is ended.

Invariant: ids are taken whole or not at all, and a request with taken ids reaches the worker together
with them or is ended, whatever fails here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segue_core.messages.request import PARAMS_KEY, Delivered, parse_params
from segue_shim.guard import contained, nothing
from segue_shim.plan import pack_u32

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from segue_core.messages.status import Exact

logger = logging.getLogger("segue_shim")

MAX_FRAMES = 12


@dataclass(slots=True)
class Resumed:
    """A live request that came with delivered ids. `scheduler`: vLLM's. `stats`: detached for a while;
    `external` tokens of its KV come from a replica."""

    request: Request
    scheduler: Any
    ids: list[int]
    refusal: str = ""
    advanced: bool = False
    started: bool = False
    stats: Any = None
    external: int = 0


class OutputResumer:
    """Called by `vllm_connector` only. `can`: what the worker's self-test has shown; nothing until then."""

    def __init__(self, vocabulary: int, max_model_len: int) -> None:
        self.broken = False
        self.can: Collection[Exact] = ()
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._resumed: dict[str, Resumed] = {}

    def on_broken(self) -> None:
        """Those whose ids have not reached the worker are ended."""
        for resumed in self._resumed.values():
            if not resumed.started:
                _end(resumed, "a hook failed")

    @contained(nothing)
    def on_new_request(self, request: Request) -> None:
        """Take the delivered ids over, if there are any and everything about them is right."""
        if not _asks(request.kv_transfer_params):
            return
        scheduler = _find_scheduler()
        if scheduler is None:
            logger.warning("segue: %s starts from the beginning: no scheduler found", request.request_id)
            return
        params = parse_params(request.kv_transfer_params)
        ids = list(params.delivered[0].ids) if params is not None else []
        resumed = Resumed(request, scheduler, ids)
        resumed.refusal = self._refusal(request, params.delivered if params is not None else [])
        if not resumed.refusal and not ids:
            return
        self._resumed[request.request_id] = resumed
        if not resumed.refusal:
            request.append_output_token_ids(ids)

    def may_start(self, request: Request) -> bool:
        """The scheduler is about to look for cached KV. False: the request is being ended."""
        resumed = self._resumed.get(request.request_id)
        if resumed is None or resumed.started:
            return True
        if not resumed.refusal and self._ready(resumed):
            return True
        _end(resumed, resumed.refusal or "a hook failed")
        # Where it is true, vLLM starts a request whatever the connector says.
        request.skip_reading_prefix_cache = False
        return False

    @contained(lambda: False)
    def _ready(self, resumed: Resumed) -> bool:
        request = resumed.request
        if resumed.stats is None:
            resumed.stats = request.take_prefill_stats()
        if request.use_structured_output and not resumed.advanced:
            resumed.advanced = True
            manager = resumed.scheduler.structured_output_manager
            if not manager.accept_tokens(request, resumed.ids):
                resumed.refusal = "its grammar does not accept what was delivered"
        return not resumed.refusal

    @contained(nothing)
    def after_alloc(self, request: Request, external: int) -> None:
        """Blocks were found; `external` tokens of them are loaded. A request that has waited for its load is
        heard of once more, with none."""
        resumed = self._resumed.get(request.request_id)
        if resumed is not None:
            resumed.external = external or resumed.external

    def build(self, output: SchedulerOutput) -> dict[str, bytes]:
        """Requests that start in this step with taken ids, and the ids (packed u32) for the worker."""
        starting: dict[str, bytes] = {}
        if self._resumed:
            self._build(output, starting)
        return starting

    @contained(nothing)
    def _build(self, output: SchedulerOutput, starting: dict[str, bytes]) -> None:
        for new in output.scheduled_new_reqs:
            resumed = self._resumed.get(new.req_id)
            if resumed is not None and not resumed.refusal:
                starting[new.req_id] = pack_u32(resumed.ids)
                self._start(resumed, new, output.num_scheduled_tokens[new.req_id])

    def _start(self, resumed: Resumed, new: NewRequestData, scheduled: int) -> None:
        computed, parameters = new.num_computed_tokens, new.sampling_params
        stats, resumed.stats = resumed.stats, None
        if parameters.prompt_logprobs is not None and computed + scheduled < resumed.request.num_tokens:
            new.sampling_params = copy(parameters)  # the request's own, if the worker is in this process
            new.sampling_params.prompt_logprobs = None
            _end(resumed, "log probabilities of its prompt, and a prefill in several steps")
        elif stats is not None:
            external = min(resumed.external, computed)
            stats.set(
                num_prompt_tokens=resumed.request.num_prompt_tokens + len(resumed.ids),
                num_local_cached_tokens=computed - external,
                num_external_cached_tokens=external,
            )
            resumed.request.prefill_stats = stats
        resumed.started = True

    def finished(self, request_id: str) -> None:
        """The request is over, in whatever way."""
        self._resumed.pop(request_id, None)

    def _refusal(self, request: Request, delivered: list[Delivered]) -> str:
        """Why the ids cannot be taken; empty if they can."""
        parameters = request.sampling_params
        if not self._shown(request):
            return "the worker's self-test has not shown that it can be"
        if (
            request.prompt_token_ids is None
            or request.prompt_embeds is not None
            or request.mm_features
            or request.pooling_params is not None
            or request.resumable
            or request.num_output_tokens
        ):
            return "only a text request can be"
        if parameters.thinking_token_budget not in (None, -1):
            return "vLLM does not find the place in a thinking budget again"
        return refusal(
            delivered,
            ends={parameters.eos_token_id, *(parameters.stop_token_ids or ())},
            vocabulary=self._vocabulary,
            max_tokens=request.max_tokens,
            room=self._max_model_len - request.num_prompt_tokens,
        )

    def _shown(self, request: Request) -> bool:
        needs: set[Exact] = {"output"}
        if request.use_structured_output:
            needs.add("grammar")
        parameters = request.sampling_params
        if parameters is not None and parameters.sampling_type.name == "RANDOM_SEED":
            needs.add("seed")
        return needs.issubset(self.can)


def refusal(
    delivered: list[Delivered], *, ends: Collection[int | None], vocabulary: int, max_tokens: int, room: int
) -> str:
    """Why these ids cannot be the beginning of one answer of at most `max_tokens` ids, with `room` for all
    of its ids in the model's context, that any of `ends` ends; empty if they can."""
    if len(delivered) != 1:
        return f"{len(delivered)} choices where one was expected"
    (choice,) = delivered
    if choice.finish_reason or (choice.ids and choice.ids[-1] in ends):
        return "it is finished"
    if any(not 0 <= token < vocabulary for token in choice.ids):
        return f"an id outside the vocabulary of {vocabulary}"
    if len(choice.ids) >= min(max_tokens, room):
        return f"{len(choice.ids)} ids where {max_tokens} may be given and {room} have room"
    return ""


def _end(resumed: Resumed, reason: str) -> None:
    logger.warning("segue: %s cannot be continued: %s", resumed.request.request_id, reason)
    resumed.refusal = reason
    resumed.scheduler.grammar_compile_error_reqs.add(resumed.request.request_id)


def _asks(kv_transfer_params: object) -> bool:
    """Whether somebody wants ids taken, in whatever form."""
    if not isinstance(kv_transfer_params, dict):
        return False
    params = kv_transfer_params.get(PARAMS_KEY)
    return isinstance(params, dict) and bool(params.get("delivered"))


def _find_scheduler() -> Any:
    frame: Any = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        found = frame.f_locals.get("self")
        if hasattr(found, "structured_output_manager") and hasattr(found, "grammar_compile_error_reqs"):
            return found
        frame = frame.f_back
    return None

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

Invariant: ids are taken whole or not at all, and a request with taken ids reaches the worker together
with them or is ended.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segue_core.messages.request import PARAMS_KEY, Delivered, parse_params
from segue_shim.guard import contained, nothing
from segue_shim.plan import pack_u32

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

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
    """Called by `vllm_connector` only. `enabled` once the worker has passed its self-test."""

    def __init__(self, vocabulary: int, max_model_len: int) -> None:
        self.broken = False
        self.enabled = False
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._resumed: dict[str, Resumed] = {}

    def on_broken(self) -> None:
        """Those that wait with taken ids are ended one by one, see `may_start`."""

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
        if not resumed.refusal and not self._ready(resumed):
            resumed.refusal = resumed.refusal or "a hook failed"
        if not resumed.refusal:
            return True
        logger.warning("segue: %s cannot be continued: %s", request.request_id, resumed.refusal)
        resumed.scheduler.grammar_compile_error_reqs.add(request.request_id)
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
            elif request.structured_output_request.grammar.is_terminated():
                resumed.refusal = "its grammar is complete"
        return not resumed.refusal

    @contained(nothing)
    def after_alloc(self, request: Request, external: int) -> None:
        """Blocks were found; `external` tokens of them are loaded."""
        resumed = self._resumed.get(request.request_id)
        if resumed is not None:
            resumed.external = external

    @contained(dict)
    def build(self, output: SchedulerOutput) -> dict[str, bytes]:
        """Requests that start in this step with taken ids, and the ids (packed u32) for the worker."""
        if not self._resumed:
            return {}
        found = ((new, self._resumed.get(new.req_id)) for new in output.scheduled_new_reqs)
        return {
            new.req_id: self._start(resumed, new.num_computed_tokens)
            for new, resumed in found
            if resumed is not None and not resumed.refusal
        }

    def _start(self, resumed: Resumed, computed: int) -> bytes:
        resumed.started = True
        stats, resumed.stats = resumed.stats, None
        if stats is not None:
            external = min(resumed.external, computed)
            stats.set(
                num_prompt_tokens=resumed.request.num_prompt_tokens + len(resumed.ids),
                num_local_cached_tokens=computed - external,
                num_external_cached_tokens=external,
            )
            resumed.request.prefill_stats = stats
        return pack_u32(resumed.ids)

    @contained(nothing)
    def finished(self, request_id: str) -> None:
        """The request is over, in whatever way."""
        self._resumed.pop(request_id, None)

    def _refusal(self, request: Request, delivered: list[Delivered]) -> str:
        """Why the ids cannot be taken; empty if they can."""
        if not self.enabled:
            return "the worker's self-test has not passed"
        if (
            request.prompt_token_ids is None
            or request.prompt_embeds is not None
            or request.mm_features
            or request.pooling_params is not None
            or request.resumable
            or request.num_output_tokens
        ):
            return "only a text request can be"
        return refusal(
            delivered,
            vocabulary=self._vocabulary,
            max_tokens=request.max_tokens,
            room=self._max_model_len - request.num_prompt_tokens,
        )


def refusal(delivered: list[Delivered], *, vocabulary: int, max_tokens: int, room: int) -> str:
    """Why these ids cannot be the beginning of one answer of at most `max_tokens` ids, with `room` for all
    of its ids in the model's context; empty if they can."""
    if len(delivered) != 1:
        return f"{len(delivered)} choices where one was expected"
    (choice,) = delivered
    if choice.finish_reason:
        return "it is finished"
    if any(not 0 <= token < vocabulary for token in choice.ids):
        return f"an id outside the vocabulary of {vocabulary}"
    if len(choice.ids) >= min(max_tokens, room):
        return f"{len(choice.ids)} ids where {max_tokens} may be given and {room} have room"
    return ""


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

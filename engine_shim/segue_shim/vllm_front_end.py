"""Exact continuation, the API server's part: a resumed answer begins with what was delivered before.

`install` wraps `OutputProcessor.add_request` and `process_outputs` of vLLM (0.32) in memory. When the first
new token of a resumed request arrives, the delivered ids go in front of it, so that detokenizer, stop
strings, log probabilities, usage, and reasoning and tool parsers see the answer from its beginning; whoever
resumed it drops what was sent already. All at once, or, with `one_by_one`, as an output of their own each.

Of a request with several choices each child gets its own part of the parameters. A choice that is over
costs the engine one token of one prompt id, which is then replaced by what the choice was.

Leans on: children of `n > 1` come with `parent_req` and their index, their requests reach the engine core
only after `add_request`; the first output carries `prefill_stats`.

Invariants: the delivered ids are said again only if the engine core has said that it took them (see
`vllm_resume`); requests without Segue's parameters pass through untouched; nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from segue_core.messages.request import PARAMS_KEY, Delivered, SegueParams, choice_seq, parse_params
from segue_shim.vllm_collector import SeparateCollector, separate
from segue_shim.vllm_replay import pad, pieces

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger("segue_shim")

_WRAPPED = "_segue_wrapped"
_REPLAYS = "_segue_replays"
_EXTRA = "kv_transfer_params"
FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}
"""The ends that a delivered choice may have."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What to say again when the first output of a request comes. `finish`: the choice was over."""

    ids: list[int]
    prompt_tokens: int
    one_by_one: bool
    logprobs: bool
    finish: FinishReason | None = None
    stop_reason: int | str | None = None


def install() -> None:
    """Wrap the output processor; a second call changes nothing."""
    if installed():
        return
    add: Any = OutputProcessor.add_request
    process: Any = OutputProcessor.process_outputs

    def add_request(
        self: OutputProcessor,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        replay = None
        if _carries(request):
            try:
                choices = parent_req.n if parent_req is not None else 1
                replay = prepare(request, request_index, choices)
            except Exception:
                logger.exception("segue: the parameters of %s are left as they are", request.request_id)
        add(self, request, prompt, parent_req, request_index, queue)
        if replay is not None:
            try:
                _expect(self, request, replay, queue)
            except Exception:
                logger.exception("segue: %s does not begin with what was delivered", request.request_id)

    def process_outputs(
        self: OutputProcessor, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> Any:
        replays = self.__dict__.get(_REPLAYS)
        if not replays:
            return process(self, engine_core_outputs, *args, **kwargs)
        keeping: list[SeparateCollector] = []
        try:
            engine_core_outputs = _with_replays(self, replays, engine_core_outputs, keeping)
        except Exception:
            logger.exception("segue: resumed answers do not begin with what was delivered")
            replays.clear()
        try:
            return process(self, engine_core_outputs, *args, **kwargs)
        finally:
            for collector in keeping:
                collector.keeps = False

    for function in (add_request, process_outputs):
        setattr(function, _WRAPPED, True)
    OutputProcessor.add_request = add_request
    OutputProcessor.process_outputs = process_outputs


def installed() -> bool:
    """Whether both wrappers are in place."""
    methods = (OutputProcessor.add_request, OutputProcessor.process_outputs)
    return all(getattr(method, _WRAPPED, False) for method in methods)


def prepare(request: EngineCoreRequest, index: int, choices: int) -> Replay | None:
    """Give choice `index` of `choices` its own parameters; what to say again when it starts."""
    parameters = request.sampling_params
    params = parse_params(parameters.extra_args[_EXTRA])
    if params is None or request.resumable or request.prompt_token_ids is None:
        return None
    if choices > 1:
        params = _of_choice(params, index, choices)
        parameters = copy(parameters)  # shared between children
        transfer = parameters.extra_args[_EXTRA] | {PARAMS_KEY: msgspec.to_builtins(params)}
        parameters.extra_args = parameters.extra_args | {_EXTRA: transfer}
        request.sampling_params = parameters
    if len(params.delivered) != 1:
        return None  # nothing to say, or the engine core ends it
    (choice,) = params.delivered
    if not choice.ids and not choice.finish_reason:
        return None
    if choice.finish_reason and choice.finish_reason not in FINISHED:
        return None
    return Replay(
        ids=list(choice.ids),
        prompt_tokens=len(request.prompt_token_ids),
        one_by_one=params.one_by_one,
        logprobs=parameters.num_logprobs is not None,
        finish=FINISHED.get(choice.finish_reason),
        stop_reason=choice.stop_reason,
    )


def _carries(request: EngineCoreRequest) -> bool:
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    transfer = extra.get(_EXTRA) if extra else None
    return isinstance(transfer, dict) and PARAMS_KEY in transfer


def _of_choice(params: SegueParams, index: int, choices: int) -> SegueParams:
    """If there are not as many parts as choices, nobody knows whose they are: the engine core ends all."""
    fits = len(params.delivered) in (0, choices)
    delivered = params.delivered[index : index + 1] if fits else [Delivered(), Delivered()]
    return msgspec.structs.replace(params, seq=choice_seq(params.seq, index), delivered=delivered)


def _expect(processor: OutputProcessor, request: EngineCoreRequest, replay: Replay, queue: Any) -> None:
    if replay.finish is not None:
        if len(replay.ids) > request.sampling_params.max_tokens or not _known(processor, replay.ids):
            logger.warning("segue: %s: ids that cannot be its answer were delivered", request.request_id)
            return  # the engine core ends it
        _make_cheap(request)
    if replay.one_by_one and queue is not None:
        separate(queue)
    processor.__dict__.setdefault(_REPLAYS, {})[request.request_id] = replay


def _known(processor: OutputProcessor, ids: Sequence[int]) -> bool:
    """Ids of a finished choice are not seen by the engine core, but must not upset the detokenizer."""
    tokenizer = processor.tokenizer
    return tokenizer is None or not ids or max(ids) <= tokenizer.max_token_id


def _make_cheap(request: EngineCoreRequest) -> None:
    """What the engine core gets in place of a choice that is over: one greedy token after one prompt id."""
    request.sampling_params = SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, output_kind=request.sampling_params.output_kind
    )
    request.prompt_token_ids = request.prompt_token_ids[:1]
    request.mm_features = None
    request.prompt_embeds = None
    request.prompt_is_token_ids = None
    request.lora_request = None
    request.cache_salt = None


def _with_replays(
    processor: OutputProcessor,
    replays: dict[str, Replay],
    outputs: list[EngineCoreOutput],
    keeping: list[SeparateCollector],
) -> list[EngineCoreOutput]:
    """The outputs with what goes before some of them; `keeping`: the collectors that keep them apart."""
    for name in [name for name in replays if name not in processor.request_states]:
        del replays[name]  # aborted before it began
    result: list[EngineCoreOutput] = []
    for output in outputs:
        replay = replays.pop(output.request_id, None)
        if replay is None:
            result.append(output)
            continue
        result += _begin(output, replay)
        queue = processor.request_states[output.request_id].queue
        if replay.one_by_one and isinstance(queue, SeparateCollector):
            queue.keeps = True
            keeping.append(queue)
    return result


def _begin(output: EngineCoreOutput, replay: Replay) -> list[EngineCoreOutput]:
    """The first output of a resumed request, and what goes before it."""
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        return [output]
    if replay.finish is not None:
        return _finished(output, replay)
    stats = output.prefill_stats
    if stats is None or stats.num_prompt_tokens != replay.prompt_tokens + len(replay.ids):
        logger.warning("segue: the engine core has not taken the delivered ids of %s", output.request_id)
        return [output]
    # The work that was done, but never more prompt tokens than the prompt has.
    stats.num_prompt_tokens = replay.prompt_tokens
    stats.num_cached_tokens = min(stats.num_cached_tokens, replay.prompt_tokens)
    if not replay.one_by_one:
        return [pad(output, replay.ids, logprobs=replay.logprobs)]
    return pieces(output, replay.ids, logprobs=replay.logprobs)


def _finished(output: EngineCoreOutput, replay: Replay) -> list[EngineCoreOutput]:
    """A choice that was over, said again. Its engine core request has ended with this output."""
    # A stop string is found again by the detokenizer, which knows what of the text to hold back.
    by_string = isinstance(replay.stop_reason, str)
    finish = None if by_string else replay.finish
    stop_reason = None if by_string else replay.stop_reason
    over = msgspec.structs.replace(
        output, new_token_ids=[], new_logprobs=None, finish_reason=finish, stop_reason=stop_reason
    )
    if replay.one_by_one and len(replay.ids) > 1:
        last = pad(over, replay.ids[-1:], logprobs=replay.logprobs)
        said = pieces(last, replay.ids[:-1], logprobs=replay.logprobs)
    else:
        said = [pad(over, replay.ids, logprobs=replay.logprobs)]
    if by_string:
        # Ends the choice if the string is not found after all; ignored if it was.
        said.append(
            msgspec.structs.replace(
                output,
                new_token_ids=[],
                new_logprobs=None,
                finish_reason=replay.finish,
                stop_reason=replay.stop_reason,
                prefill_stats=None,
                events=None,
            )
        )
    return said

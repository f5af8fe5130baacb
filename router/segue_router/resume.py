"""How to resume: one pure function from (request, progress, what the next engine can do) to a plan.

Exact: the original request again, with the ids so far as output already produced; an engine with the shim
takes them as its own. By ids: prompt + delivered as the prompt; right for plain text only. Invariant: a plan
other than Refuse leads to an answer of which everything the client already has is a prefix. What cannot be
continued rightly is refused with a reason, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from segue_core.messages.request import Delivered, SegueParams
from segue_core.messages.status import Exact as Ability
from segue_router.obstacles import asks_tools
from segue_router.request import COMPLETIONS_PATH, GenerationRequest, with_params

CHAT_ONLY = frozenset(
    {
        "messages",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "reasoning_effort",
        "include_reasoning",
        "response_format",
        "logprobs",
        "top_logprobs",
        "modalities",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "return_prompt_text",
        "n",
    }
)
"""Fields of a chat request that mean nothing, or something else, to /v1/completions."""

OUTPUT_PENALTIES = ("presence_penalty", "frequency_penalty")
"""These look at the output alone, which starts anew."""


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """What is known of one choice of an answer."""

    ids: Sequence[int] = ()
    """All that engines named, in order."""
    delivered: int = 0
    """Of them, those whose text the client has, up to the last whole character."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of an answer at the moment its engine failed."""

    client_has: bool = False
    """The client received content (a role preamble alone is none)."""
    prompt_ids: Sequence[int] | None = None
    choices: tuple[ChoiceProgress, ...] = (ChoiceProgress(),)
    """By index; at least one."""
    finish_reason: str | None = None
    """Of the answer as a whole: set once every choice has its own."""
    closable: bool = True
    """Everything the client is owed after the finish can be said without an engine."""
    counted: bool = False
    """Usage is owed that no engine has said: it can be counted, but not in all its details."""
    ids_known: bool = True
    """The engine named the ids of everything it sent, and they were all kept."""
    overflow: bool = False
    """The answer outgrew the ids the router keeps."""
    whole_characters: bool = True
    """What the client has does not end inside a character."""
    parsed: bool = False
    """The engine's parsers took part (reasoning, tool calls): output is not plain text."""
    single: bool = True
    """The last event that was delivered was one token with its text."""
    text_may_lag: bool = False
    """The last delivered ids may have text that was not delivered: see `seam`."""
    recent_text: str = ""
    """The text of (at least) the last SEAM_IDS delivered ids."""

    @property
    def begun(self) -> bool:
        """Whether there is anything to go on after."""
        return self.prompt_ids is not None and any(choice.ids for choice in self.choices)

    @property
    def delivered_ids(self) -> Sequence[int]:
        """Of the first choice: what continuing by ids goes on after."""
        first = self.choices[0]
        return first.ids[: first.delivered]

    @property
    def delivered_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.delivered for choice in self.choices)

    @property
    def held_tokens(self) -> int:
        """Of the first choice: ids beyond those, without finished text."""
        return len(self.choices[0].ids) - self.choices[0].delivered


@dataclass(frozen=True, slots=True)
class Target:
    """What the engine that takes over can do."""

    max_model_len: int | None = None
    """Longest context of the answer: that of the engine on which it began."""
    model: str = ""
    """The model that a request without one began on."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters that the engine sets where the request does not."""
    exact: frozenset[Ability] = frozenset()
    """What its shim can continue exactly, by its own test."""
    give_back: int | None = 0
    """By ids: delivered ids whose text was not delivered, generated again. None: cannot be known."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Nothing was delivered: the original body again. What the router collected is thrown away."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exact:
    """The original body, and the ids so far as output: the engine says all of it again, and goes on."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ByIds:
    """Prompt + delivered ids as the new prompt, budgets reduced."""

    path: str
    body: dict[str, Any]
    dropped_tokens: int
    given_back: int = 0
    """Of the dropped tokens, those that count as delivered."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete as far as it is known; no engine is needed."""

    finish_reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """It cannot be continued rightly. `reason` is a label of a metric."""

    reason: str


Move = Restart | Exact | ByIds
Plan = Move | Finish | Refuse


def how_to_resume(
    request: GenerationRequest, progress: Progress, target: Target, params: SegueParams | None
) -> Plan:
    """Decide. `params` go to an engine with a daemon; what is decided does not depend on them."""
    if progress.finish_reason is not None:
        if progress.counted and not exactly_not(request, progress, target):
            return Exact(request.path, _exact_body(request, progress, target, params))
        return Finish(progress.finish_reason) if progress.closable else Refuse("unknown_usage")
    if progress.begun and not exactly_not(request, progress, target):
        return Exact(request.path, _exact_body(request, progress, target, params))
    obstacle = _obstacle(request, progress, target)
    if not obstacle and progress.begun and progress.delivered_ids:
        left = _tokens_left(request, progress, target)
        if left is None:
            obstacle = "unknown_model_length"
        elif left <= 0:
            return Finish("length")
        else:
            return _by_ids(request, progress, target, left, params)
    if not progress.client_has:
        return Restart(request.path, request.engine_body(params, target.model))
    return Refuse(obstacle or "unknown_token_ids")


def exactly_not(request: GenerationRequest, progress: Progress, target: Target) -> str:
    """Why `target` cannot continue the request exactly; empty if it can."""
    if request.exact_obstacle:
        return request.exact_obstacle
    if request.mode != "tracked":
        return "untracked"
    if progress.overflow:
        return "transcript_limit"
    if not progress.ids_known:
        return "unknown_token_ids"
    if request.samples and request.seed is None and request.body.get("seed") is None:
        return "unseeded"
    missing = request.needs - target.exact
    return f"engine_cannot_{min(missing)}" if missing else ""


def _exact_body(
    request: GenerationRequest, progress: Progress, target: Target, params: SegueParams | None
) -> dict[str, Any]:
    if params is not None:
        limit = _limit(request, progress, target)
        fed_to_parsers = request.api == "chat" and (progress.parsed or asks_tools(request.body))
        params = replace(
            params,
            delivered=[_delivered(choice, limit) for choice in progress.choices],
            one_by_one=fed_to_parsers,
        )
    return request.engine_body(params, target.model)


def _delivered(choice: ChoiceProgress, limit: int | None) -> Delivered:
    reason = choice.finish_reason or ("length" if limit is not None and len(choice.ids) >= limit else "")
    if reason and reason != "length":
        reason = "stop"  # what the API calls tool_calls is a stop to the engine
    return Delivered(list(choice.ids), reason, choice.stop_reason if reason else None)


def _obstacle(request: GenerationRequest, progress: Progress, target: Target) -> str:
    if request.obstacle:
        return request.obstacle
    if request.mode != "tracked":
        return "untracked"
    if progress.overflow:
        return "transcript_limit"
    if progress.parsed:
        return "parsed_output"
    if not progress.ids_known:
        return "unknown_token_ids"
    if not progress.whole_characters:
        return "unfinished_character"
    if any(target.defaults.get(name) and request.body.get(name) is None for name in OUTPUT_PENALTIES):
        return "penalties"
    if target.give_back is None:
        return "seam_text"
    return ""


def _tokens_left(request: GenerationRequest, progress: Progress, target: Target) -> int | None:
    """Output tokens that the uninterrupted request would still have been allowed; None: unknown."""
    limit = _limit(request, progress, target)
    return None if limit is None else limit - len(progress.delivered_ids) + (target.give_back or 0)


def _limit(request: GenerationRequest, progress: Progress, target: Target) -> int | None:
    """Most output tokens of a choice; None: unknown."""
    limits = []
    if request.max_tokens is not None:
        limits.append(request.max_tokens)
    if "max_tokens" in target.defaults:  # vLLM caps every request by it, whatever the request says
        limits.append(int(target.defaults["max_tokens"]))
    if target.max_model_len is not None:
        limits.append(target.max_model_len - len(progress.prompt_ids or ()))
    return min(limits, default=None)


def _by_ids(
    request: GenerationRequest, progress: Progress, target: Target, left: int, params: SegueParams | None
) -> ByIds:
    assert progress.prompt_ids is not None and target.give_back is not None
    body = with_params(request.body, params, target.model)
    if request.api == "chat":
        body = {key: value for key, value in body.items() if key not in CHAT_ONLY}
    delivered = len(progress.delivered_ids) - target.give_back
    body["prompt"] = [*progress.prompt_ids, *progress.delivered_ids[:delivered]]
    body["max_tokens"] = left
    if body.get("min_tokens"):
        body["min_tokens"] = max(0, body["min_tokens"] - delivered)
    body["stream"] = True
    body["return_token_ids"] = True
    body.pop("stream_options", None)
    body.pop("max_completion_tokens", None)
    body.pop("add_special_tokens", None)
    return ByIds(COMPLETIONS_PATH, body, progress.held_tokens + target.give_back, target.give_back)

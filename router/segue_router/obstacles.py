"""What stands in the way of continuing a request, by the fields of its body. Pure.

Three ways of asking: what keeps prompt + delivered ids from being the same request (`obstacle`), what keeps
the original request with its output so far from being continued (`exact_obstacle`), and what an engine
must be able to do for the latter (`needs`). When in doubt, something stands in the way.
"""

from __future__ import annotations

from typing import Any, Literal

from segue_core.messages.status import Exact

Api = Literal["completions", "chat"]
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's _SAMPLING_EPS)."""
BUDGETS = ("max_tokens", "max_completion_tokens", "min_tokens")


def count_prompts(api: Api, body: dict[str, Any]) -> int:
    """Prompts of one request: completions take several."""
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    return len(prompt) if api == "completions" and isinstance(prompt, list) and many else 1


def count_choices(api: Api, body: dict[str, Any]) -> int:
    """n times the number of prompts."""
    n = body.get("n")
    return max(1, n if isinstance(n, int) else 1) * count_prompts(api, body)


def needs(api: Api, body: dict[str, Any]) -> frozenset[Exact]:
    """What an engine must be able to continue for the answer to stay exact."""
    wanted: set[Exact] = {"output"}
    if _samples(body):
        wanted.add("seed")
    if _asks_structure(body) or (api == "chat" and asks_tools(body)):  # a grammar may force tool calls
        wanted.add("grammar")
    return frozenset(wanted)


def _samples(body: dict[str, Any]) -> bool:
    temperature = body.get("temperature")
    return not isinstance(temperature, (int, float)) or temperature >= GREEDY_BELOW


def asks_logprobs(api: Api, body: dict[str, Any]) -> bool:
    """Whether the answer has log probabilities."""
    asked = body.get("logprobs")
    return asked is not None if api == "completions" else bool(asked)


def asks_tools(body: dict[str, Any]) -> bool:
    """Whether the answer may call tools."""
    tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    return tools or bool(body.get("functions"))


def obstacle(api: Api, body: dict[str, Any]) -> str:
    """The first reason why prompt + delivered ids is not the same request; empty if it is.

    Reasons are labels of a metric. What only counts the union of prompt and output, or single positions
    (repetition_penalty, logit_bias, stop_token_ids, min_tokens with its budget reduced), is the same.
    """
    get = body.get
    checks: tuple[tuple[str, bool], ...] = (
        ("n", get("n") not in (None, 1) or get("best_of") not in (None, 1) or count_choices(api, body) != 1),
        ("beam_search", bool(get("use_beam_search"))),
        ("echo", bool(get("echo"))),
        ("logprobs", asks_logprobs(api, body) or get("prompt_logprobs") is not None),
        ("penalties", bool(get("presence_penalty")) or bool(get("frequency_penalty"))),
        ("bad_words", bool(get("bad_words"))),
        ("seed", get("seed") is not None and _samples(body)),
        ("stop", bool(get("stop"))),
        ("structured_output", _asks_structure(body)),
        ("tools", asks_tools(body)),
        ("multimodal", _is_multimodal(body)),
        ("prompt_embeds", get("prompt_embeds") is not None or bool(get("suffix"))),
        ("truncated_prompt", get("truncate_prompt_tokens") is not None),
        ("output_state", _has_state_of_its_own(body)),
        ("max_tokens", any(type(get(k)) not in (int, type(None)) for k in BUDGETS)),
    )
    return next((reason for reason, stands in checks if stands), "")


def exact_obstacle(api: Api, body: dict[str, Any]) -> str:
    """The first reason why not even the original request with its output so far can be continued."""
    get = body.get
    checks: tuple[tuple[str, bool], ...] = (
        ("several_prompts", count_prompts(api, body) != 1),
        ("n", get("best_of") not in (None, 1)),
        ("beam_search", bool(get("use_beam_search"))),
        ("multimodal", _is_multimodal(body)),
        ("prompt_embeds", get("prompt_embeds") is not None or bool(get("suffix"))),
        ("output_state", _has_state_of_its_own(body)),
        ("max_tokens", any(type(get(k)) not in (int, type(None)) for k in BUDGETS)),
    )
    return next((reason for reason, stands in checks if stands), "")


def _has_state_of_its_own(body: dict[str, Any]) -> bool:
    """Whether something beside the sampler may remember the output."""
    get = body.get
    return (
        get("thinking_token_budget") not in (None, -1)
        or bool(get("repetition_detection"))
        or bool(get("watermarking"))
        or bool(get("logits_processors"))
        or bool(get("vllm_xargs"))
    )


def _asks_structure(body: dict[str, Any]) -> bool:
    wanted = body.get("response_format")
    if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
        return True
    return any(
        value is not None and (key == "structured_outputs" or key.startswith("guided_"))
        for key, value in body.items()
    )


def asks_more_than_text(body: dict[str, Any]) -> bool:
    """Whether the answer may be heard or seen."""
    return body.get("modalities") not in (None, ["text"]) or body.get("audio") is not None


def _is_multimodal(body: dict[str, Any]) -> bool:
    if asks_more_than_text(body):
        return True
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type", "text") != "text":
                return True
    return False

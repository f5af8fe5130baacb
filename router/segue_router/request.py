"""What a client asks for: the generation request, read once.

Owns the meaning of the body's fields for failover: what has to be passed through untracked, and what
stands in the way of continuing by token ids. It never talks to an engine. The client's body is never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from segue_core.messages.request import PARAMS_KEY, SegueParams
from segue_router.errors import ClientError

Api = Literal["completions", "chat"]
Mode = Literal["tracked", "relay", "whole"]
"""tracked: streamed from the engine with token ids, can be resumed. relay: the client's stream, passed on
event by event. whole: an ordinary answer, read to its end before the client gets any of it."""

PATHS: dict[str, Api] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
COMPLETIONS_PATH = "/v1/completions"
COMPLETIONS_DEFAULT_MAX_TOKENS = 16
"""vLLM's default for /v1/completions (CompletionRequest.max_tokens)."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for a generation."""

    api: Api
    path: str
    body: dict[str, Any]
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    wants_ids: bool
    mode: Mode
    choices: int
    """How many choices the answer has (n times the number of prompts)."""
    obstacle: str
    """Why it cannot be continued by token ids; empty if it can."""

    @property
    def max_tokens(self) -> int | None:
        """The client's limit of output tokens; None: as many as the model has room for."""
        limit = self.body.get("max_tokens")
        if self.api == "chat":
            other = self.body.get("max_completion_tokens")
            return other if isinstance(other, int) else limit if isinstance(limit, int) else None
        return limit if isinstance(limit, int) else COMPLETIONS_DEFAULT_MAX_TOKENS

    def engine_body(self, params: SegueParams | None, model: str = "") -> dict[str, Any]:
        """The body for an engine that starts from the beginning; `model` for a request without one."""
        body = with_params(self.body, params, model)
        if self.mode == "tracked":
            body["stream"] = True
            body["return_token_ids"] = True
            if not self.stream:
                body["stream_options"] = {"include_usage": True}
        return body


def with_params(body: dict[str, Any], params: SegueParams | None, model: str = "") -> dict[str, Any]:
    """A copy of `body` with `params` beside its own `kv_transfer_params`, and `model` if it names none.

    What the client itself says under Segue's key is never passed on: it could name somebody else's sequence.
    """
    body = dict(body)
    if model and not body.get("model"):
        body["model"] = model
    own = body.get("kv_transfer_params")
    kept = {key: value for key, value in own.items() if key != PARAMS_KEY} if isinstance(own, dict) else {}
    if params is not None:
        body["kv_transfer_params"] = {**kept, PARAMS_KEY: msgspec.to_builtins(params)}
    elif isinstance(own, dict) and PARAMS_KEY in own:
        body["kv_transfer_params"] = kept
    return body


def parse_request(path: str, raw: bytes) -> GenerationRequest:
    """Read the body of a request to one of PATHS. Raises ClientError (400)."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ClientError(400, "the body must be a JSON object", code="invalid_json")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ClientError(400, "`model` must be a string", code="invalid_model")
    if type(body.get("n")) not in (int, type(None)):  # engines may read 2.0, "2" or true as a number
        raise ClientError(400, "`n` must be an integer", code="invalid_n")
    if not isinstance(body.get("stream"), (bool, type(None))):
        raise ClientError(400, "`stream` must be true or false", code="invalid_stream")
    api = PATHS[path]
    stream = body.get("stream") is True
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    return GenerationRequest(
        api=api,
        path=path,
        body=body,
        model=model or "",
        stream=stream,
        include_usage=stream and bool(options.get("include_usage")),
        continuous_usage=stream
        and bool(options.get("include_usage"))
        and bool(options.get("continuous_usage_stats")),
        wants_ids=bool(body.get("return_token_ids")),
        mode=_mode(api, body, stream),
        choices=_choices(api, body),
        obstacle=obstacle(api, body),
    )


def _choices(api: Api, body: dict[str, Any]) -> int:
    n = body.get("n")
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    prompts = len(prompt) if api == "completions" and isinstance(prompt, list) and many else 1
    return max(1, n if isinstance(n, int) else 1) * prompts


def _mode(api: Api, body: dict[str, Any], stream: bool) -> Mode:
    """Streaming inside must give what the client would have got from the engine itself."""
    if (
        _choices(api, body) != 1
        or body.get("n") not in (None, 1)
        or body.get("echo")
        or body.get("use_beam_search")
        or body.get("prompt_logprobs") is not None
        or body.get("prompt_embeds") is not None
        or body.get("best_of") not in (None, 1)
        or body.get("max_tokens") == 0
    ):
        return "relay" if stream else "whole"
    if not stream and (
        _asks_logprobs(api, body)
        or _asks_tools(body)
        or body.get("stream_options") is not None  # the engine refuses these without stream
        or body.get("kv_transfer_params") is not None  # answered only without stream
        or body.get("return_prompt_text")
    ):
        return "whole"
    return "tracked"


def _asks_logprobs(api: Api, body: dict[str, Any]) -> bool:
    asked = body.get("logprobs")
    return asked is not None if api == "completions" else bool(asked)


def _asks_tools(body: dict[str, Any]) -> bool:
    tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    return tools or bool(body.get("functions"))


def obstacle(api: Api, body: dict[str, Any]) -> str:
    """The first reason why prompt + delivered ids is not the same request; empty if it is.

    Reasons are labels of a metric. What only counts the union of prompt and output, or single positions
    (repetition_penalty, logit_bias, stop_token_ids, min_tokens with its budget reduced), is the same.
    """
    get = body.get
    checks: tuple[tuple[str, bool], ...] = (
        ("n", get("n") not in (None, 1) or get("best_of") not in (None, 1) or _choices(api, body) != 1),
        ("beam_search", bool(get("use_beam_search"))),
        ("echo", bool(get("echo"))),
        ("logprobs", _asks_logprobs(api, body) or get("prompt_logprobs") is not None),
        ("penalties", bool(get("presence_penalty")) or bool(get("frequency_penalty"))),
        ("bad_words", bool(get("bad_words"))),
        ("seed", get("seed") is not None and get("temperature") != 0),
        ("stop", bool(get("stop"))),
        ("structured_output", _asks_structure(body)),
        ("tools", _asks_tools(body)),
        ("multimodal", _is_multimodal(body)),
        ("prompt_embeds", get("prompt_embeds") is not None or bool(get("suffix"))),
        ("truncated_prompt", get("truncate_prompt_tokens") is not None),
        (
            "output_state",  # these look at the output alone, which starts anew
            get("thinking_token_budget") not in (None, -1)
            or bool(get("repetition_detection"))
            or bool(get("watermarking"))
            or bool(get("logits_processors"))
            or bool(get("vllm_xargs")),
        ),
        ("max_tokens", any(type(get(k)) not in (int, type(None)) for k in BUDGETS)),
    )
    return next((reason for reason, stands in checks if stands), "")


BUDGETS = ("max_tokens", "max_completion_tokens", "min_tokens")


def _asks_structure(body: dict[str, Any]) -> bool:
    wanted = body.get("response_format")
    if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
        return True
    return any(
        value is not None and (key == "structured_outputs" or key.startswith("guided_"))
        for key, value in body.items()
    )


def _is_multimodal(body: dict[str, Any]) -> bool:
    if body.get("modalities") not in (None, ["text"]) or body.get("audio") is not None:
        return True
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type", "text") != "text":
                return True
    return False

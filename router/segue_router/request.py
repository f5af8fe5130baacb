"""What a client asks for: the generation request, read once.

Owns the meaning of the body's fields for failover: what an engine must be able to do to continue it exactly,
and what stands in the way of that, or of continuing it by token ids. It never talks to an engine. The
client's body is never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import msgspec

from segue_core.messages.request import PARAMS_KEY, Replication, SegueParams
from segue_core.messages.status import Exact
from segue_router.errors import ClientError
from segue_router.obstacles import (
    Api,
    asks_logprobs,
    asks_more_than_text,
    asks_tools,
    count_choices,
    exact_obstacle,
    needs,
    obstacle,
)

Mode = Literal["tracked", "whole"]
"""tracked: streamed from the engine, whatever the client gets. whole: an ordinary answer, read to its end
before the client gets any of it."""

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
    exact_obstacle: str
    """Why no engine could continue it exactly; empty if one can that does what it `needs`."""
    needs: frozenset[Exact]
    names_ids: bool
    """Whether engines are asked to name the token ids."""
    echoed: str = ""
    """The prompt that a completion begins with, if the client wants it there: an engine that names ids
    leaves it out (vLLM 0.32)."""
    seed: int | None = None
    """The router's own, for a client that samples without one: only engines see it."""

    @property
    def max_tokens(self) -> int | None:
        """The client's limit of output tokens; None: as many as the model has room for."""
        limit = self.body.get("max_tokens")
        if self.api == "chat":
            other = self.body.get("max_completion_tokens")
            return other if isinstance(other, int) else limit if isinstance(limit, int) else None
        return limit if isinstance(limit, int) else COMPLETIONS_DEFAULT_MAX_TOKENS

    @property
    def samples(self) -> bool:
        """Whether chance decides, unless an engine's own defaults say otherwise."""
        return "seed" in self.needs

    def seeded(self, seed: int | None) -> GenerationRequest:
        """The same request, whose random draws can be continued; None: as the client sent it."""
        return replace(self, seed=seed)

    def engine_body(self, params: SegueParams | None, model: str = "") -> dict[str, Any]:
        """The body for an engine that starts from the beginning, or that continues it exactly; `model` for a
        request without one."""
        body = with_params(self.body, params, model)
        if self.seed is not None:
            body["seed"] = self.seed
        if self.mode == "tracked":
            body["stream"] = True
            if self.names_ids:
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


def replication_of(header: str | None) -> Replication:
    """How the client wants the KV of its request replicated. Raises ClientError (400)."""
    word = (header or "normal").strip().lower()
    for known in get_args(Replication):
        if word == known:
            return cast(Replication, known)
    known_words = ", ".join(get_args(Replication))
    raise ClientError(
        400,
        f"`x-segue-replication` is {word[:32]!r}: expected one of {known_words}",
        code="invalid_replication",
    )


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
    wants_ids = bool(body.get("return_token_ids"))
    echoed = _echoed(body) if api == "completions" and body.get("echo") and not wants_ids else ""
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
        wants_ids=wants_ids,
        mode="tracked" if stream else _mode(api, body),
        choices=count_choices(api, body),
        obstacle=obstacle(api, body),
        exact_obstacle=exact_obstacle(api, body),
        needs=needs(api, body),
        names_ids=wants_ids or api == "chat" or not body.get("echo") or bool(echoed),
        echoed=echoed,
    )


def _echoed(body: dict[str, Any]) -> str:
    """The text of the only prompt, if the body has it as text and the engine takes it as it is."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    cut = body.get("truncate_prompt_tokens") is not None
    return prompt if isinstance(prompt, str) and not cut else ""


def _mode(api: Api, body: dict[str, Any]) -> Mode:
    """For an answer that is not streamed: streaming inside must give what the engine itself would have."""
    whole = (
        count_choices(api, body) != 1
        or body.get("n") not in (None, 1)
        or body.get("echo")
        or body.get("use_beam_search")
        or body.get("prompt_logprobs") is not None
        or body.get("prompt_embeds") is not None
        or body.get("best_of") not in (None, 1)
        or body.get("max_tokens") == 0
        or asks_logprobs(api, body)
        or asks_tools(body)
        or asks_more_than_text(body)
        or body.get("stream_options") is not None  # the engine refuses these without stream
        or body.get("kv_transfer_params") is not None  # answered only without stream
        or body.get("return_prompt_text")
    )
    return "whole" if whole else "tracked"

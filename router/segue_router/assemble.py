"""The ordinary, non-streamed response object, assembled from a transcript. Pure."""

from __future__ import annotations

from typing import Any

from segue_router.choice import MAIN
from segue_router.request import GenerationRequest
from segue_router.transcript import Transcript


def response_object(request: GenerationRequest, transcript: Transcript) -> dict[str, Any]:
    """What the engine would have answered without `stream`, from a finished transcript."""
    (told,) = transcript.choices
    texts = {field: "".join(pieces) for field, pieces in told.texts.items()}
    content = texts.pop(MAIN, "")
    choice: dict[str, Any] = {"index": 0}
    if request.api == "chat":
        # Where a parser moved everything elsewhere (reasoning), the content is null, as vLLM has it.
        plain = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        content_or_null = content or (None if texts else "")
        choice["message"] = {"role": transcript.role, "content": content_or_null} | plain | texts
    else:
        choice["text"] = content
    choice["logprobs"] = None
    choice["finish_reason"] = told.finish_reason
    choice["stop_reason"] = told.stop_reason
    body: dict[str, Any] = {
        "id": transcript.id,
        "object": "chat.completion" if request.api == "chat" else "text_completion",
        "created": transcript.created,
        "model": transcript.model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": transcript.usage,
        "kv_transfer_params": None,
        **transcript.extra,
    }
    if request.wants_ids:
        choice["token_ids"] = told.ids
        (body if request.api == "chat" else choice)["prompt_token_ids"] = transcript.prompt_ids
    return body

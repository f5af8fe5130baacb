"""Events of an OpenAI-compatible stream: decoded, checked, and taken apart into pieces. Pure.

Two ways in: `Quick` recognises the usual event (one choice, plain text, nothing else of note) from typed
fields alone, so that its bytes can be passed on nearly as they are; everything else is decoded whole.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue_router.choice import Piece
from segue_router.errors import MalformedEvent, fault_in
from segue_router.obstacles import Api

PLAIN_DELTA = frozenset({"role", "content"})
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding an engine's JSON raises; msgspec.ValidationError is a DecodeError."""
_IDS = b',"token_ids":['


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    content: str


class _ChatChoice(msgspec.Struct):
    delta: _Delta
    token_ids: list[int]
    index: int = 0
    finish_reason: None = None
    logprobs: None = None


class _Chat(msgspec.Struct):
    choices: tuple[_ChatChoice]
    error: None = None


class _TextChoice(msgspec.Struct):
    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: None = None
    logprobs: None = None
    prompt_token_ids: None = None


class _Text(msgspec.Struct):
    choices: tuple[_TextChoice]
    error: None = None


_chat = msgspec.json.Decoder(_Chat)
_text = msgspec.json.Decoder(_Text)


def quick_chat(payload: bytes) -> tuple[int, str, list[int]] | None:
    """(index, text, ids) of an event of one choice that has plain text with ids and nothing else."""
    try:
        (choice,) = _chat.decode(payload).choices
        _ = payload.isascii() or payload.decode()  # fields that are passed over were not looked at
    except UNREADABLE:
        return None
    return choice.index, choice.delta.content, choice.token_ids


def quick_text(payload: bytes) -> tuple[int, str, list[int]] | None:
    """The same for /v1/completions."""
    try:
        (choice,) = _text.decode(payload).choices
        _ = payload.isascii() or payload.decode()  # fields that are passed over were not looked at
    except UNREADABLE:
        return None
    return choice.index, choice.text, choice.token_ids


def event_without_ids(payload: bytes) -> bytes | None:
    """`payload` as an event without its `token_ids`; None if they are not found where engines put them.

    Looking for bytes is enough: inside a JSON string the quotes would be escaped.
    """
    start = payload.find(_IDS)
    end = payload.find(b"]", start) + 1
    if start < 0 or not end or payload.find(_IDS, end) >= 0:
        return None
    return b"data: " + payload[:start] + payload[end:] + b"\n\n"


def decode_event(payload: bytes) -> dict[str, Any]:
    """An event's JSON object. Raises MalformedEvent, or EngineFault if it says that the request failed."""
    try:
        chunk = msgspec.json.decode(payload)
    except UNREADABLE as error:
        raise MalformedEvent(f"an event is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise MalformedEvent("an event is not a JSON object")
    fault = fault_in(chunk)
    if fault is not None:
        raise fault
    return chunk


def choices_in(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an event. Raises MalformedEvent."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise MalformedEvent("an event without `choices`")
    return choices


def piece_in(api: Api, choice: dict[str, Any]) -> tuple[Piece, str, bool]:
    """(what it says, its role, whether it names ids).

    Raises MalformedEvent.
    """
    ids = ids_in(choice.get("token_ids"))
    finish = choice.get("finish_reason") or None  # some engines say "" until they finish
    if finish is not None and not isinstance(finish, str):
        raise MalformedEvent("`finish_reason` is not a string")
    logprobs = choice.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, dict):
        raise MalformedEvent("`logprobs` is not an object")
    piece = Piece(
        ids=ids or [], logprobs=logprobs, finish_reason=finish, stop_reason=choice.get("stop_reason")
    )
    if api == "completions":
        text = choice.get("text")
        if not isinstance(text, str):
            raise MalformedEvent("a completion event without text")
        piece.text = text
        return piece, "", ids is not None
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        raise MalformedEvent("a chat event without delta")
    content, role = delta.get("content"), delta.get("role")
    if content is not None and not isinstance(content, str):
        raise MalformedEvent("a chat event whose content is not text")
    piece.text = content or ""
    for name, value in delta.items():
        if not value or name in PLAIN_DELTA:
            continue
        if name == "tool_calls":
            piece.calls = _calls_in(value)
        elif isinstance(value, str):
            piece.more[name] = value
        else:
            piece.odd = True
    return piece, role if isinstance(role, str) else "", ids is not None


def _calls_in(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise MalformedEvent("`tool_calls` is not a list")
    for delta in value:
        if not isinstance(delta, dict) or type(delta.get("index")) is not int:
            raise MalformedEvent("a tool-call delta without an index")
        function = delta.get("function") or {}
        texts = [function.get(key) for key in ("name", "arguments")] if isinstance(function, dict) else [0]
        if any(not isinstance(text, (str, type(None))) for text in texts):
            raise MalformedEvent("a tool-call delta whose function is none")
    return value


def ids_in(value: object) -> list[int] | None:
    """Token ids; None if there are none. Raises MalformedEvent."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise MalformedEvent("token ids are not a list of integers")
    return value

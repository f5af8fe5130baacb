"""What a fake engine says: its next token is a function of all ids before it. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

EOS = 2

EMOJI = {300: "😀".encode(), 400: "好".encode()}

CHAR = 1000
"""Prompt text is one token a character, CHAR + its code point."""


def piece(token: int) -> bytes:
    """The bytes of one token."""
    if token == EOS:
        return b""
    if token >= CHAR:
        return chr(token - CHAR).encode()
    for start, encoded in EMOJI.items():
        if start <= token < start + len(encoded):
            return encoded[token - start : token - start + 1]
    return f" w{token}".encode()


def next_token(ids: list[int]) -> int:
    """Deterministic: inside a character its next byte, else by the hash of everything before."""
    last = ids[-1]
    for start, encoded in EMOJI.items():
        if start <= last < start + len(encoded) - 1:
            return last + 1
    number = int.from_bytes(hashlib.blake2b(repr(ids).encode(), digest_size=4).digest(), "big")
    kind = number % 100
    if kind < 30:
        return 300 if kind < 15 else 400
    return 10 + number % 180


def encode(text: str) -> list[int]:
    return [CHAR + ord(c) for c in text]


def prompt_ids(path: str, body: dict[str, Any]) -> list[int]:
    """The prompt as ids: given, or the text, or the templated messages."""
    if path == "/v1/chat/completions":
        return encode("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]) + "<assistant>")
    prompt = body["prompt"]
    return list(prompt) if isinstance(prompt, list) else encode(prompt)


def generate(path: str, body: dict[str, Any]) -> tuple[list[int], list[int], str]:
    """(prompt ids, output ids, finish_reason) of an uninterrupted answer."""
    prompt = prompt_ids(path, body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is None:
        limit = 16 if path == "/v1/completions" else MODEL_LEN - len(prompt)
    limit = min(limit, MODEL_LEN - len(prompt))
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        token = next_token(ids)
        if body.get("eos_at") == len(ids) - body.get("eos_base", len(prompt)):
            token = EOS
        ids.append(token)
        if token == EOS:
            return prompt, ids[len(prompt) :], "stop"
    return prompt, ids[len(prompt) :], "length"


def text_of(ids: list[int]) -> str:
    """What a client sees of whole characters."""
    return b"".join(map(piece, ids)).decode("utf-8", errors="ignore")


MODEL_LEN = 512

MODEL = "fake"

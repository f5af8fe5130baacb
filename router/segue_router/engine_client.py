"""What the router asks an engine beside generations: is it well, what does it serve, what text are these ids.

Owns the HTTP of it and the shape of the answers; what follows from them is decided elsewhere. Every call has
a deadline and none of them raises.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from segue_router.errors import UpstreamFailure

MAX_MODELS = 1_024
MAX_ANSWER_BYTES = 4 << 20
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding JSON of strangers raises; msgspec.ValidationError is a DecodeError."""
REACH = (aiohttp.ClientError, OSError, TimeoutError)
NO_ENTRY = frozenset({401, 403})

Cards = dict[str, dict[str, Any]]
"""Model id to its card in `/v1/models`."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a probe found. `problem`: empty when all is well. `refused`: nothing listens there.

    `silent`: nothing came back at all, which may be the network's fault, or our own.
    """

    problem: str = ""
    refused: bool = False
    silent: bool = False
    models: Cards = field(default_factory=dict)


def is_refusal(error: aiohttp.ClientConnectorError) -> bool:
    """Whether the host itself answered that nothing listens there; no route to it proves nothing."""
    return error.os_error.errno == errno.ECONNREFUSED


class EngineClient:
    """One engine. `url` is its base URL; `key`, if any, is sent with what the router itself asks."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str = "") -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def healthy(self, timeout_ms: int) -> bool:
        """Whether its `/health` is good right now. Asked by many streams at once when an engine fails: their
        connections are not kept, for the probes would use them in turn and none would ever be idle."""
        timeout = aiohttp.ClientTimeout(total=timeout_ms / 1000)
        headers = {**self._headers, "Connection": "close"}
        try:
            async with self._session.get(f"{self._url}/health", headers=headers, timeout=timeout) as response:
                return response.status == 200
        except REACH:
            return False

    async def look(self, timeout_ms: int, connect_ms: int) -> Look:
        """Its `/health` and its models."""
        timeout = aiohttp.ClientTimeout(total=timeout_ms / 1000, sock_connect=connect_ms / 1000)
        try:
            for path in ("/health", "/v1/models"):
                async with self._session.get(
                    self._url + path, headers=self._headers, timeout=timeout
                ) as response:
                    if response.status != 200:
                        return Look(self._not_ok(path, response.status))
                    raw = await at_most(response, MAX_ANSWER_BYTES)
        except aiohttp.ClientConnectorError as error:
            refused = is_refusal(error)
            return Look(f"cannot connect: {error}", refused=refused, silent=not refused)
        except REACH as error:
            return Look(f"no answer to a probe: {type(error).__name__} {error}".rstrip(), silent=True)
        found = _model_cards(raw)
        if found is None:
            return Look("/v1/models answers something else than a list of models")
        return Look(models=found)

    def _not_ok(self, path: str, status: int) -> str:
        said = f"{path} answers {status}"
        if status not in NO_ENTRY:
            return said
        what = "does not accept the key in" if self._headers else "wants a key: set"
        return f"configuration: {said}: it {what} the variable that its `api_key_env` names"

    async def text_of(
        self, tokens: Sequence[int], model: str, headers: Mapping[str, str], timeout_ms: float
    ) -> str | None:
        """The text of `tokens` by its tokenizer (vLLM's `/detokenize`); None: it does not say.

        Raises UpstreamFailure if nothing is heard of it.
        """
        body: dict[str, Any] = {"tokens": list(tokens)}
        if model:
            body["model"] = model
        try:
            async with self._session.post(
                f"{self._url}/detokenize",
                data=msgspec.json.encode(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=max(0.001, timeout_ms / 1000)),
            ) as response:
                if response.status != 200:
                    return None
                raw = await at_most(response, MAX_ANSWER_BYTES)
        except REACH as error:
            raise UpstreamFailure("connect", f"/detokenize: {type(error).__name__}: {error}") from error
        try:
            return msgspec.json.decode(raw, type=_Text).prompt
        except UNREADABLE:
            return None


class _Text(msgspec.Struct):
    prompt: str


async def at_most(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, cut at `limit` bytes (and then not JSON any more)."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body[:limit])


def _model_cards(raw: bytes) -> Cards | None:
    """From an answer of `/v1/models`; None if it is not one."""
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE:
        return None
    cards = body.get("data") if isinstance(body, dict) else None
    if not isinstance(cards, list):
        return None
    return {
        card["id"]: card
        for card in cards[:MAX_MODELS]
        if isinstance(card, dict) and isinstance(card.get("id"), str)
    }

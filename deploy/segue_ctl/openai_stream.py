"""A minimal client of the OpenAI streaming API that notes when each token arrived.

What the client sees is all that counts here: bytes may be cut anywhere, lines end in LF or CRLF, and
an error event or a stream that ends without `[DONE]` is a failure, whatever came before.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from segue_core.errors import SegueError

MAX_EVENT_BYTES = 8 << 20
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=180)


class StreamFailed(SegueError):
    """The answer did not come to its end as the API promises."""


class SseParser:
    """Server-sent events out of bytes that arrive in pieces: `feed` returns the data of whole events."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._limit = max_event_bytes

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises StreamFailed if an event is longer than the limit."""
        events: list[bytes] = []
        self._line += piece
        while (end := self._line.find(b"\n")) >= 0:
            line = bytes(self._line[:end]).removesuffix(b"\r")
            del self._line[: end + 1]
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        if len(self._line) + sum(map(len, self._data)) > self._limit:
            raise StreamFailed(f"an event of more than {self._limit} bytes")
        return events


@dataclass(frozen=True)
class Piece:
    """What one event carried. `at_ns`: monotonic time of arrival."""

    at_ns: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    finish_reason: str = ""
    completion_tokens: int | None = None


@dataclass
class Answer:
    """A whole answer: its text, its token ids and when each token arrived."""

    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_at_ns: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    finish_reason: str = ""
    completion_tokens: int | None = None
    started_ns: int = 0

    def add(self, piece: Piece) -> None:
        """Append one event's share."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.token_at_ns += [piece.at_ns] * len(piece.token_ids)
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.completion_tokens is not None:
            self.completion_tokens = piece.completion_tokens

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return (self.token_at_ns[0] - self.started_ns) / 1e6 if self.token_at_ns else 0.0

    @property
    def itl_ms(self) -> list[float]:
        """Times between tokens."""
        times = self.token_at_ns
        return [(after - before) / 1e6 for before, after in pairwise(times)]


def read_event(data: bytes, at_ns: int) -> Piece:
    """Decode one event of a chat or plain completion. Raises StreamFailed for an error event or nonsense."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise StreamFailed(f"an event that is not JSON: {data[:80]!r}") from error
    if not isinstance(body, dict):
        raise StreamFailed(f"an event that is not an object: {data[:80]!r}")
    if "error" in body:
        detail = body["error"]
        raise StreamFailed(f"error event: {detail.get('message') if isinstance(detail, dict) else detail}")
    usage = body.get("usage") or {}
    choices = body.get("choices") or [{}]
    choice: dict[str, Any] = choices[0]
    return Piece(
        at_ns=at_ns,
        text=choice.get("text") or (choice.get("delta") or {}).get("content") or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        finish_reason=choice.get("finish_reason") or "",
        completion_tokens=usage.get("completion_tokens"),
    )


class OpenStream:
    """An answer that is arriving: its headers, then its pieces."""

    def __init__(self, answer: aiohttp.ClientResponse, started_ns: int) -> None:
        self._answer = answer
        self.started_ns = started_ns
        self.headers: Mapping[str, str] = {key.lower(): value for key, value in answer.headers.items()}

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until `[DONE]`. Raises StreamFailed for every other end."""
        parser = SseParser()
        try:
            async for data in self._answer.content.iter_any():
                at_ns = time.monotonic_ns()
                for event in parser.feed(data):
                    if event == b"[DONE]":
                        return
                    yield read_event(event, at_ns)
        except (aiohttp.ClientError, OSError) as error:
            raise StreamFailed(f"the stream broke: {error}") from error
        raise StreamFailed("the stream ended without [DONE]")


@asynccontextmanager
async def open_stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[OpenStream]:
    """POST `body` with streaming, usage and token ids asked for. Raises StreamFailed if it is refused."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    started_ns = time.monotonic_ns()
    try:
        async with session.post(url, json=asked, timeout=_TIMEOUT) as answer:
            if answer.status != 200:
                raise StreamFailed(f"{url} answers {answer.status}: {(await answer.text())[:300]}")
            yield OpenStream(answer, started_ns)
    except (aiohttp.ClientError, OSError) as error:
        raise StreamFailed(f"{url}: {error}") from error


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """A whole answer."""
    async with open_stream(session, url, body) as stream:
        answer = Answer(headers=stream.headers, started_ns=stream.started_ns)
        async for piece in stream.pieces():
            answer.add(piece)
    return answer

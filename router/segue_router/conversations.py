"""Where each conversation was last: which engine wrote what was said, and under which name. Pure.

A conversation is called by the session that the client names, else by what was said so far: each turn of a
chat repeats the messages of the turn before, so it is found under a digest of them. Nothing here decides, and
a memory that is wrong or lost costs time only: engines compare token ids. Invariant: at most `limit` entries,
the least recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from segue_router.request import GenerationRequest

LOOK_BACK = 32
"""Messages that may have come since the last turn (the answer, the results of tools, the next question)."""


@dataclass(frozen=True, slots=True)
class Last:
    """The latest answer of a conversation: sequence `seq`, of `tokens` tokens with its prompt, written by
    that life of `engine`, whose KV has that fingerprint (empty: not known)."""

    seq: str
    engine: str
    life: int
    tokens: int
    fingerprint: str


class Conversations:
    """The last place of up to `limit` conversations."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: OrderedDict[bytes, Last] = OrderedDict()

    def find(self, names: Sequence[bytes]) -> Last | None:
        """The first of `names` that is known."""
        for name in names:
            last = self._last.get(name)
            if last is not None:
                self._last.move_to_end(name)
                return last
        return None

    def note(self, name: bytes, last: Last) -> None:
        """The conversation was there last."""
        self._last[name] = last
        self._last.move_to_end(name)
        while len(self._last) > self._limit:
            self._last.popitem(last=False)

    def __len__(self) -> int:
        return len(self._last)


def names_of(request: GenerationRequest, key: str) -> tuple[bytes, ...]:
    """What the conversation may be known as, best first; the first is its name after this turn.

    `key`: its affinity (empty: it has none, and no name either). Names are digests: a client's own may be as
    long as a request.
    """
    if not key:
        return ()
    messages = request.body.get("messages")
    digest = xxhash.xxh3_128()  # of no use to whoever makes two collide: it is a hint
    digest.update(msgspec.json.encode([request.model, request.body.get("cache_salt")]))
    if key.startswith("session:") or not isinstance(messages, list) or not messages:
        digest.update(key.encode(errors="surrogatepass"))
        return (digest.digest(),)
    names: list[bytes] = []
    for position, message in enumerate(messages):
        digest.update(b"\0" + msgspec.json.encode(message))
        if position >= len(messages) - 1 - LOOK_BACK:
            names.append(digest.digest())
    return tuple(reversed(names))


def continues(body: dict[str, Any]) -> bool:
    """Whether the request tells of an earlier answer: some engine has, or had, the KV of most of it."""
    messages = body.get("messages")
    return isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("role") == "assistant" for message in messages
    )

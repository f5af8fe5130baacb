"""Which engine: pure functions that rank candidates. Filters of availability come before affinity.

No I/O and no memory: affinity is rendezvous hashing, so when an engine leaves only its own sessions move.
Where a conversation was last is remembered elsewhere (`conversations`) and comes in with the candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from segue_router.request import GenerationRequest

OVERLOAD_FACTOR = 2
OVERLOAD_SLACK = 4
"""An engine with more than factor * (least load) + slack requests gives up its sessions' affinity."""
LOAD_BYTES_PER_TOKEN = 400_000
"""Bytes whose loading takes as long as recomputing one token: 2 GB/s against 5,000 tokens/s of prefill."""
QUEUE_TOKENS = 64
"""What one running request on an engine costs a newcomer, in recomputed tokens."""
CHARS_PER_ID = 4
USER_CHARS = 1_024
"""Of a user's name; it is hashed once an engine."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a request, and what its daemon holds of the sequence."""

    name: str
    state: Literal["up", "suspect", "down"] = "up"
    active: int = 0
    fingerprint: str = ""
    watermark: int = 0
    replica_bytes: int = 0
    wrote: bool = False
    """It wrote the last turn of the conversation in its present life: its own prefix cache has that."""


def rank_new(candidates: Sequence[Candidate], key: str) -> list[str]:
    """Best first, for a request that starts. `key`: what it should stay together with; empty: nothing."""
    available = _most_available(candidates)
    ceiling = _ceiling(available)

    def order(candidate: Candidate) -> tuple[bool, int, int]:
        overloaded = candidate.active > ceiling
        load = candidate.active if overloaded or not key else 0
        return overloaded, load, -_score(key, candidate.name)

    return [candidate.name for candidate in sorted(available, key=order)]


def home_of(names: Sequence[str], key: str) -> str:
    """The engine of `key` when all are well and idle; empty without engines."""
    return max(names, key=lambda name: _score(key, name), default="")


def at_writer(candidates: Sequence[Candidate], key: str) -> str | None:
    """The engine that has the conversation in its own cache, if nothing that daemons could say matters: it is
    its home and not overloaded, or nobody has less to do."""
    available = _most_available(candidates)
    writer = next((each for each in available if each.wrote), None)
    if writer is None:
        return None
    if writer.active <= min(each.active for each in available) or rank_new(available, key)[0] == writer.name:
        return writer.name
    return None


def worth_asking(candidates: Sequence[Candidate]) -> list[str]:
    """The engines whose daemons could decide where the next turn goes: whoever has as much to do as the one
    that has the conversation in its own cache is no cheaper than that."""
    available = _most_available(candidates)
    limit = min((each.active for each in available if each.wrote), default=None)
    found = [each.name for each in available if limit is None or each.active < limit]
    return found if len(available) > 1 else []


def rank_for_turn(candidates: Sequence[Candidate], key: str, *, tokens: int, fingerprint: str) -> list[str]:
    """Best first, for the next turn of a conversation of `tokens` tokens: what is cheapest among those that
    are not overloaded; where nothing decides, as `rank_new`. `fingerprint`: of its KV."""
    available = _most_available(candidates)
    ceiling = _ceiling(available)

    def order(candidate: Candidate) -> tuple[bool, float, int, int]:
        overloaded = candidate.active > ceiling
        cost = candidate.active if overloaded else _cost(candidate, tokens, fingerprint)
        return overloaded, cost, candidate.active, -_score(key, candidate.name)

    return [candidate.name for candidate in sorted(available, key=order)]


def rank_for_resume(candidates: Sequence[Candidate], *, tokens: int, fingerprint: str) -> list[str]:
    """Cheapest to the next token first. `tokens`: whose KV is needed; `fingerprint`: of the failed engine."""

    def order(candidate: Candidate) -> tuple[float, int, str]:
        return _cost(candidate, tokens, fingerprint), candidate.active, candidate.name

    return [candidate.name for candidate in sorted(_most_available(candidates), key=order)]


def _cost(candidate: Candidate, tokens: int, fingerprint: str) -> float:
    """To the next token there, in tokens that are computed: what is not held, loading the rest, the queue."""
    queue = QUEUE_TOKENS * candidate.active
    if candidate.wrote:
        return queue
    loadable = bool(fingerprint) and candidate.fingerprint == fingerprint
    held = min(candidate.watermark, tokens) if loadable else 0
    load = candidate.replica_bytes / LOAD_BYTES_PER_TOKEN if held else 0.0
    return min(tokens, tokens - held + load) + queue


def _ceiling(candidates: Sequence[Candidate]) -> int:
    """Whoever has more requests than this is overloaded."""
    return min((each.active for each in candidates), default=0) * OVERLOAD_FACTOR + OVERLOAD_SLACK


def _most_available(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those in the best state there is. All down is suspicious of the observer: then all are tried."""
    for state in ("up", "suspect", "down"):
        found = [candidate for candidate in candidates if candidate.state == state]
        if found:
            return found
    return []


def _score(key: str, name: str) -> int:
    # Headers that are not UTF-8 arrive as surrogates: any bytes do as a name.
    digest = hashlib.blake2b(f"{key}\0{name}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def affinity_key(request: GenerationRequest, session: str | None, prefix_chars: int) -> str:
    """What names the conversation: the session header, else `user`, else how the prompt begins."""
    if session:
        return f"session:{session}"
    user = request.body.get("user")
    if isinstance(user, str) and user:
        return f"user:{user[:USER_CHARS]}"
    if not prefix_chars:
        return ""
    return "prefix:" + _prompt_start(request.body, prefix_chars)


def _prompt_start(body: dict[str, Any], chars: int) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:chars]
    if isinstance(prompt, list):
        return str(prompt[: max(1, chars // CHARS_PER_ID)])[:chars]
    messages = body.get("messages")
    start = ""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
            start += f"{message.get('role')}:{text}\n"
            if message.get("role") == "user":
                break  # what follows is not there yet in the first turn
        if len(start) >= chars:
            break
    return start[:chars]

"""What the toy engine must answer, from the ids alone: no pages, no loads, nothing that could go wrong.

A second writing of `segue_shim.toy.model`, on purpose: the engine reads its KV out of memory that was
shipped, loaded and reused, this one keeps it in a variable. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

KV_BYTES = 256
VOCABULARY = 50_000
UNSEEDED = -1


def continuation(prompt: Sequence[int], count: int, seed: int = UNSEEDED) -> list[int]:
    """The first `count` tokens after `prompt`."""
    everything = hashlib.blake2b(digest_size=8)
    kv = bytes(KV_BYTES)
    position = 0
    for token in prompt:
        kv = _kv(kv, token, position)
        everything.update(kv)
        position += 1
    output: list[int] = []
    while len(output) < count:
        state = everything.copy()
        state.update(struct.pack("<qI", seed, 0 if seed == UNSEEDED else len(output)))
        token = int.from_bytes(state.digest(), "little") % VOCABULARY
        output.append(token)
        kv = _kv(kv, token, position)
        everything.update(kv)
        position += 1
    return output


def text_of(ids: Sequence[int]) -> str:
    """As the engine writes them."""
    return "".join(f" {token}" for token in ids)


def _kv(before: bytes, token: int, position: int) -> bytes:
    return hashlib.shake_128(before + struct.pack("<II", token, position)).digest(KV_BYTES)

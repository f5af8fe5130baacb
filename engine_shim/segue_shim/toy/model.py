"""The toy engine's model: KV in pages, and a next token that depends on every byte of it.

Owns the page memory and the arithmetic. As in a real model the KV of a token is computed from the token and
the KV before it, *as it lies in the pages*, and the next token from all of it. So a byte that was loaded
wrong, torn or overwritten changes the rest of the answer. A few lines of hashing stand for attention:

    kv(p) = SHAKE128(kv(p - 1) | token p | p), kv(-1) = zeros
    next token after p = BLAKE2b(kv(0) | ... | kv(p) | draw) mod VOCABULARY
    draw = seed | number of the output token, for greedy requests UNSEEDED | 0

`segue_ctl.chaos.reference` computes the same from the ids alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from itertools import islice

import torch

LAYERS = 4
LAYER_BYTES = 64
KV_BYTES = LAYERS * LAYER_BYTES
"""KV of one token."""
BLOCK_SIZE = 8
VOCABULARY = 50_000
UNSEEDED = -1
"""The seed of greedy requests."""
SLOT_AXES = ("block", "slot", "dim")
OPAQUE_AXES = ("block", "opaque", "opaque")


class Model:
    """`num_blocks` blocks of BLOCK_SIZE tokens. `opaque`: a token's bytes are spread over its block, as
    vLLM's CPU kernels spread K; else they lie together."""

    def __init__(self, num_blocks: int, *, opaque: bool = False) -> None:
        shape = (LAYER_BYTES, BLOCK_SIZE) if opaque else (BLOCK_SIZE, LAYER_BYTES)
        self.tensors = {
            f"layer{number}": torch.zeros((num_blocks, *shape), dtype=torch.uint8) for number in range(LAYERS)
        }
        self.axes = OPAQUE_AXES if opaque else SLOT_AXES
        self._opaque = opaque

    def compute(self, blocks: Sequence[int], ids: Sequence[int], first: int, upto: int) -> None:
        """Write the KV of tokens `first` to `upto` of `ids`; what is before `first` is in the pages."""
        before = self._read(blocks, first - 1, first) if first else bytes(KV_BYTES)
        for position, token in enumerate(islice(ids, first, upto), first):
            before = hashlib.shake_128(before + struct.pack("<II", token, position)).digest(KV_BYTES)
            self._write(blocks[position // BLOCK_SIZE], position % BLOCK_SIZE, before)

    def next_token(self, blocks: Sequence[int], tokens: int, seed: int, output: int) -> int:
        """The token after the first `tokens`, number `output` of the answer."""
        state = hashlib.blake2b(self._read(blocks, 0, tokens), digest_size=8)
        state.update(struct.pack("<qI", seed, 0 if seed == UNSEEDED else output))
        return int.from_bytes(state.digest(), "little") % VOCABULARY

    def _read(self, blocks: Sequence[int], first: int, upto: int) -> bytes:
        """KV of tokens `first` to `upto`, token after token."""
        low = first // BLOCK_SIZE
        table = torch.tensor(blocks[low : -(-upto // BLOCK_SIZE)])
        layers = [self._by_slot(page[table]) for page in self.tensors.values()]
        whole = torch.stack(layers, dim=2).contiguous()  # block, slot, layer, byte
        start = (first - low * BLOCK_SIZE) * KV_BYTES
        return ctypes.string_at(whole.data_ptr() + start, (upto - first) * KV_BYTES)

    def _write(self, block: int, slot: int, kv: bytes) -> None:
        for page, part in zip(
            self.tensors.values(),
            torch.frombuffer(bytearray(kv), dtype=torch.uint8).split(LAYER_BYTES),
            strict=True,
        ):
            self._by_slot(page[block])[slot] = part

    def _by_slot(self, page: torch.Tensor) -> torch.Tensor:
        """A view whose last axes are slot and byte."""
        return page.transpose(-1, -2) if self._opaque else page


def text_of(ids: Sequence[int]) -> str:
    """The toy's tokens are numbers, and so are its words."""
    return "".join(f" {token}" for token in ids)


def ids_of(text: str) -> list[int]:
    """Numbers are tokens; any other word is one by its hash."""
    return [
        int(word) % VOCABULARY
        if word.isascii() and word.isdigit()
        else int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % VOCABULARY
        for word in text.split()
    ]

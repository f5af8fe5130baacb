"""What KV has to be: the bytes of every slot follow from the token ids up to it, and from nothing else.

Owns the layouts of the simulated pages and the record of what each writer computed. Nothing of the code
under test is used to work out what a replica must hold, so a wrong byte cannot hide behind itself.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from segue_core.geometry import Geometry, Region
from segue_core.messages.request import Replication

SIZE = 4
LAYERS = 2
DIM = 8
LAYER_BLOCK_BYTES = SIZE * DIM * 2
BLOCK_BYTES = LAYERS * LAYER_BLOCK_BYTES
TOKEN_BYTES = 4
Slots = npt.NDArray[np.int16]


def word_of(seq: str) -> Replication:
    """What the client of `seq` says of replication, in a run in which clients say something."""
    words: tuple[Replication, ...] = ("off", "low", "high", "normal")
    return words[crc32(seq.encode()) % len(words)]


@lru_cache
def geometry(blocks: int, slotted: bool) -> Geometry:
    """`slotted`: a slot's bytes lie together; else they are spread over the block, as vLLM's CPU K is."""
    layer = blocks * LAYER_BLOCK_BYTES
    if slotted:
        shape, strides, axes = (blocks, SIZE, DIM), (LAYER_BLOCK_BYTES, DIM * 2, 2), ("block", "slot", "dim")
    else:
        shape, strides = (blocks, DIM, SIZE), (LAYER_BLOCK_BYTES, SIZE * 2, 2)
        axes = ("block", "opaque", "opaque")
    regions = tuple(Region(0, i * layer, shape, strides, 2, axes) for i in range(LAYERS))
    return Geometry(blocks, SIZE, (LAYERS * layer,), regions).validate()


def by_slot(memory: npt.NDArray[np.uint8], blocks: int, slotted: bool) -> Any:
    """An engine's pages as (LAYERS, blocks, SIZE, DIM), a view."""
    values: Any = memory.view(np.int16)
    if slotted:
        return values.reshape(LAYERS, blocks, SIZE, DIM)
    return values.reshape(LAYERS, blocks, DIM, SIZE).transpose(0, 1, 3, 2)


def packed_by_slot(memory: npt.NDArray[np.uint8], slotted: bool) -> Any:
    """Blocks as they travel, one after another, as (LAYERS, blocks, SIZE, DIM), a view."""
    values: Any = memory.view(np.int16)
    if slotted:
        return values.reshape(-1, LAYERS, SIZE, DIM).transpose(1, 0, 2, 3)
    return values.reshape(-1, LAYERS, DIM, SIZE).transpose(1, 0, 3, 2)


def root(salt: bytes) -> bytes:
    """What the first token's KV follows from."""
    return hashlib.blake2b(salt, digest_size=32, person=b"simulated kv").digest()


def follow(before: bytes, token: int) -> bytes:
    """The KV of `token` after a prefix whose last KV is `before`: 32 bytes, LAYERS * DIM int16."""
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=LAYERS * DIM * 2).digest()


@lru_cache(1 << 14)
def slot_values(kv: bytes) -> Slots:
    """(LAYERS, DIM) of one slot."""
    return np.frombuffer(kv, np.int16).reshape(LAYERS, DIM)


@dataclass
class Writing:
    """What one engine life has of one sequence under one epoch. `told` ids went to the journal, `computed`
    tokens were complete at some moment: no replica may ever claim more than the smaller of both."""

    salt: bytes
    packed: bytearray = field(default_factory=bytearray)
    kv: list[bytes] = field(default_factory=list)
    told: int = 0
    computed: int = 0

    def extend(self, ids: list[int]) -> None:
        """The engine knows these ids too."""
        self.packed += array("I", ids).tobytes()
        last = self.kv[-1] if self.kv else root(self.salt)
        for token in ids:
            last = follow(last, token)
            self.kv.append(last)

    def block(self, position: int, slots: int) -> bytes:
        """The first `slots` slots of a block, in the order of `by_slot`."""
        return expected(tuple(self.kv[position * SIZE : position * SIZE + slots]))


@lru_cache(1 << 14)
def expected(kv: tuple[bytes, ...]) -> bytes:
    """(LAYERS, len(kv), DIM) as bytes."""
    return np.stack([slot_values(one) for one in kv], axis=1).tobytes()

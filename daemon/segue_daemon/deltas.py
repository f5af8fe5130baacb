"""What a delta may look like, and how its changes are applied. Pure.

Invariant: a delta that `malformed` lets through, with patches that `patch_fits` lets through, cannot
read or write outside its blocks, whoever sent it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from segue_core.content_key import KEY_BYTES, TOKEN_BYTES
from segue_core.geometry import MAX_BLOCK_BYTES
from segue_core.messages.peer import Delta, Part, PartKind
from segue_core.messages.request import MAX_SEQ_CHARS
from segue_daemon.arena import Bytes

ITEM_BYTES = (1, 2, 4, 8)
ENTRY_BYTES = 8
"""A changed run costs its offset and its length, a step of items its stride and its count: u32 each."""
EMPTY_DIGEST = xxhash.xxh3_64_intdigest(b"")
"""Of a part without bytes."""
MAX_SALT_BYTES = 1024
MAX_KEPT_RUNS = 512
MAX_KEPT_TABLES = 1024
"""So many tables of so many runs at most are kept, read: 12 MiB if all are as long as they may be."""
Numbers = npt.NDArray[np.int64]


def malformed(delta: Delta) -> str:
    """What contradicts itself in a delta; empty if nothing does."""
    if not 0 < len(delta.seq) <= MAX_SEQ_CHARS or not 0 < delta.epoch < 1 << 63 or delta.base < 0:
        return "seq, epoch or base out of range"
    if not 0 < delta.block_size <= 1 << 16 or not 0 < delta.block_bytes <= MAX_BLOCK_BYTES:
        return "block size out of range"
    if len(delta.fingerprint) != KEY_BYTES or len(delta.salt) > MAX_SALT_BYTES:
        return "fingerprint or salt of a wrong length"
    if not delta.token_ids or len(delta.token_ids) % TOKEN_BYTES:
        return "token ids are empty or cut"
    upto = delta.base + len(delta.token_ids) // TOKEN_BYTES
    first, last = delta.base // delta.block_size, -(-upto // delta.block_size)
    positions = [part.position for part in delta.parts]
    if len(positions) != last - first or positions != list(range(first, last)):
        return "parts do not cover the tokens"
    for part in delta.parts:
        problem = _malformed_part(part, delta, upto)
        if problem:
            return f"part {part.position}: {problem}"
    return ""


def _malformed_part(part: Part, delta: Delta, upto: int) -> str:
    sealed = (part.position + 1) * delta.block_size <= upto
    if len(part.key) != (KEY_BYTES if sealed else 0):
        return "sealed blocks have a key, tails have none"
    if part.kind == PartKind.KEY:
        return "" if sealed and not part.nbytes else "a key stands for a sealed block and has no bytes"
    if part.kind == PartKind.WHOLE:
        return "" if part.nbytes == delta.block_bytes else "not the bytes of one block"
    if not 0 <= part.count <= delta.block_bytes or not 0 <= part.nbytes <= 2 * delta.block_bytes:
        return "a change larger than the block"
    if part.kind == PartKind.ITEMS and (
        part.item_bytes not in ITEM_BYTES or delta.block_bytes % part.item_bytes
    ):
        return "items of a size that does not divide the block"
    return "" if part.nbytes >= part.count * ENTRY_BYTES else "a change of a wrong length"


def checksum_of(digests: Iterable[int]) -> int:
    """A delta's checksum: XXH3-64 over the XXH3-64 of each part's bytes (u64 each), in order. So a block is
    read once on each side, and the store keeps the digest that was compared."""
    return xxhash.xxh3_64_intdigest(array("Q", digests).tobytes())


def checksum_of_payload(parts: Iterable[Part], payload: bytes) -> int:
    """The checksum of a delta with these parts and this payload."""
    digests, at = [], 0
    for part in parts:
        digests.append(xxhash.xxh3_64_intdigest(payload[at : at + part.nbytes]))
        at += part.nbytes
    return checksum_of(digests)


def encode_items(numbers: Numbers) -> npt.NDArray[np.uint32]:
    """Ascending item numbers as (steps, 2): stride and count. Equal strides in a row are one step."""
    strides = np.diff(numbers, prepend=-1)
    begins = np.ones(len(strides), np.bool_)
    np.not_equal(strides[1:], strides[:-1], out=begins[1:])
    starts = np.flatnonzero(begins)
    steps = np.empty((len(starts), 2), "<u4")
    steps[:, 0] = strides[starts]
    steps[:, 1] = np.diff(starts, append=len(strides))
    return steps


def patch_fits(part: Part, payload: Bytes, block_bytes: int) -> bool:
    """Whether every change of an ITEMS or RUNS part lies inside the block."""
    if not part.count:
        return part.nbytes == 0
    rest = part.nbytes - part.count * ENTRY_BYTES
    if part.kind == PartKind.RUNS:
        runs = _runs(part, payload)
        return runs.end <= block_bytes and runs.nbytes == rest
    table = _table(part, payload)
    items = block_bytes // part.item_bytes
    strides, counts = table[:, 0], table[:, 1]
    # Bounded one by one first: then no sum of products can overflow.
    if int(table.min()) < 1 or int(table.max()) > items or int(counts.sum()) * part.item_bytes != rest:
        return False
    return int(counts.sum()) <= items and int((strides * counts).sum()) <= items


def apply_patch(block: Bytes, part: Part, payload: Bytes) -> None:
    """Apply an ITEMS or RUNS part that `patch_fits` to the bytes of its block."""
    if not part.count:
        return
    at = ENTRY_BYTES * part.count
    if part.kind == PartKind.ITEMS:
        table = _table(part, payload)
        kind = f"u{part.item_bytes}"
        numbers = np.cumsum(np.repeat(table[:, 0], table[:, 1])) - 1
        block.view(kind)[numbers] = payload[at:].view(kind)
        return
    runs = _runs(part, payload)
    if runs.spacing:
        first, nbytes = runs.table[0].tolist()
        shape = (part.count, nbytes)  # as layers lie: one copy for all
        # What `as_strided` makes, for a fifth of its time.
        target: Bytes = np.ndarray(shape, np.uint8, block, first, (runs.spacing, 1))
        target[:] = payload[at:].reshape(shape)
        return
    for offset, nbytes in runs.table.tolist():
        block[offset : offset + nbytes] = payload[at : at + nbytes]
        at += nbytes


class Runs(NamedTuple):
    """A table of RUNS: offset and length of each; where the last byte of any ends; bytes of all. `spacing`:
    of equal runs equally far apart, 0 for others."""

    table: Numbers
    end: int
    nbytes: int
    spacing: int


def _runs(part: Part, payload: Bytes) -> Runs:
    """Those of a RUNS part. Each token in the same slot of a layout has the same, so short ones are kept."""
    table = payload[: ENTRY_BYTES * part.count].tobytes()
    return _short_runs(table) if part.count <= MAX_KEPT_RUNS else _read_runs(table)


def _read_runs(table: bytes) -> Runs:
    pairs = np.frombuffer(table, "<u4").reshape(-1, 2).astype(np.int64)
    offsets, lengths = pairs[:, 0], pairs[:, 1]
    spacing = int(offsets[1] - offsets[0]) if len(pairs) > 1 else int(lengths[0])
    equal = spacing >= int(lengths[0]) > 0 and not np.ptp(lengths) and np.all(np.diff(offsets) == spacing)
    return Runs(pairs, int(pairs.sum(axis=1).max()), int(lengths.sum()), spacing if equal else 0)


_short_runs = lru_cache(maxsize=MAX_KEPT_TABLES)(_read_runs)


def _table(part: Part, payload: Bytes) -> Numbers:
    return payload[: ENTRY_BYTES * part.count].view("<u4").reshape(-1, 2).astype(np.int64)

"""What a delta may look like, and how its changes are applied. Pure.

Invariant: a delta that `malformed` lets through, with patches that `patch_fits` lets through, cannot
read or write outside its blocks, whoever sent it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import as_strided

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
    starts = np.flatnonzero(np.diff(strides, prepend=0))  # a stride is never 0
    steps = np.empty((len(starts), 2), "<u4")
    steps[:, 0] = strides[starts]
    steps[:, 1] = np.diff(starts, append=len(strides))
    return steps


def patch_fits(part: Part, payload: Bytes, block_bytes: int) -> bool:
    """Whether every change of an ITEMS or RUNS part lies inside the block."""
    if not part.count:
        return part.nbytes == 0
    table = _table(part, payload)
    rest = part.nbytes - part.count * ENTRY_BYTES
    if part.kind == PartKind.RUNS:
        return int(table.sum(axis=1).max()) <= block_bytes and int(table[:, 1].sum()) == rest
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
    table = _table(part, payload)
    at = ENTRY_BYTES * part.count
    if part.kind == PartKind.ITEMS:
        kind = f"u{part.item_bytes}"
        numbers = np.cumsum(np.repeat(table[:, 0], table[:, 1])) - 1
        block.view(kind)[numbers] = payload[at:].view(kind)
        return
    offsets, lengths = table[:, 0], table[:, 1]
    spacing = int(offsets[1] - offsets[0]) if part.count > 1 else 0
    if spacing >= int(lengths[0]) > 0 and not np.ptp(lengths) and not np.ptp(np.diff(offsets)):
        shape = (part.count, int(lengths[0]))  # as layers lie: one copy for all
        as_strided(block[int(offsets[0]) :], shape, (spacing, 1))[:] = payload[at:].reshape(shape)
        return
    for offset, nbytes in table.tolist():
        block[offset : offset + nbytes] = payload[at : at + nbytes]
        at += nbytes


def _table(part: Part, payload: Bytes) -> Numbers:
    return payload[: ENTRY_BYTES * part.count].view("<u4").reshape(-1, 2).astype(np.int64)

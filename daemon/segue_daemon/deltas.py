"""What a delta may look like, and how its changes are applied. Pure.

Invariant: a delta that `malformed` lets through, with patches that `patch_fits` lets through, cannot
read or write outside its blocks, whoever sent it.
"""

from __future__ import annotations

import numpy as np

from segue_core.content_key import KEY_BYTES, TOKEN_BYTES
from segue_core.geometry import MAX_BLOCK_BYTES
from segue_core.messages.peer import Delta, Part, PartKind
from segue_core.messages.request import MAX_SEQ_CHARS
from segue_daemon.arena import Bytes

WORD_BYTES = 8
CHANGED_WORD_BYTES = 4 + WORD_BYTES
"""A changed word costs its number (u32) and its value (u64)."""
RUN_ENTRY_BYTES = 8
"""A changed run costs its offset (u32) and its length (u32)."""
MAX_SALT_BYTES = 1024


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
    if [part.position for part in delta.parts] != list(range(first, last)):
        return "parts do not cover the tokens"
    for part in delta.parts:
        problem = _malformed_part(part, delta, upto)
        if problem:
            return f"part {part.position}: {problem}"
    return ""


def _malformed_part(part: Part, delta: Delta, upto: int) -> str:
    sealed = (part.position + 1) * delta.block_size <= upto
    begun = part.position * delta.block_size < delta.base
    if len(part.key) != (KEY_BYTES if sealed else 0):
        return "sealed blocks have a key, tails have none"
    if part.kind == PartKind.KEY:
        return "" if sealed and not part.nbytes else "a key stands for a sealed block and has no bytes"
    if part.kind == PartKind.WHOLE:
        return "" if part.nbytes == delta.block_bytes else "not the bytes of one block"
    if not begun:
        return "a change to a block that was never sent"
    entry = CHANGED_WORD_BYTES if part.kind == PartKind.WORDS else RUN_ENTRY_BYTES
    if not 0 <= part.count <= delta.block_bytes or not 0 <= part.nbytes <= 2 * delta.block_bytes:
        return "a change larger than the block"
    if part.kind == PartKind.WORDS:
        return "" if part.nbytes == part.count * entry else "changed words of a wrong length"
    return "" if part.nbytes >= part.count * entry else "changed runs of a wrong length"


def patch_fits(part: Part, payload: Bytes, block_bytes: int) -> bool:
    """Whether every change of a WORDS or RUNS part lies inside the block."""
    if not part.count:
        return part.nbytes == 0
    if part.kind == PartKind.WORDS:
        numbers = payload[: 4 * part.count].view("<u4")
        return int(numbers.max()) < -(-block_bytes // WORD_BYTES)
    table = payload[: RUN_ENTRY_BYTES * part.count].view("<u4").reshape(-1, 2).astype(np.int64)
    ends = table.sum(axis=1)
    return int(ends.max()) <= block_bytes and int(table[:, 1].sum()) + table.nbytes // 2 == part.nbytes


def apply_patch(block: Bytes, part: Part, payload: Bytes) -> None:
    """Apply a WORDS or RUNS part that `patch_fits` to the bytes of its block."""
    if not part.count:
        return
    if part.kind == PartKind.WORDS:
        numbers = payload[: 4 * part.count].view("<u4")
        words = payload[4 * part.count :].view(np.uint64)
        whole = len(block) // WORD_BYTES
        inside = numbers < whole
        block[: whole * WORD_BYTES].view(np.uint64)[numbers[inside]] = words[inside]
        rest = len(block) - whole * WORD_BYTES
        if rest and not inside.all():
            block[whole * WORD_BYTES :] = words[~inside][-1:].view(np.uint8)[:rest]
        return
    at = RUN_ENTRY_BYTES * part.count
    for offset, nbytes in payload[:at].view("<u4").reshape(-1, 2).tolist():
        block[offset : offset + nbytes] = payload[at : at + nbytes]
        at += nbytes

"""The differ: a plan becomes a delta, with its bytes.

Sealed blocks go once, whole, and not at all if the peer holds their content key. A tail goes as slot
runs where the geometry says where a slot's bytes are, else as changed 8-byte words against a shadow of
what the peer has. Copy, then check: everything is copied out of the engine's memory first; the caller
drains the journal and asks `still_good` before it sends.

One `Differ` a peer. Invariant: after `accept`, a shadow is byte for byte what the peer has of that
tail block once it has applied the delta.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash

from segue_core.content_key import TOKEN_BYTES
from segue_core.messages.peer import Delta, Part, PartKind
from segue_daemon.arena import Bytes
from segue_daemon.deltas import CHANGED_WORD_BYTES, WORD_BYTES
from segue_daemon.ledger import Ledger, Sequence
from segue_daemon.pages import Pages
from segue_daemon.planner import Plan

MAX_HELD_KEYS = 1 << 20


@dataclass
class Built:
    """A delta ready to send: `payload` is valid until the next `build`."""

    delta: Delta
    payload: memoryview
    upto: int
    tail: Bytes | None
    """Copy of the tail block as the peer will have it; None if the delta ends on a block boundary."""


class Differ:
    """Builds deltas for one peer from one engine's pages."""

    def __init__(
        self, ledger: Ledger, pages: Pages, *, incarnation: int, delta_bytes: int, shadow_bytes: int
    ) -> None:
        geometry = pages.geometry
        self.block_bytes = geometry.block_bytes
        self._ledger = ledger
        self._pages = pages
        self._incarnation = incarnation
        self._staging: Bytes = np.empty(max(delta_bytes, self.block_bytes) + 2 * self.block_bytes, np.uint8)
        self._padded = (self.block_bytes + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
        self._shadows: OrderedDict[str, Bytes] = OrderedDict()
        self._max_shadows = shadow_bytes // self._padded
        self._spare: list[Bytes] = []
        self.held_keys: OrderedDict[bytes, None] = OrderedDict()

    def build(self, sequence: Sequence, plan: Plan, number: int) -> Built | None:
        """Copy what `plan` asks for. None if a block changed hands already (nothing to send for now)."""
        size = self._ledger.geometry.block_size
        first, last = plan.base // size, -(-plan.upto // size)
        if not self._ledger.intact(sequence, first, last):
            return None
        parts: list[Part] = []
        at = 0
        tail: Bytes | None = None
        for position in range(first, last):
            sealed = (position + 1) * size <= plan.upto
            key = self._ledger.key(sequence, position) if sealed else b""
            begun = position * size < plan.base
            if sealed and not begun and key in self.held_keys:
                self.held_keys.move_to_end(key)
                parts.append(Part(position, PartKind.KEY, key, 0))
                continue
            part, tail = self._part(sequence, position, key, plan, at)
            parts.append(part)
            at += part.nbytes
        payload = self._staging[:at].data
        delta = Delta(
            number=number,
            seq=sequence.seq,
            epoch=sequence.epoch,
            incarnation=self._incarnation,
            fingerprint=self._ledger.fingerprint,
            salt=sequence.salt,
            block_size=size,
            block_bytes=self.block_bytes,
            base=plan.base,
            token_ids=bytes(sequence.token_ids[plan.base * TOKEN_BYTES : plan.upto * TOKEN_BYTES]),
            parts=tuple(parts),
            checksum=xxhash.xxh3_64_intdigest(payload),
        )
        return Built(delta, payload, plan.upto, tail)

    def _part(
        self, sequence: Sequence, position: int, key: bytes, plan: Plan, at: int
    ) -> tuple[Part, Bytes | None]:
        """One block's bytes into the staging buffer at `at`; also the tail copy if it stays a tail."""
        block = sequence.blocks[position]
        size = self._ledger.geometry.block_size
        begun = position * size < plan.base
        if begun and self._ledger.geometry.slot_axis_known:
            low = plan.base - position * size
            high = min(size, plan.upto - position * size)
            return self._slots(position, key, block, low, high, at), None
        if key and not begun:
            self._pages.copy_block(block, self._staging[at : at + self.block_bytes])
            return Part(position, PartKind.WHOLE, key, self.block_bytes), None
        copy = self._spare.pop() if self._spare else np.zeros(self._padded, np.uint8)
        self._pages.copy_block(block, copy[: self.block_bytes])
        shadow = self._shadows.get(sequence.seq) if begun else None
        part = self._changed_words(position, key, copy, shadow, at) if shadow is not None else None
        if part is None:
            self._staging[at : at + self.block_bytes] = copy[: self.block_bytes]
            part = Part(position, PartKind.WHOLE, key, self.block_bytes)
        if key:
            self._spare.append(copy)
            return part, None
        return part, copy

    def _slots(self, position: int, key: bytes, block: int, low: int, high: int, at: int) -> Part:
        """Slots [low, high) as runs."""
        runs = self._ledger.geometry.slot_runs(low, high)
        table = np.array([(run.packed, run.piece.nbytes) for run in runs], "<u4")
        self._staging[at : at + table.nbytes] = table.reshape(-1).view(np.uint8)
        nbytes = table.nbytes + self._pages.copy_slots(block, low, high, self._staging[at + table.nbytes :])
        return Part(position, PartKind.RUNS, key, nbytes, count=len(runs))

    def _changed_words(self, position: int, key: bytes, copy: Bytes, shadow: Bytes, at: int) -> Part | None:
        """The difference to what the peer has; None if the whole block is cheaper."""
        now = copy.view(np.uint64)
        changed = np.flatnonzero(now != shadow.view(np.uint64))
        nbytes = len(changed) * CHANGED_WORD_BYTES
        if nbytes >= self.block_bytes:
            return None
        middle = at + 4 * len(changed)
        self._staging[at:middle] = changed.astype("<u4").view(np.uint8)
        self._staging[middle : at + nbytes] = now[changed].view(np.uint8)
        return Part(position, PartKind.WORDS, key, nbytes, count=len(changed))

    def still_good(self, sequence: Sequence, built: Built) -> bool:
        """After the journal was drained: was every block copied before anybody else got it?"""
        size = self._ledger.geometry.block_size
        return self._ledger.intact(sequence, built.delta.base // size, -(-built.upto // size))

    def accept(self, built: Built) -> None:
        """`built` goes out: remember what the peer will have."""
        self._drop_shadow(built.delta.seq)
        if built.tail is not None and self._max_shadows:
            if len(self._shadows) >= self._max_shadows:
                self._spare.append(self._shadows.popitem(last=False)[1])
            self._shadows[built.delta.seq] = built.tail

    def discard(self, built: Built) -> None:
        """`built` is void: keep its buffer for the next one."""
        if built.tail is not None:
            self._keep_spare(built.tail)

    def rewind(self, seq: str) -> None:
        """What the peer has of the tail of `seq` is not known any more: the next tail goes whole."""
        self._drop_shadow(seq)

    def forget(self, seq: str) -> None:
        """The sequence is over."""
        self._drop_shadow(seq)

    def hold(self, keys: list[bytes]) -> None:
        """The peer acknowledged sealed blocks with these keys."""
        for key in keys:
            self.held_keys[key] = None
        while len(self.held_keys) > MAX_HELD_KEYS:
            self.held_keys.popitem(last=False)

    def drop_keys(self, keys: list[bytes]) -> None:
        """The peer does not hold these (any more)."""
        for key in keys:
            self.held_keys.pop(key, None)

    def _drop_shadow(self, seq: str) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self._keep_spare(shadow)

    def _keep_spare(self, buffer: Bytes) -> None:
        if len(self._spare) < 8:
            self._spare.append(buffer)

"""The differ: a plan becomes a delta, with its bytes.

Sealed blocks go once, whole, and not at all if the peer holds their content key. A tail goes as slot
runs where the geometry says where a slot's bytes are, else as changed items against a shadow of what the
peer has. Copy, then check: everything is copied out of the engine's memory first; the caller
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
from segue_daemon.deltas import EMPTY_DIGEST, ENTRY_BYTES, ITEM_BYTES, checksum_of, encode_items
from segue_daemon.ledger import Ledger, Sequence
from segue_daemon.pages import Pages, PagesError
from segue_daemon.planner import Plan
from segue_daemon.slot_map import Numbers, SlotMap, Words

MAX_HELD_KEYS = 1 << 20
BATCH_BYTES = 512 << 10
"""Small deltas are built one behind the other up to here, and go out together: while they are in the
processor's cache."""
WORD_BYTES = 8
"""Copy and shadow are compared in words first, and only changed words item by item."""


@dataclass
class Built:
    """A delta ready to send: `payload` is valid until its place is built over."""

    delta: Delta
    payload: memoryview
    upto: int
    tail: Bytes | None
    """Copy of the tail block as the peer will have it; None if the delta ends on a block boundary."""
    changed: tuple[int, Numbers] | None = None
    """(slot, items that changed) if it brings a single token and the differ wants to know."""


class Differ:
    """Builds deltas for one peer from one engine's pages."""

    def __init__(
        self, ledger: Ledger, pages: Pages, *, incarnation: int, delta_bytes: int, shadow_bytes: int
    ) -> None:
        geometry = pages.geometry
        self.block_bytes = geometry.block_bytes
        self.delta_bytes = delta_bytes
        self._ledger = ledger
        self._pages = pages
        self._incarnation = incarnation
        self._staging = pages.buffer(BATCH_BYTES + max(delta_bytes, self.block_bytes) + 2 * self.block_bytes)
        itemsizes = [region.itemsize for region in geometry.regions]
        self._item_bytes = max(n for n in ITEM_BYTES if all(size % n == 0 for size in itemsizes))
        self._padded = (self.block_bytes + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
        opaque_bytes = 0 if geometry.slot_axis_known else self._padded
        items = min(opaque_bytes, self.block_bytes) // self._item_bytes
        self._map = SlotMap(slots=geometry.block_size, items=items, item_bytes=self._item_bytes)
        self._zeros: Bytes = np.zeros(opaque_bytes, np.uint8)
        self._scratch = np.empty(opaque_bytes // WORD_BYTES, np.uint64)
        self._changed: tuple[int, Numbers] | None = None
        self._shadows: OrderedDict[str, Bytes] = OrderedDict()
        self._max_shadows = shadow_bytes // self._padded
        self._spare: list[Bytes] = []
        self._run_tables: dict[tuple[int, int], Bytes] = {}
        self.held_keys: OrderedDict[bytes, None] = OrderedDict()

    def build(self, sequence: Sequence, plan: Plan, number: int, start: int = 0) -> Built | None:
        """Copy what `plan` asks for, behind `start` bytes (fewer than `BATCH_BYTES`) that were built before
        and stay good. None if a block changed hands already (nothing to send for now)."""
        size = self._ledger.geometry.block_size
        first, last = plan.base // size, -(-plan.upto // size)
        if not self._ledger.intact(sequence, first, last):
            return None
        parts: list[Part] = []
        digests: list[int] = []
        whole: list[tuple[int, int]] = []
        at = start
        tail: Bytes | None = None
        self._changed = None
        for position in range(first, last):
            sealed = (position + 1) * size <= plan.upto
            key = self._ledger.key(sequence, position) if sealed else b""
            begun = position * size < plan.base
            if sealed and not begun:
                if key in self.held_keys:
                    self.held_keys.move_to_end(key)
                    parts.append(Part(position, PartKind.KEY, key, 0))
                else:
                    whole.append((len(parts), sequence.blocks[position]))
                    parts.append(Part(position, PartKind.WHOLE, key, self.block_bytes))
                digests.append(EMPTY_DIGEST)
                continue
            try:
                at = self._whole(whole, digests, at)
                part, tail = self._part(sequence, position, key, plan, at)
            except PagesError:
                return None  # `pages.failure` says why; whoever owns the session looks
            parts.append(part)
            # At once: the copy is still in the processor's cache.
            digests.append(xxhash.xxh3_64_intdigest(self._staging[at : at + part.nbytes].data))
            at += part.nbytes
        try:
            at = self._whole(whole, digests, at)
        except PagesError:
            return None
        payload = self._staging[start:at].data
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
            checksum=checksum_of(digests),
        )
        return Built(delta, payload, plan.upto, tail, self._changed)

    def _whole(self, blocks: list[tuple[int, int]], digests: list[int], at: int) -> int:
        """Copy blocks that go whole, (index of the part, block), into the staging buffer from `at` on; return
        where they end. Each one's checksum is taken as soon as it is there, while others are copied."""
        if not blocks:
            return at
        done, size = 0, self.block_bytes
        room = self._staging[at : at + len(blocks) * size]
        for complete in self._pages.copy_blocks([block for _, block in blocks], room):
            for index, _ in blocks[done:complete]:
                digests[index] = xxhash.xxh3_64_intdigest(self._staging[at : at + size].data)
                at += size
            done = complete
        blocks.clear()
        return at

    def _part(
        self, sequence: Sequence, position: int, key: bytes, plan: Plan, at: int
    ) -> tuple[Part, Bytes | None]:
        """What goes of a block that is begun, or not full: its bytes into the staging buffer at `at`, and the
        tail copy if it stays a tail."""
        block = sequence.blocks[position]
        size = self._ledger.geometry.block_size
        if self._ledger.geometry.slot_axis_known:
            low = max(0, plan.base - position * size)
            high = min(size, plan.upto - position * size)
            return self._slots(position, key, block, low, high, at), None
        return self._tail(sequence, position, key, plan, at)

    def _tail(
        self, sequence: Sequence, position: int, key: bytes, plan: Plan, at: int
    ) -> tuple[Part, Bytes | None]:
        """What the peer lacks of a block whose slots cannot be addressed."""
        size = self._ledger.geometry.block_size
        begun = position * size < plan.base
        copy = self._spare.pop() if self._spare else np.zeros(self._padded, np.uint8)
        self._pages.copy_block(sequence.blocks[position], copy[: self.block_bytes])
        shadow = self._shadows.get(sequence.seq) if begun else self._zeros
        if shadow is None or not (begun or self._map.ready):
            part, numbers = None, None
        else:
            if not key and self._map.ready:
                self._leave_out(copy, shadow, self._map.later(plan.upto - position * size))
            part, numbers = self._changed_items(position, key, copy, shadow, at)
        slot = plan.base - position * size
        if numbers is not None and plan.upto == plan.base + 1 and self._map.wants(slot):
            self._changed = slot, numbers
        if part is None:
            self._staging[at : at + self.block_bytes] = copy[: self.block_bytes]
            part = Part(position, PartKind.WHOLE, key, self.block_bytes)
        if key:
            self._keep_spare(copy)
            return part, None
        return part, copy

    def _leave_out(self, copy: Bytes, shadow: Bytes, later: Words) -> None:
        """Make `copy` what the peer has wherever the bits of `later` say that it does not matter yet."""
        words = copy.view(np.uint64)
        np.bitwise_xor(words, shadow.view(np.uint64), out=self._scratch)
        np.bitwise_and(self._scratch, later, out=self._scratch)
        np.bitwise_xor(words, self._scratch, out=words)

    def _slots(self, position: int, key: bytes, block: int, low: int, high: int, at: int) -> Part:
        """Slots [low, high) as runs."""
        table = self._run_tables.get((low, high))
        if table is None:
            runs = self._ledger.geometry.slot_runs(low, high)
            entries = np.array([(run.packed, run.piece.nbytes) for run in runs], "<u4")
            table = self._run_tables[low, high] = entries.reshape(-1).view(np.uint8)
        self._staging[at : at + table.nbytes] = table
        nbytes = table.nbytes + self._pages.copy_slots(block, low, high, self._staging[at + table.nbytes :])
        return Part(position, PartKind.RUNS, key, nbytes, count=table.nbytes // ENTRY_BYTES)

    def _changed_items(
        self, position: int, key: bytes, copy: Bytes, shadow: Bytes, at: int
    ) -> tuple[Part | None, Numbers]:
        """The difference to what the peer has (None: the whole block is cheaper), and the items' numbers."""
        size = self._item_bytes
        kind, lanes = f"u{size}", WORD_BYTES // size
        words = np.flatnonzero(copy.view(np.uint64) != shadow.view(np.uint64))
        now, before = (memory.view(np.uint64)[words].view(kind) for memory in (copy, shadow))
        changed = np.flatnonzero(now != before)
        values = now[changed]
        shift = lanes.bit_length() - 1  # of a power of two: to divide takes three times as long
        numbers: Numbers = (words[changed >> shift] << shift) + (changed & (lanes - 1))
        steps = encode_items(numbers)
        middle = at + len(steps) * ENTRY_BYTES
        nbytes = len(steps) * ENTRY_BYTES + values.nbytes
        if nbytes >= self.block_bytes:
            return None, numbers
        self._staging[at:middle] = steps.reshape(-1).view(np.uint8)
        self._staging[middle : at + nbytes] = values.view(np.uint8)
        return Part(position, PartKind.ITEMS, key, nbytes, len(steps), size), numbers

    def still_good(self, sequence: Sequence, built: Built) -> bool:
        """After the journal was drained: was every block copied before anybody else got it?"""
        size = self._ledger.geometry.block_size
        return self._ledger.intact(sequence, built.delta.base // size, -(-built.upto // size))

    def accept(self, built: Built) -> None:
        """`built` goes out: remember what the peer will have."""
        self._drop_shadow(built.delta.seq)
        if built.changed is not None:
            self._map.learn(*built.changed)
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

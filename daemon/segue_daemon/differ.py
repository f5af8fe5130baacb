"""The differ: plans become deltas, with their bytes.

Sealed blocks go once, whole, and not at all if the peer holds their content key. A tail goes as slot
runs where the geometry says where a slot's bytes are, else as changed items against a shadow of what the
peer has. Out of a GPU what goes together is drafted first, and copied at once; each delta is built as soon as
its copy is there. Copy, then check: everything is copied out of the engine's memory first; the caller drains
the journal and asks `still_good` before it sends.

One `Differ` a peer. Invariant: after `accept`, a shadow is byte for byte what the peer has of that
tail block once it has applied the delta.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import xxhash

from segue_core.content_key import TOKEN_BYTES
from segue_core.messages.peer import Delta, Part, PartKind
from segue_daemon.arena import Bytes
from segue_daemon.deltas import EMPTY_DIGEST, ENTRY_BYTES, ITEM_BYTES, checksum_of, encode_items
from segue_daemon.ledger import Ledger, Sequence
from segue_daemon.pages import Pages, PagesError, Piece, one_by_one
from segue_daemon.planner import Plan
from segue_daemon.slot_map import Numbers, SlotMap, Words

MAX_HELD_KEYS = 1 << 20
WORD_BYTES = 8
"""Copy and shadow are compared in words first, and only changed words item by item."""


@dataclass(slots=True)
class Built:
    """A delta ready to send: `payload` is valid until its place is built over."""

    delta: Delta
    payload: memoryview
    upto: int
    tail: Bytes | None
    """Copy of the tail block as the peer will have it; None if the delta ends on a block boundary."""
    changed: tuple[int, Numbers] | None = None
    """(slot, items that changed) if it brings a single token and the differ wants to know."""


@dataclass(slots=True)
class Draft:
    """What a delta will bring. Of a block of which changed items go the part only says that (`ITEMS`)."""

    sequence: Sequence
    plan: Plan
    number: int
    parts: list[Part]
    pieces: list[Piece]
    """What is copied at once, in the order of the parts."""
    copies: list[Bytes]
    """The places of these pieces in whole words, where blocks are compared."""
    nbytes: int = 0
    """Of the payload; about as many where blocks are compared and that is not done yet."""
    built: Built | None = None
    """The delta, where each piece is copied by itself."""


class Differ:
    """Builds deltas for one peer from one engine's pages."""

    def __init__(
        self, ledger: Ledger, pages: Pages, *, incarnation: int, delta_bytes: int, shadow_bytes: int
    ) -> None:
        geometry = pages.geometry
        self.block_bytes = geometry.block_bytes
        self._size = geometry.block_size
        self.delta_bytes = delta_bytes
        self._ledger = ledger
        self._pages = pages
        self._incarnation = incarnation
        self.batch_bytes = pages.batch_bytes
        self._staging = pages.buffer(
            self.batch_bytes + max(delta_bytes, self.block_bytes) + 2 * self.block_bytes
        )
        itemsizes = [region.itemsize for region in geometry.regions]
        self._item_bytes = max(n for n in ITEM_BYTES if all(size % n == 0 for size in itemsizes))
        self._padded = (self.block_bytes + WORD_BYTES - 1) // WORD_BYTES * WORD_BYTES
        self._opaque = not geometry.slot_axis_known
        opaque_bytes = self._padded if self._opaque else 0
        items = min(opaque_bytes, self.block_bytes) // self._item_bytes
        self._map = SlotMap(slots=geometry.block_size, items=items, item_bytes=self._item_bytes)
        self._zeros: Bytes = np.zeros(opaque_bytes, np.uint8)
        self._scratch = np.empty(opaque_bytes // WORD_BYTES, np.uint64)
        self._changed: tuple[int, Numbers] | None = None
        self._shadows: OrderedDict[str, Bytes] = OrderedDict()
        self._max_shadows = shadow_bytes // self._padded
        self._spare: list[Bytes] = []
        self._run_tables: dict[tuple[int, int], tuple[Bytes, int]] = {}
        self.held_keys: OrderedDict[bytes, None] = OrderedDict()

    def build(self, sequence: Sequence, plan: Plan, number: int) -> Built | None:
        """Copy what `plan` asks for. None if a block changed hands already (nothing to send for now), or the
        memory cannot be read."""
        draft = self.draft(sequence, plan, number)
        built = self.build_together([draft])[0] if draft is not None else []
        return built[0] if built else None

    def draft(self, sequence: Sequence, plan: Plan, number: int, start: int = 0) -> Draft | None:
        """What goes for `plan` as delta `number`, behind `start` bytes (fewer than `batch_bytes`) that were
        drafted before. None if a block changed hands already (nothing to send for now), or the memory cannot
        be read."""
        size = self._size
        first, last = plan.base // size, -(-plan.upto // size)
        if not self._ledger.intact(sequence, first, last):
            return None
        draft = Draft(sequence, plan, number, [], [], [])
        for position in range(first, last):
            low = plan.base % size if position == first else 0
            high = size if position + 1 < last else plan.upto - position * size
            key = self._ledger.key(sequence, position) if high == size else b""
            if key and not low and key in self.held_keys:
                self.held_keys.move_to_end(key)
                draft.parts.append(Part(position, PartKind.KEY, key, 0))
            elif self._opaque:
                self._draft_opaque(draft, position, key, low, high)
            else:
                self._draft_slots(draft, position, key, low, high, start)
        if not self._pages.gathers:
            try:
                draft.built = self._build(draft, one_by_one(self._pages, draft.pieces), start)
            except PagesError:
                return None  # `pages.failure` says why; whoever owns the session looks
            draft.nbytes = len(draft.built.payload)
        return draft

    def _draft_opaque(self, draft: Draft, position: int, key: bytes, low: int, high: int) -> None:
        """A sealed block goes whole; what is begun or not full is compared, in a copy of its own."""
        if key and not low:
            draft.parts.append(Part(position, PartKind.WHOLE, key, self.block_bytes))
            draft.nbytes += self.block_bytes
            return
        copy = self._spare.pop() if self._spare else np.zeros(self._padded, np.uint8)
        draft.copies.append(copy)
        draft.pieces.append(Piece(draft.sequence.blocks[position], copy[: self.block_bytes]))
        draft.parts.append(Part(position, PartKind.ITEMS, key, 0))
        known = self._before(draft.plan.seq, low) is not None
        draft.nbytes += self.block_bytes * (high - low) // self._size if known else self.block_bytes

    def _before(self, seq: str, slot: int) -> Bytes | None:
        """What a block, of which slots from `slot` on are new, is compared with; None: it goes whole."""
        if slot:
            return self._shadows.get(seq)
        return self._zeros if self._map.ready else None

    def _draft_slots(self, draft: Draft, position: int, key: bytes, low: int, high: int, start: int) -> None:
        """A sealed block goes whole, else slots [low, high) as runs: all at its place in the payload."""
        block, at = draft.sequence.blocks[position], start + draft.nbytes
        if key and not low:
            part = Part(position, PartKind.WHOLE, key, self.block_bytes)
            piece = Piece(block, self._staging[at : at + self.block_bytes])
        else:
            table, nbytes = self._run_tables.get((low, high)) or self._runs(low, high)
            middle, end = at + table.nbytes, at + nbytes
            self._staging[at:middle] = table
            part = Part(position, PartKind.RUNS, key, nbytes, count=table.nbytes // ENTRY_BYTES)
            piece = Piece(block, self._staging[middle:end], (low, high))
        draft.parts.append(part)
        draft.pieces.append(piece)
        draft.nbytes += part.nbytes

    def build_together(self, drafts: list[Draft], enough_bytes: int = 0) -> tuple[list[Built], int]:
        """Copy what `drafts`, made one behind the other, ask for, and build deltas until there are
        `enough_bytes`: at least one. Returns them, and how many drafts are left over."""
        if not self._pages.gathers:
            return [draft.built for draft in drafts if draft.built is not None], 0
        built: list[Built] = []
        at = 0
        try:
            with closing(self._pages.copy_pieces([p for each in drafts for p in each.pieces])) as copied:
                arrivals = _arrivals(copied)
                for draft in drafts:
                    if built and at >= enough_bytes:
                        break
                    built.append(self._build(draft, arrivals, at))
                    at += len(built[-1].payload)
        except PagesError:
            return built, 0
        left = drafts[len(built) :]
        for draft in left:
            for copy in draft.copies:
                self._keep_spare(copy)
        return built, len(left)

    def _build(self, draft: Draft, arrivals: Iterator[object], start: int) -> Built:
        """The delta that `draft` says, its payload from `start` on; `arrivals` steps on as soon as one more
        piece is there. Raises PagesError."""
        sequence, plan = draft.sequence, draft.plan
        self._changed = None
        if self._opaque:
            digests, tail, at = self._opaque_parts(draft, arrivals, start)
        else:
            digests, tail, at = [], None, start
            for part in draft.parts:
                if part.nbytes:
                    next(arrivals)
                end = at + part.nbytes
                # At once: the copy is still in the processor's cache.
                digests.append(xxhash.xxh3_64_intdigest(self._staging[at:end].data))
                at = end
        delta = Delta(
            number=draft.number,
            seq=sequence.seq,
            epoch=sequence.epoch,
            incarnation=self._incarnation,
            fingerprint=self._ledger.fingerprint,
            salt=sequence.salt,
            block_size=self._size,
            block_bytes=self.block_bytes,
            base=plan.base,
            token_ids=bytes(sequence.token_ids[plan.base * TOKEN_BYTES : plan.upto * TOKEN_BYTES]),
            parts=tuple(draft.parts),
            checksum=checksum_of(digests),
        )
        return Built(delta, self._staging[start:at].data, plan.upto, tail, self._changed)

    def _opaque_parts(
        self, draft: Draft, arrivals: Iterator[object], at: int
    ) -> tuple[list[int], Bytes | None, int]:
        """The payload of a delta in an opaque layout, from `at` on: the parts' checksums, the tail copy if it
        ends with one, and where it ends. What goes of each block is known, and said in `draft`, only now."""
        digests: list[int] = []
        whole: list[tuple[int, int]] = []
        tail: Bytes | None = None
        copies = iter(draft.copies)
        for index, part in enumerate(draft.parts):
            if part.kind == PartKind.WHOLE:
                whole.append((index, draft.sequence.blocks[part.position]))
            if part.kind != PartKind.ITEMS:
                digests.append(EMPTY_DIGEST)
                continue
            at = self._whole(whole, digests, at)
            next(arrivals)
            part, tail = self._tail(draft, part, next(copies), at)
            draft.parts[index] = part
            digests.append(xxhash.xxh3_64_intdigest(self._staging[at : at + part.nbytes].data))
            at += part.nbytes
        return digests, tail, self._whole(whole, digests, at)

    def _whole(self, blocks: list[tuple[int, int]], digests: list[int], at: int) -> int:
        """Copy blocks that go whole, (index of the part, block), into the staging buffer from `at` on: what
        is before them is known only now. Return where they end."""
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

    def _tail(self, draft: Draft, part: Part, copy: Bytes, at: int) -> tuple[Part, Bytes | None]:
        """What the peer lacks of a block whose slots cannot be addressed: its bytes into the staging buffer
        at `at`, and the copy if it stays a tail."""
        plan, position, key = draft.plan, part.position, part.key
        size = self._size
        slot = plan.base - position * size
        shadow = self._before(plan.seq, max(0, slot))
        changed: Part | None = None
        numbers: Numbers | None = None
        if shadow is not None:
            if not key and self._map.ready:
                self._leave_out(copy, shadow, self._map.later(plan.upto - position * size))
            changed, numbers = self._changed_items(position, key, copy, shadow, at)
        if numbers is not None and plan.upto == plan.base + 1 and self._map.wants(slot):
            self._changed = slot, numbers
        if changed is None:
            self._staging[at : at + self.block_bytes] = copy[: self.block_bytes]
            changed = Part(position, PartKind.WHOLE, key, self.block_bytes)
        if key:
            self._keep_spare(copy)
            return changed, None
        return changed, copy

    def _leave_out(self, copy: Bytes, shadow: Bytes, later: Words) -> None:
        """Make `copy` what the peer has wherever the bits of `later` say that it does not matter yet."""
        words = copy.view(np.uint64)
        np.bitwise_xor(words, shadow.view(np.uint64), out=self._scratch)
        np.bitwise_and(self._scratch, later, out=self._scratch)
        np.bitwise_xor(words, self._scratch, out=words)

    def _runs(self, low: int, high: int) -> tuple[Bytes, int]:
        """Slots [low, high) as runs: their table, and the bytes of both."""
        runs = self._ledger.geometry.slot_runs(low, high)
        entries = np.array([(run.packed, run.piece.nbytes) for run in runs], "<u4")
        table = entries.reshape(-1).view(np.uint8)
        nbytes = table.nbytes + sum(run.piece.nbytes for run in runs)
        self._run_tables[low, high] = table, nbytes
        return table, nbytes

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
        size = self._size
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


def _arrivals(copied: Iterator[int]) -> Iterator[None]:
    """Each piece of a copy, as soon as it is there."""
    done = 0
    for complete in copied:
        while done < complete:
            yield
            done += 1

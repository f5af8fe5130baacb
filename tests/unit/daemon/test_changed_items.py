"""What a tail costs on the wire, and that nothing is lost by it: changed items, their numbers, and what is
left out of a tail that begins."""

from __future__ import annotations

import mmap
import os
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.geometry import Geometry, Region
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.peer import Part, PartKind
from segue_daemon.deltas import apply_patch, encode_items, patch_fits
from segue_daemon.differ import Built, Differ
from segue_daemon.ledger import Ledger
from segue_daemon.pages import HostPages
from segue_daemon.planner import Plan
from segue_daemon.slot_map import SlotMap
from segue_daemon.wire import encode

SLOTS, DIM, HEADS, LAYERS, BLOCKS = 16, 32, 3, 10, 24
HEAD_ITEMS = 2 * DIM * SLOTS
TOKEN_BYTES = 2 * 2 * DIM * HEADS * LAYERS


def as_vllm_on_a_cpu() -> Geometry:
    """[block, head, slot, 2 * dim] as far as anybody says; inside, K is transposed and V is not."""
    shape = (BLOCKS, HEADS, SLOTS, 2 * DIM)
    strides = (HEADS * HEAD_ITEMS * 2, HEAD_ITEMS * 2, 4 * DIM, 2)
    layer = BLOCKS * strides[0]
    axes = ("block", "opaque", "opaque", "opaque")
    regions = tuple(Region(0, n * layer, shape, strides, 2, axes) for n in range(LAYERS))
    return Geometry(BLOCKS, SLOTS, (LAYERS * layer,), regions).validate()


def by_slots() -> Geometry:
    """[block, slot, dim]: a slot's bytes lie together."""
    width = 2 * DIM * HEADS
    shape, strides = (BLOCKS, SLOTS, width), (SLOTS * width * 2, width * 2, 2)
    layer = BLOCKS * strides[0]
    regions = tuple(Region(0, n * layer, shape, strides, 2, ("block", "slot", "dim")) for n in range(LAYERS))
    return Geometry(BLOCKS, SLOTS, (LAYERS * layer,), regions).validate()


def items_of(geometry: Geometry, slot: int) -> Any:
    """Which items of a packed block are one token's."""
    if geometry.slot_axis_known:
        width = 2 * DIM * HEADS
        layers = np.arange(LAYERS)[:, None] * (SLOTS * width)
        return (layers + slot * width + np.arange(width)).reshape(-1)
    heads = np.arange(LAYERS * HEADS)[:, None] * HEAD_ITEMS
    key = np.arange(DIM) * SLOTS + slot
    return (heads + np.concatenate([key, DIM * SLOTS + slot * DIM + np.arange(DIM)])).reshape(-1)


class Decoding:
    """An engine that decodes one sequence in blocks full of what others left, and a peer that applies it."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.noise = np.random.default_rng(3)
        fd = os.memfd_create("decoding")
        os.ftruncate(fd, geometry.handle_bytes[0])
        os.pwrite(fd, self.noise.bytes(geometry.handle_bytes[0]), 0)
        self.memory = np.frombuffer(mmap.mmap(fd, geometry.handle_bytes[0]), np.uint16)
        self.fd = fd
        self.pages = HostPages(geometry, [fd])
        self.ledger = Ledger(geometry, b"f" * 16, max_sequences=2)
        tokens = BLOCKS * SLOTS
        ids, blocks = (array("I", range(n)).tobytes() for n in (tokens, BLOCKS))
        self.ledger.apply(Begin(1, False, blocks, (SequenceBegin("s", 1, b"", ids, blocks, 0),), (), (), ()))
        self.ledger.apply(Commit(1, (("s", tokens),)))
        self.differ = Differ(
            self.ledger, self.pages, incarnation=1, delta_bytes=1 << 20, shadow_bytes=1 << 24
        )
        self.held: dict[int, np.ndarray[Any, Any]] = {}
        self.wire_bytes = 0

    def decode(self, token: int, *, upto: int = 0) -> Built:
        """Write one token's KV (or those before `upto`), ship it."""
        upto = upto or token + 1
        for number in range(token, upto):
            block, slot = divmod(number, SLOTS)
            self.write(block, items_of(self.geometry, slot))
        built = self.differ.build(self.ledger.sequences["s"], Plan("s", token, upto), token + 1)
        assert built is not None
        self.differ.accept(built)
        self.wire_bytes += len(encode(built.delta)) + len(built.payload)
        at = 0
        for part in built.delta.parts:
            data = np.frombuffer(bytes(built.payload[at : at + part.nbytes]), np.uint8)
            at += part.nbytes
            held = self.held.setdefault(part.position, np.zeros(self.geometry.block_bytes, np.uint8))
            if part.kind == PartKind.WHOLE:
                held[:] = data
            else:
                assert patch_fits(part, data, len(held))
                apply_patch(held, part, data)
        return built

    def write(self, block: int, items: Any) -> None:
        layer, inside = np.divmod(items, self.geometry.block_bytes // LAYERS // 2)
        offsets = np.array([region.offset for region in self.geometry.regions])
        at = (offsets[layer] + block * self.geometry.regions[0].strides[0]) // 2 + inside
        self.memory[at] = self.noise.integers(0, 1 << 16, len(at), np.uint16)

    def right(self, token: int) -> bool:
        """Whether the peer has every token up to and with `token` as the engine has it."""
        for position in range(token // SLOTS + 1):
            slots = min(SLOTS, token + 1 - position * SLOTS)
            now = np.empty(self.geometry.block_bytes, np.uint8)
            self.pages.copy_block(position, now)
            where = np.concatenate([items_of(self.geometry, slot) for slot in range(slots)])
            if not np.array_equal(now.view("u2")[where], self.held[position].view("u2")[where]):
                return False
        return True

    def close(self) -> None:
        self.pages.close()
        os.close(self.fd)


@pytest.mark.parametrize(("layout", "most"), [(by_slots, 1.05), (as_vllm_on_a_cpu, 1.5)])
def test_tails_cost_little_more_than_the_new_kv_that_they_bring(layout: Any, most: float) -> None:
    """Decoding in blocks full of an earlier owner's KV: new blocks and all, once the layout is known."""
    decoding = Decoding(layout())
    for token in range(10 * SLOTS):
        if token == 5 * SLOTS:
            decoding.wire_bytes = 0
        decoding.decode(token)
        assert token % 7 or decoding.right(token)
    assert decoding.wire_bytes <= most * 5 * SLOTS * TOKEN_BYTES
    decoding.close()


def test_a_full_block_is_complete_even_where_the_layout_was_learned_wrongly() -> None:
    """Bytes that were taken for a later slot's are there at the latest when the block is full."""
    decoding = Decoding(as_vllm_on_a_cpu())
    items = decoding.geometry.block_bytes // 2
    for _ in range(4):
        for slot in range(1, SLOTS):
            decoding.differ._map.learn(slot, np.arange(items))
    for slot in range(1, SLOTS):
        assert not decoding.differ._map.wants(slot)
    for token in range(SLOTS - 1):
        decoding.decode(token)
    built = decoding.decode(SLOTS - 1)
    assert built.delta.parts[0].key
    whole = np.empty(decoding.geometry.block_bytes, np.uint8)
    decoding.pages.copy_block(0, whole)
    assert np.array_equal(whole, decoding.held[0])
    decoding.close()


def test_several_tokens_at_once_over_a_block_boundary() -> None:
    """Merged tokens of a slow link arrive like single ones."""
    decoding = Decoding(as_vllm_on_a_cpu())
    for token in range(5 * SLOTS):
        decoding.decode(token)
    assert decoding.differ._map.ready
    at = 5 * SLOTS
    for upto in (at + 3, at + 4, at + SLOTS + 2, at + SLOTS + 9, at + 2 * SLOTS):
        decoding.decode(at, upto=upto)
        at = upto
        assert decoding.right(at - 1)
    decoding.close()


def test_an_item_counts_from_the_earliest_slot_at_which_it_changed() -> None:
    """What belongs to a token that is there is never left out because it changed later as well."""
    learned = SlotMap(slots=4, items=8, item_bytes=2)
    for _ in range(4):
        learned.learn(3, np.array([0, 6, 7]))
        learned.learn(1, np.array([0, 2]))
        learned.learn(2, np.array([4, 5]))
    assert learned.ready
    left_out = [np.flatnonzero(learned.later(slots).view("u2")).tolist() for slots in (1, 2, 3)]
    assert left_out == [[0, 2, 4, 5, 6, 7], [4, 5, 6, 7], [6, 7]]
    learned.learn(2, np.array([4, 5]))  # taken before the last look that was wanted, told after it
    assert np.flatnonzero(learned.later(3).view("u2")).tolist() == [6, 7]


@given(st.data())
def test_a_patch_makes_the_old_block_the_new_one(data: st.DataObject) -> None:
    """Whatever changed, wherever, in items of whatever size."""
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    items = data.draw(st.integers(1, 200))
    old = np.frombuffer(data.draw(st.binary(min_size=items * size, max_size=items * size)), np.uint8).copy()
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, items - 1), min_size=1))), np.int64)
    new = old.copy()
    new.view(f"u{size}")[numbers] += 1
    steps = encode_items(numbers)
    values = new.view(f"u{size}")[numbers]
    payload = np.frombuffer(steps.tobytes() + values.tobytes(), np.uint8)
    part = Part(0, PartKind.ITEMS, b"", len(payload), len(steps), size)
    assert patch_fits(part, payload, len(old))
    apply_patch(old, part, payload)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(
    ("steps", "values"),
    [
        ([(0, 1)], 1),
        ([(1, 0)], 0),
        ([(1, 9)], 9),
        ([(9, 1)], 1),
        ([(4, 2), (1, 1)], 3),
        ([(1, 3)], 2),
        ([(1, 2)], 3),
        ([(2**32 - 1, 1)], 1),
        ([(1, 2**32 - 1)], 8),
        ([(2**31, 2**31)] * 4, 8),
        ([(8, 1), (2**32 - 8, 1)], 2),
    ],
)
def test_items_that_do_not_fit_the_block_are_refused(steps: list[tuple[int, int]], values: int) -> None:
    """Numbers that leave the block, overflow, stand still or do not match the values touch nothing."""
    payload = np.frombuffer(np.array(steps, "<u4").tobytes() + bytes(2 * values), np.uint8)
    part = Part(0, PartKind.ITEMS, b"", len(payload), len(steps), 2)
    assert not patch_fits(part, payload, 16)

"""From an engine's pages to a peer's store and back: whatever happens on the way, what the store says it
has is byte for byte what the engine computed."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.content_key import KEY_BYTES
from segue_core.messages.peer import Delta, End, NackReason, Part, PartKind
from segue_daemon.blocks import BlockPool
from segue_daemon.deltas import checksum_of_payload
from segue_daemon.differ import Differ
from segue_daemon.planner import Planner
from segue_daemon.replicas import Refusal, Wanted
from segue_daemon.store import ReplicaStore
from support.ship_engine import (
    DIM,
    FINGERPRINT,
    SIZE,
    Engine,
    delta,
    ids,
    kv,
    opaque,
    receive,
    slotted,
)


def stored_tokens_are_right(
    store: ReplicaStore, memory: np.ndarray[Any, Any], engine: Engine, seq: str
) -> None:
    """Each token up to the watermark, read back through `match`, as the engine would load it."""
    replica = store.replicas[seq]
    ids = engine.ids[seq][: replica.watermark]
    found = store.match(
        Wanted(FINGERPRINT, b"", array("I", ids).tobytes(), SIZE, engine.geometry.block_bytes),
        seq=seq,
        computed=0,
        limit=len(ids),
        now_ns=0,
    )
    assert found.tokens == replica.watermark
    for position, token in enumerate(ids):
        offset = found.extents[position // SIZE]
        block = memory[offset : offset + engine.geometry.block_bytes].view(np.int16).reshape(2, -1)
        slotted_layout = "slot" in engine.geometry.regions[0].axes
        shaped = block.reshape(2, SIZE, DIM) if slotted_layout else block.reshape(2, DIM, SIZE)
        have = shaped[:, position % SIZE] if slotted_layout else shaped[:, :, position % SIZE]
        assert np.array_equal(have, kv(token, position)), f"token {position} of {seq}"
    store.release(found.lease)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([opaque, slotted]), st.sampled_from([3, 12, 100]))
def test_what_the_store_claims_is_what_the_engine_computed(seed: int, layout: Any, room: int) -> None:
    """Sequences grow, end and reuse blocks; deltas are lost, corrupted and refused; the store is too
    small at times. At every moment each watermark is covered by the right bytes."""
    rng = random.Random(seed)
    geometry = layout()
    engine = Engine(geometry)
    memory = np.zeros(room * geometry.block_bytes, np.uint8)
    store = ReplicaStore(memory, lease_ns=1)
    planner = Planner(block_size=SIZE, sync_every_tokens=1, delta_tokens=8)
    differ = Differ(engine.ledger, engine.pages, incarnation=1, delta_bytes=1 << 16, shadow_bytes=1 << 12)
    names = ["s0", "s1", "s2"]
    for number in range(60):
        name = rng.choice(names)
        action = rng.random()
        if action < 0.5:
            shared = [9] * 5 if name not in engine.ids else []
            engine.run(name, shared + [rng.randrange(50) for _ in range(rng.choice([1, 1, 1, 6]))])
        elif action < 0.58 and name in engine.ids:
            engine.finish(name)
            differ.forget(name)
            planner.forget(name)
            store.end(End(name, 1, 1))
        for sequence in engine.ledger.sequences.values():
            planner.note(sequence)
        plan = planner.next(engine.ledger.sequences.get)
        if plan is None:
            continue
        sequence = engine.ledger.sequences[plan.seq]
        built = differ.build(sequence, plan, number)
        if built is None:
            continue
        assert built.delta.checksum == checksum_of_payload(built.delta.parts, bytes(built.payload))
        differ.accept(built)
        planner.sent(sequence, built.upto)
        fate = rng.random()
        if fate < 0.1:
            outcome: int | Refusal = Refusal(
                NackReason.CORRUPT, store.replicas[plan.seq].watermark if plan.seq in store.replicas else 0
            )
        else:
            outcome = receive(store, built.delta, bytes(built.payload))
        if isinstance(outcome, Refusal):
            if outcome.reason == NackReason.KEY_UNKNOWN:
                differ.drop_keys(sequence.keys)
            differ.rewind(plan.seq)
            planner.rewind(sequence, outcome.watermark)
        else:
            planner.acked(plan.seq, 1, outcome)
            differ.hold(sequence.keys[: outcome // SIZE])
        for seq in store.replicas:
            if seq in engine.ids:
                stored_tokens_are_right(store, memory, engine, seq)
    for seq in list(store.replicas):
        store.end(End(seq, 1, 1))
    assert store.used_bytes == store.cached_bytes == pool_bytes(store)
    engine.close()


def pool_bytes(store: ReplicaStore) -> int:
    pool: BlockPool = store._pool
    return sum(-(-b.nbytes // 64) * 64 for b in pool._cached.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": ""},
        {"seq": "x" * 1000},
        {"epoch": 0},
        {"epoch": 1 << 63},
        {"base": -4},
        {"block_size": 0},
        {"block_bytes": 1 << 40},
        {"fingerprint": b"short"},
        {"salt": b"x" * 5000},
        {"token_ids": b""},
        {"token_ids": b"12345"},
        {"token_ids": ids(9)},
        {"parts": ()},
        {"parts": (Part(0, PartKind.WHOLE, b"k" * KEY_BYTES, 64), Part(1, PartKind.WHOLE, b"", 64))},
        {"parts": (Part(0, PartKind.WHOLE, b"", 64), Part(1, PartKind.WHOLE, b"", 64))},
        {"parts": (Part(1, PartKind.WHOLE, b"", 64), Part(0, PartKind.WHOLE, b"", 64))},
        {"token_ids": ids(2), "parts": (Part(0, PartKind.WHOLE, b"", 63),)},
        {"token_ids": ids(2), "parts": (Part(0, PartKind.ITEMS, b"", 7, 1, 1),)},
        {"token_ids": ids(2), "parts": (Part(0, PartKind.ITEMS, b"", 12, 1, 3),)},
        {"token_ids": ids(2), "parts": (Part(0, PartKind.ITEMS, b"", 12, 1, 0),)},
        {"token_ids": ids(2), "parts": (Part(0, PartKind.ITEMS, b"", 129, 1, 1),)},
        {"token_ids": ids(2), "parts": (Part(0, PartKind.KEY, b"", 0),)},
    ],
)
def test_a_delta_that_contradicts_itself_changes_nothing(changes: dict[str, Any]) -> None:
    """A peer that lies is refused before a byte of its payload is used."""
    store = ReplicaStore(np.zeros(1 << 12, np.uint8), lease_ns=1)
    refused = store.reserve(delta(**changes), "liar")
    assert isinstance(refused, Refusal) and refused.reason == NackReason.MALFORMED
    assert store.used_bytes == 0 and not store.replicas
    assert not isinstance(store.reserve(delta(), "honest"), Refusal)


@given(
    st.one_of(
        st.binary(min_size=24, max_size=24),
        st.lists(st.sampled_from([0, 1, 2, 8, 64, 65, 2**31, 2**32 - 1]), min_size=6, max_size=6).map(
            lambda numbers: array("I", numbers).tobytes()
        ),
    ),
    st.sampled_from([(PartKind.RUNS, 0), *((PartKind.ITEMS, size) for size in (1, 2, 4, 8))]),
    st.integers(0, 3),
)
def test_a_change_outside_its_block_is_refused(junk: bytes, kind: tuple[PartKind, int], count: int) -> None:
    """Nothing that arrives can write outside the block it belongs to."""
    memory = np.zeros(1 << 12, np.uint8)
    store = ReplicaStore(memory, lease_ns=1)
    first = delta(token_ids=ids(2), parts=(Part(0, PartKind.WHOLE, b"", 64),))
    assert receive(store, first, bytes(64)) == 2
    part = Part(0, kind[0], b"", len(junk), count, kind[1])
    change = delta(base=2, token_ids=ids(3)[8:], parts=(part,))
    outcome = receive(store, change, junk)
    block = store.replicas["s"].blocks[0]
    memory[block.offset : block.offset + 64] = 0
    assert not memory.any(), "bytes outside the block changed"
    assert outcome == 3 or isinstance(outcome, Refusal)


def test_a_pinned_tail_does_not_change_while_it_is_loaded() -> None:
    """An engine that is loading a tail never sees a later delta in it."""
    memory = np.zeros(1 << 12, np.uint8)
    store = ReplicaStore(memory, lease_ns=10**9)
    receive(store, delta(token_ids=ids(2), parts=(Part(0, PartKind.WHOLE, b"", 64),)), b"\1" * 64)
    found = store.match(Wanted(FINGERPRINT, b"", ids(3), SIZE, 64), seq="s", computed=0, limit=2, now_ns=0)
    change = Part(0, PartKind.ITEMS, b"", 16, 1, 8)
    first_item = array("I", [1, 1]).tobytes() + b"\2" * 8
    assert receive(store, delta(base=2, token_ids=ids(3)[8:], parts=(change,)), first_item) == 3
    assert (memory[found.extents[0] : found.extents[0] + 64] == 1).all()
    store.release(found.lease)
    again = store.match(Wanted(FINGERPRINT, b"", ids(3), SIZE, 64), seq="s", computed=0, limit=3, now_ns=0)
    assert (memory[again.extents[0] : again.extents[0] + 8] == 2).all()


def test_only_token_for_token_agreement_counts() -> None:
    """The name of a sequence is a hint; other ids, another salt or another model find nothing."""
    store = ReplicaStore(np.zeros(1 << 12, np.uint8), lease_ns=1)
    assert receive(store, delta(), bytes(128)) == 6

    def held(tokens: bytes, *, salt: bytes = b"", fingerprint: bytes = FINGERPRINT, seq: str = "s") -> int:
        wanted = Wanted(fingerprint, salt, tokens, SIZE, 64)
        return store.match(wanted, seq=seq, computed=0, limit=99, now_ns=0).tokens

    assert held(ids(9)) == 6
    assert held(ids(9), seq="other") == 4, "sealed blocks are found by content, the tail is not"
    assert held(ids(5) + b"\xff\0\0\0") == 5
    assert held(b"\xff\0\0\0" + ids(9)) == 0
    assert held(ids(9), salt=b"other tenant") == 0
    assert held(ids(9), fingerprint=b"g" * 16) == 0


def a_tail(epoch: int, incarnation: int) -> Delta:
    """Two tokens of a sequence, by one of its writers."""
    parts = (Part(0, PartKind.WHOLE, b"", 64),)
    return Delta(1, "s", epoch, incarnation, FINGERPRINT, b"", SIZE, 64, 0, ids(2), parts, 0)


@pytest.mark.parametrize(
    ("epoch", "incarnation", "gone"), [(1, 7, True), (2, 7, True), (0, 7, False), (2, 8, False)]
)
def test_an_end_is_good_for_what_the_same_life_wrote_before(epoch: int, incarnation: int, gone: bool) -> None:
    """An engine that took its sequence back may end it before anything of the new epoch was shipped."""
    store = ReplicaStore(np.zeros(1 << 12, np.uint8), lease_ns=1)
    assert receive(store, a_tail(1, 7), bytes(64)) == 2
    store.end(End("s", epoch, incarnation))
    assert ("s" not in store.replicas) is gone


def test_using_a_replica_is_not_hearing_of_its_writer() -> None:
    """A promotion must not keep what a writer that was restarted will never end."""
    store = ReplicaStore(np.zeros(1 << 12, np.uint8), lease_ns=1)
    assert receive(store, a_tail(1, 7), bytes(64)) == 2
    writer = store.replicas["s"].writer
    store.promote("s", 5, now_ns=100)
    assert store.drop_writer(writer, 50) == 1

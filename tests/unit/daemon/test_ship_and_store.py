"""From an engine's pages to a peer's store and back: whatever happens on the way, what the store says it
has is byte for byte what the engine computed."""

from __future__ import annotations

import os
import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.content_key import KEY_BYTES, block_key, root_key
from segue_core.geometry import Geometry, Region
from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.messages.peer import Ack, Delta, End, Nack, NackReason, Part, PartKind
from segue_daemon.blocks import BlockPool
from segue_daemon.bucket import Bucket, SharedBudget, Throttle
from segue_daemon.differ import Differ
from segue_daemon.ledger import Changes, Ledger
from segue_daemon.outbox import Outbox
from segue_daemon.pages import HostPages
from segue_daemon.planner import Planner
from segue_daemon.replicas import Refusal, Wanted
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import MAX_RETRIES_AT_ONCE, Ready, Shipment
from segue_daemon.store import ReplicaStore

SIZE = 4
DIM = 24
BLOCKS = 12
FINGERPRINT = b"f" * 16


def opaque() -> Geometry:
    """Slots spread over the block, as K is in vLLM's CPU kernels: [block, dim, slot], two layers."""
    shape, strides = (BLOCKS, DIM, SIZE), (DIM * SIZE * 2, SIZE * 2, 2)
    layer = BLOCKS * DIM * SIZE * 2
    regions = tuple(Region(0, i * layer, shape, strides, 2, ("block", "opaque", "opaque")) for i in range(2))
    return Geometry(BLOCKS, SIZE, (2 * layer,), regions).validate()


def slotted() -> Geometry:
    """[block, slot, dim]: a slot's bytes lie together."""
    layer = BLOCKS * DIM * SIZE * 2
    shape, strides = (BLOCKS, SIZE, DIM), (DIM * SIZE * 2, DIM * 2, 2)
    regions = tuple(Region(0, i * layer, shape, strides, 2, ("block", "slot", "dim")) for i in range(2))
    return Geometry(BLOCKS, SIZE, (2 * layer,), regions).validate()


class Engine:
    """A toy engine in this process: pages in a memfd, its journal applied to a ledger directly."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.fd = os.memfd_create("toy")
        os.ftruncate(self.fd, geometry.handle_bytes[0])
        self.pages = HostPages(geometry, [self.fd])
        self.ledger = Ledger(geometry, FINGERPRINT, max_sequences=100)
        self.free = list(range(BLOCKS))
        self.tables: dict[str, list[int]] = {}
        self.ids: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def write(self, block: int, slot: int, token: int, position: int) -> None:
        values = kv(token, position)
        for layer, region in enumerate(self.geometry.regions):
            for dim in range(DIM):
                at = region.offset + block * region.strides[0]
                at += (
                    (dim * region.strides[1] + slot * 2)
                    if "dim" not in region.axes
                    else slot * DIM * 2 + dim * 2
                )
                os.pwrite(self.fd, values[layer, dim].tobytes(), at)

    def run(self, seq: str, new_ids: list[int]) -> None:
        """Append `new_ids` and compute them in one step. Silently nothing if there are no blocks."""
        table = self.tables.setdefault(seq, [])
        ids = self.ids.setdefault(seq, [])
        need = -(-(len(ids) + len(new_ids)) // SIZE) - len(table)
        if need > len(self.free):
            return
        new = [self.free.pop() for _ in range(need)]
        first = not ids
        table += new
        ids += new_ids
        packed = array("I", new_ids).tobytes(), array("I", new).tobytes()
        self.ledger.apply(
            Begin(
                0,
                False,
                packed[1],
                (SequenceBegin(seq, 1, b"", packed[0], packed[1], 0),) if first else (),
                () if first else (SequenceUpdate(seq, *packed),),
                (),
                (),
            )
        )
        for position in range(self.computed.get(seq, 0), len(ids)):
            self.write(table[position // SIZE], position % SIZE, ids[position], position)
        self.computed[seq] = len(ids)
        self.ledger.apply(Commit(0, ((seq, len(ids)),)))

    def finish(self, seq: str) -> None:
        self.free += self.tables.pop(seq, [])
        self.ids.pop(seq, None)
        self.computed.pop(seq, None)
        self.ledger.apply(Begin(0, False, b"", (), (), (), (seq,)))

    def close(self) -> None:
        self.pages.close()
        os.close(self.fd)


def kv(token: int, position: int) -> np.ndarray[Any, Any]:
    base = np.arange(2 * DIM, dtype=np.int64).reshape(2, DIM)
    return ((base * 131 + token * 7919 + position * 104729) % 30011 + 1).astype(np.int16)


def receive(store: ReplicaStore, delta: Delta, payload: bytes) -> int | Refusal:
    """What the receiver does, without sockets."""
    reservation = store.reserve(delta, "a")
    if isinstance(reservation, Refusal):
        return reservation
    at, buffered = 0, {}
    for index, part in enumerate(delta.parts):
        data = np.frombuffer(payload[at : at + part.nbytes], np.uint8)
        at += part.nbytes
        target = store.room_for(reservation, index)
        if target is not None:
            target[:] = data
        elif part.kind != PartKind.KEY:
            buffered[index] = data
    return store.commit(reservation, buffered)


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
        offset = found.offsets[position // SIZE]
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


def ids(count: int) -> bytes:
    return array("I", range(count)).tobytes()


def delta(**changes: Any) -> Delta:
    """A well-formed delta of one whole sealed block and a tail."""
    key = block_key(root_key(FINGERPRINT, b""), ids(4))
    good = {
        "number": 1,
        "seq": "s",
        "epoch": 3,
        "incarnation": 1,
        "fingerprint": FINGERPRINT,
        "salt": b"",
        "block_size": SIZE,
        "block_bytes": 64,
        "base": 0,
        "token_ids": ids(6),
        "parts": (Part(0, PartKind.WHOLE, key, 64), Part(1, PartKind.WHOLE, b"", 64)),
        "checksum": 0,
    }
    return Delta(**(good | changes))


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
    assert (memory[found.offsets[0] : found.offsets[0] + 64] == 1).all()
    store.release(found.lease)
    again = store.match(Wanted(FINGERPRINT, b"", ids(3), SIZE, 64), seq="s", computed=0, limit=3, now_ns=0)
    assert (memory[again.offsets[0] : again.offsets[0] + 8] == 2).all()


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


def test_answers_to_old_deltas_do_not_rewind_twice() -> None:
    """Several deltas under way are refused one after another; only the first refusal starts over."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation = engine.pages, engine.ledger, 1

    engine.run("s", list(range(20)))
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    first = shipment.next_delta(1, lambda: None)
    engine.run("s", [1])
    shipment.note(Changes(grown=("s",)))
    second = shipment.next_delta(2, lambda: None)
    assert first and second and second.delta.base == 20
    shipment.nacked(Nack(1, "s", 1, 0, NackReason.GAP, 0))
    shipment.nacked(Nack(2, "s", 1, 0, NackReason.GAP, 0))
    third = shipment.next_delta(3, lambda: None)
    assert third and (third.delta.base, len(third.delta.token_ids)) == (0, 84)
    shipment.nacked(Nack(2, "s", 1, 0, NackReason.GAP, 0))
    assert shipment.next_delta(4, lambda: None) is None
    shipment.acked(Ack(3, "s", 1, 21, 0))
    assert shipment.lag_tokens() == 0
    engine.close()


def test_answers_from_before_a_sequence_left_and_came_back_do_not_count() -> None:
    """A sequence moved away from a peer and back: acks under way since before then say nothing about now."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    engine.run("s", list(range(20)))
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    assert shipment.next_delta(1, lambda: None)
    assert shipment.forget("s") == 1, "the epoch that is to be ended at the peer"
    shipment.begin("s", 0)
    again = shipment.next_delta(2, lambda: None)
    assert again and again.delta.base == 0
    shipment.acked(Ack(1, "s", 1, 20, 0))
    assert shipment.watermark("s") == 0
    shipment.acked(Ack(2, "s", 1, 20, 0))
    assert shipment.watermark("s") == 20
    assert shipment.need_bytes("s") == 5 * engine.geometry.block_bytes
    engine.close()


def test_what_a_peer_gave_up_is_not_counted_as_held() -> None:
    """A nack that no delta caused: the replica made room for others. Its watermark is what the peer says."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    engine.run("s", list(range(20)))
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    shipment.next_delta(1, lambda: None)
    shipment.acked(Ack(1, "s", 1, 20, 0))
    shipment.nacked(Nack(0, "s", 1, 0, NackReason.NO_ROOM, 0))
    assert shipment.watermark("s") == 0
    shipment.retry_refused(1 << 20)
    again = shipment.next_delta(2, lambda: None)
    assert again and again.delta.base == 0
    engine.close()


def test_what_was_refused_takes_turns_when_it_is_tried_again() -> None:
    """Those that never fit do not stand in the way of one that would."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    names = [f"s{i}" for i in range(MAX_RETRIES_AT_ONCE + 1)]
    for name in names:
        engine.ledger.apply(
            Begin(0, False, b"", (SequenceBegin(name, 1, b"", ids(4), bytes(4), 4),), (), (), ())
        )
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    tried = []
    number = 0
    for _ in range(3):
        while ready := shipment.next_delta(number + 1, lambda: None):
            number += 1
            tried.append(ready.delta.seq)
            shipment.nacked(Nack(number, ready.delta.seq, 1, 0, NackReason.NO_ROOM, 0))
        shipment.retry_refused(1 << 20)
    assert all(tried.count(name) > 1 for name in names)
    engine.close()


def test_a_full_peer_is_not_sent_more_than_it_may_have_room_for() -> None:
    """What it refused is tried again at each sign of life: for one block of room one try, not all of them."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    for name in ("a", "b", "c"):
        begun = SequenceBegin(name, 1, b"", ids(8), array("I", (0, 1)).tobytes(), 8)
        engine.ledger.apply(Begin(0, False, b"", (begun,), (), (), ()))
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    block, number, tried = engine.geometry.block_bytes, 0, []
    for room in (0, block, 4 * block, 1 << 20):
        shipment.retry_refused(room)
        tried.append(0)
        while ready := shipment.next_delta(number + 1, lambda: None):
            number, tried[-1] = number + 1, tried[-1] + 1
            shipment.nacked(Nack(number, ready.delta.seq, 1, 0, NackReason.NO_ROOM, 0))
    assert tried == [3, 1, 2, 3]
    engine.close()


def test_after_a_rewind_a_tail_goes_whole_until_the_peer_has_confirmed_one() -> None:
    """Deltas sent before the rewind may still be taken: changed words would fit what nobody is sure of."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    engine.write = lambda *_: None  # type: ignore[method-assign]
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]

    def kind_of(number: int, tokens: int = 1) -> PartKind:
        engine.run("s", list(range(tokens)))
        shipment.note(Changes(grown=("s",)))
        ready = shipment.next_delta(number, lambda: None)
        assert ready is not None
        return ready.delta.parts[-1].kind

    assert [kind_of(1, 9), kind_of(2)] == [PartKind.WHOLE, PartKind.ITEMS]
    shipment.nacked(Nack(2, "s", 1, 9, NackReason.GAP, 0))
    assert kind_of(3) == PartKind.WHOLE
    shipment.acked(Ack(2, "s", 1, 10, 0))
    assert kind_of(4) == PartKind.WHOLE, "the peer took the delta from before the rewind"
    assert kind_of(5) == PartKind.WHOLE
    shipment.acked(Ack(5, "s", 1, 13, 0))
    assert [kind_of(6), kind_of(7)] == [PartKind.WHOLE, PartKind.ITEMS]
    engine.close()


def test_nothing_is_built_without_credit_or_budget() -> None:
    """What cannot leave is not copied: it is built from what is true when it can."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    outbox = Outbox(Throttle("b", Bucket(1000, 100), SharedBudget(0)))
    outbox.opened(1000)
    assert outbox.delta_bytes(1 << 20) == 100
    engine.run("s", [1])
    outbox.shipments[1] = shipment = Shipment(Session(), ReplicationSettings(), 100, lambda _: True)  # type: ignore[arg-type]
    first = outbox.next(lambda: None, 0)
    assert isinstance(first, Ready) and len(first.delta.token_ids) == 4
    outbox.sent(501)
    for token in range(2):
        engine.run("s", [token])
        shipment.note(Changes(grown=("s",)))
        assert outbox.next(lambda: None, 0) == 0, "more than half the window is unacked"
    outbox.consumed(10_000)
    assert outbox.in_flight == 0
    outbox.throttle.take(600, 0)
    assert outbox.next(lambda: None, 0) == 500_000_000
    second = outbox.next(lambda: None, 500_000_000)
    assert isinstance(second, Ready) and len(second.delta.token_ids) == 8
    engine.close()


def test_a_copy_of_a_block_that_changed_hands_is_thrown_away() -> None:
    """Copy, then check: the journal said meanwhile that the block is somebody else's."""
    engine = Engine(opaque())

    class Session:
        pages, ledger, incarnation = engine.pages, engine.ledger, 1

    engine.run("s", list(range(8)))
    shipment = Shipment(Session(), ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]

    def reassigned() -> None:
        engine.ledger.apply(Begin(0, False, array("I", engine.tables["s"][:1]).tobytes(), (), (), (), ()))

    assert shipment.next_delta(1, reassigned) is None
    assert shipment.torn == 1
    engine.close()


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

"""How a peer's answers move what it is sent next."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from segue_core.messages.journal import Begin, SequenceBegin
from segue_core.messages.peer import Ack, Nack, NackReason, PartKind
from segue_daemon.bucket import Bucket, SharedBudget, Throttle
from segue_daemon.ledger import Changes
from segue_daemon.outbox import Outbox
from segue_daemon.shipment import MAX_RETRIES_AT_ONCE
from support.ship_engine import Engine, ids, opaque, shipment_of


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(opaque())
    yield engine
    engine.close()


def test_answers_to_old_deltas_do_not_rewind_twice(engine: Engine) -> None:
    """Several deltas under way are refused one after another; only the first refusal starts over."""
    engine.run("s", list(range(20)))
    shipment = shipment_of(engine)
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


def test_answers_from_before_a_sequence_left_and_came_back_do_not_count(engine: Engine) -> None:
    """A sequence moved away from a peer and back: acks under way since before then say nothing about now."""
    engine.run("s", list(range(20)))
    shipment = shipment_of(engine)
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


def test_the_end_of_an_old_epoch_leaves_the_one_that_came_back(engine: Engine) -> None:
    """Records were lost, the answer moved away and came back to this engine: what was orphaned then ends."""
    begun = SequenceBegin("s", 5, b"", ids(4), bytes(4), 4)
    engine.ledger.apply(Begin(0, False, b"", (begun,), (), (), ()))
    shipment = shipment_of(engine)
    assert shipment.next_delta(1, lambda: None)
    shipment.acked(Ack(1, "s", 5, 4, 0))
    shipment.end("s", 1)
    assert shipment.watermark("s") == 4
    shipment.end("s", 5)
    assert shipment.watermark("s") == 0


def test_what_a_peer_gave_up_is_not_counted_as_held(engine: Engine) -> None:
    """A nack that no delta caused: the replica made room for others. Its watermark is what the peer says."""
    engine.run("s", list(range(20)))
    shipment = shipment_of(engine)
    shipment.next_delta(1, lambda: None)
    shipment.acked(Ack(1, "s", 1, 20, 0))
    shipment.nacked(Nack(0, "s", 1, 0, NackReason.NO_ROOM, 0))
    assert shipment.watermark("s") == 0
    shipment.retry_refused(1 << 20)
    again = shipment.next_delta(2, lambda: None)
    assert again and again.delta.base == 0


def test_what_was_refused_takes_turns_when_it_is_tried_again(engine: Engine) -> None:
    """Those that never fit do not stand in the way of one that would."""
    names = [f"s{i}" for i in range(MAX_RETRIES_AT_ONCE + 1)]
    for name in names:
        engine.ledger.apply(
            Begin(0, False, b"", (SequenceBegin(name, 1, b"", ids(4), bytes(4), 4),), (), (), ())
        )
    shipment = shipment_of(engine)
    tried = []
    number = 0
    for _ in range(3):
        while ready := shipment.next_delta(number + 1, lambda: None):
            number += 1
            tried.append(ready.delta.seq)
            shipment.nacked(Nack(number, ready.delta.seq, 1, 0, NackReason.NO_ROOM, 0))
        shipment.retry_refused(1 << 20)
    assert all(tried.count(name) > 1 for name in names)


def test_a_full_peer_is_not_sent_more_than_it_may_have_room_for(engine: Engine) -> None:
    """What it refused is tried again at each sign of life: for one block of room one try, not all of them."""
    for name in ("a", "b", "c"):
        begun = SequenceBegin(name, 1, b"", ids(8), array("I", (0, 1)).tobytes(), 8)
        engine.ledger.apply(Begin(0, False, b"", (begun,), (), (), ()))
    shipment = shipment_of(engine)
    block, number, tried = engine.geometry.block_bytes, 0, []
    for room in (0, block, 4 * block, 1 << 20):
        shipment.retry_refused(room)
        tried.append(0)
        while ready := shipment.next_delta(number + 1, lambda: None):
            number, tried[-1] = number + 1, tried[-1] + 1
            shipment.nacked(Nack(number, ready.delta.seq, 1, 0, NackReason.NO_ROOM, 0))
    assert tried == [3, 1, 2, 3]


def test_after_a_rewind_a_tail_goes_whole_until_the_peer_has_confirmed_one(engine: Engine) -> None:
    """Deltas sent before the rewind may still be taken: changed words would fit what nobody is sure of."""
    engine.write = lambda *_: None  # type: ignore[method-assign]
    shipment = shipment_of(engine)

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


def test_nothing_is_built_without_credit_or_budget(engine: Engine) -> None:
    """What cannot leave is not copied: it is built from what is true when it can."""
    outbox = Outbox(Throttle("b", Bucket(1000, 100), SharedBudget(0)))
    outbox.opened(1000)
    assert outbox.delta_bytes(1 << 20) == 100
    engine.run("s", [1])
    outbox.shipments[1] = shipment = shipment_of(engine, 100)
    first = outbox.next_deltas(lambda: None, 0)
    assert isinstance(first, list) and [len(ready.delta.token_ids) for ready in first] == [4]
    outbox.sent(501)
    for token in range(2):
        engine.run("s", [token])
        shipment.note(Changes(grown=("s",)))
        assert outbox.next_deltas(lambda: None, 0) == 0, "more than half the window is unacked"
    outbox.consumed(10_000)
    assert outbox.in_flight == 0
    outbox.throttle.take(600, 0)
    assert outbox.next_deltas(lambda: None, 0) == 500_000_000
    second = outbox.next_deltas(lambda: None, 500_000_000)
    assert isinstance(second, list) and [len(ready.delta.token_ids) for ready in second] == [8]


def test_a_copy_of_a_block_that_changed_hands_is_thrown_away(engine: Engine) -> None:
    """Copy, then check: the journal said meanwhile that the block is somebody else's."""
    engine.run("s", list(range(8)))
    shipment = shipment_of(engine)

    def reassigned() -> None:
        engine.ledger.apply(Begin(0, False, array("I", engine.tables["s"][:1]).tobytes(), (), (), (), ()))

    assert shipment.next_delta(1, reassigned) is None
    assert shipment.torn == 1

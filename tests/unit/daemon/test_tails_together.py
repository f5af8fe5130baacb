"""Decode tails that are copied together, checked by one look at the journal, and sent together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.messages.peer import Ack, Delta, End, Nack
from segue_daemon.arena import Bytes
from segue_daemon.bucket import Bucket, SharedBudget, Throttle
from segue_daemon.ledger import Changes
from segue_daemon.outbox import Outbox
from segue_daemon.pages import HostPages, PagesError
from segue_daemon.replicas import Refusal
from segue_daemon.shipment import MAX_TAILS_AT_ONCE, Shipment
from segue_daemon.store import ReplicaStore
from support import ship_engine
from support.ship_engine import SIZE, Engine, kv, opaque, receive, shipment_of, slotted

WINDOW = 1 << 16
BLOCKS = 60


@pytest.fixture(autouse=True, scope="module")
def more_blocks() -> Iterator[None]:
    """Room for many sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ship_engine, "BLOCKS", BLOCKS)
        yield


def outbox_of(
    engine: Engine, *, shadow_bytes: int = 1 << 20, window: int = WINDOW, delta_bytes: int = 4096
) -> tuple[Outbox, Shipment]:
    """The way of `engine` to one peer, without limits of bandwidth."""
    outbox = Outbox(Throttle("b", Bucket(0), SharedBudget(0)))
    outbox.opened(window)
    shipment = shipment_of(engine, delta_bytes, shadow_bytes)
    outbox.shipments[1] = shipment
    return outbox, shipment


class Way:
    """An engine's deltas on their way to a store, several at once, while the engine goes on."""

    def __init__(self, layout: Any, shadow_bytes: int, seed: int, gathers: bool) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(layout())
        self.engine.pages.gathers = gathers
        self.outbox, self.shipment = outbox_of(self.engine, shadow_bytes=shadow_bytes)
        self.memory: Any = np.zeros(100 * self.engine.geometry.block_bytes, np.uint8)
        self.store = ReplicaStore(self.memory, lease_ns=1)
        self.under_way: list[tuple[Delta, bytes]] = []
        self.most = 0

    def work(self) -> None:
        """The engine's step: sequences grow, or end and begin anew in the blocks of others."""
        for name in [f"s{i}" for i in range(8)]:
            action = self.rng.random()
            if action < 0.05 and name in self.engine.ids:
                self.engine.finish(name)
                self.shipment.forget(name)
                self.under_way = [each for each in self.under_way if each[0].seq != name]
                if name in self.store.replicas:
                    self.store.end(End(name, 1, 1))
            elif action < 0.8:
                self.engine.run(
                    name, [self.rng.randrange(50) for _ in range(self.rng.choice((1, 1, 1, 1, 5)))]
                )
        self.shipment.note(Changes(grown=tuple(self.engine.ledger.sequences)))

    def ship(self) -> bool:
        """What goes out now; the engine may go on between the copies and the look at the journal."""
        ready = self.outbox.next_deltas(lambda: self.work() if self.rng.random() < 0.2 else None, 0)
        found = ready if isinstance(ready, list) else []
        self.most = max(self.most, len(found))
        numbers = [each.delta.number for each in found]
        assert numbers == sorted(set(numbers))
        self.under_way += [(each.delta, bytes(each.payload)) for each in found]
        return bool(found)

    def arrive(self) -> None:
        """Some of it arrives; some is refused, and what came behind it is then."""
        for _ in range(self.rng.randrange(20)):
            if not self.under_way:
                return
            delta, payload = self.under_way.pop(0)
            if self.rng.random() < 0.05:
                continue  # as if it was corrupt, and that was never heard of
            outcome = receive(self.store, delta, payload)
            about = delta.number, delta.seq, delta.epoch
            if isinstance(outcome, Refusal):
                self.shipment.nacked(Nack(*about, outcome.watermark, outcome.reason, 0))
            else:
                self.shipment.acked(Ack(*about, outcome, 0))

    def check(self) -> None:
        """What the store says that it has is what the engine computed."""
        for seq, replica in self.store.replicas.items():
            ids = self.engine.ids.get(seq, [])[: replica.watermark]
            for position, token in enumerate(ids):
                block = replica.blocks[position // SIZE]
                octets = self.memory[block.offset : block.offset + self.engine.geometry.block_bytes]
                values = octets.view(np.int16).reshape(2, -1)
                if "slot" in self.engine.geometry.regions[0].axes:
                    have = values.reshape(2, SIZE, -1)[:, position % SIZE]
                else:
                    have = values.reshape(2, -1, SIZE)[:, :, position % SIZE]
                assert np.array_equal(have, kv(token, position)), f"token {position} of {seq}"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([opaque, slotted]),
    st.sampled_from([0, 400, 1 << 20]),
    st.booleans(),
)
def test_tails_that_go_together_bring_what_the_engine_computed(
    seed: int, layout: Any, shadow_bytes: int, gathers: bool
) -> None:
    """Whatever of them is torn, lost or refused, and whether they are copied together or one by one: none
    brings bytes of another, or of a later owner."""
    way = Way(layout, shadow_bytes, seed, gathers)
    for _ in range(20):
        way.work()
        while way.ship():
            pass
        way.arrive()
        way.check()
    assert way.most > 1
    way.engine.close()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    ("window", "delta_bytes", "shadow_bytes"), [(WINDOW, 4096, 0), (4200, 100, 0), (4200, 100, 1 << 20)]
)
def test_what_goes_together_is_bounded(
    window: int, delta_bytes: int, shadow_bytes: int, gathers: bool
) -> None:
    """However many tails are due and however small they are: others have their turn, and a peer's window
    holds what comes, also where a block is larger than a delta should be, and where only the copy tells how
    much of it goes."""
    engine = Engine(opaque())
    engine.pages.gathers = gathers
    outbox, shipment = outbox_of(engine, shadow_bytes=shadow_bytes, window=window, delta_bytes=delta_bytes)
    names = [f"s{i}" for i in range(BLOCKS)]
    for step in range(3):
        for name in names:
            engine.run(name, [step])
        shipment.note(Changes(grown=tuple(names)))
        found = 0
        while isinstance(ready := outbox.next_deltas(lambda: None, 0), list):
            assert len(ready) <= MAX_TAILS_AT_ONCE
            sent = sum(len(each.payload) for each in ready)
            assert sent <= window // 2
            assert sent - len(ready[-1].payload) < outbox._tail_bytes(shipment)
            found += len(ready)
        assert found == BLOCKS, "those that were left go with the next"
    engine.close()


class Failing(HostPages):
    """Memory that cannot be read any more from some copy on."""

    left = 0

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        self.left -= 1
        if self.left < 0:
            self.failure = "lost"
            raise PagesError(self.failure)
        return super().copy_slots(block, first, last, out)


@pytest.mark.parametrize("gathers", [False, True])
def test_what_was_copied_before_the_memory_was_lost_still_goes_out(gathers: bool) -> None:
    """Of tails that are copied together those that are complete are sent, and nothing of the others."""
    engine = Engine(slotted())
    pages = engine.pages = Failing(engine.geometry, [engine.fd])
    pages.gathers = gathers
    outbox, shipment = outbox_of(engine)
    names = [f"s{i}" for i in range(5)]
    sent = []
    for step, pages.left in enumerate((5, 3)):
        for name in names:
            engine.run(name, [step])
        shipment.note(Changes(grown=tuple(names)))
        sent.append(0)
        while isinstance(ready := outbox.next_deltas(lambda: None, 0), list):
            sent[-1] += len(ready)
    assert (sent, pages.failure) == ([5, 3], "lost")
    engine.close()

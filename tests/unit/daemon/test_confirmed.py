"""An engine that only publishes tables: what its daemon sends of it was confirmed or proved, whatever the
allocator does between two publications."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.ring import Word
from segue_daemon.differ import Built, Differ
from segue_daemon.hold import Held, HoldBack
from segue_daemon.kept import OwnKeep
from segue_daemon.scan import BlockScan
from segue_daemon.store import ReplicaStore
from segue_shim.published import PublishedTables
from support.hostile_tables import Bench, Live

Patch = pytest.MonkeyPatch


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 1 << 20]), st.sampled_from([1, 1, 2]))
def test_what_a_peer_holds_is_what_the_engine_had(
    seed: int, slots: bool, hold_bytes: int, publish_every: int
) -> None:
    """Blocks change hands while they are copied, and nobody says so before: still each replica is right."""
    bench = Bench(seed, slots=slots, publish_every=publish_every, hold_bytes=hold_bytes)
    bench.run(300)
    assert bench.wrong == []
    bench.close()


@pytest.mark.parametrize("slots", [False, True], ids=["opaque", "slots"])
def test_an_engine_that_stands_still_is_replicated_to_its_last_token(slots: bool) -> None:
    """Publishing the same once more confirms what was copied: nothing stays behind for ever."""
    for seed in range(5):
        bench = Bench(seed, slots=slots)
        bench.run(200)
        bench.settle()
        computed = {seq: live.computed for seq, live in bench.engine.live.items() if live.computed}
        for peer in bench.peers:
            held = {seq: replica.watermark for seq, replica in peer.store.replicas.items()}
            assert {seq: held.get(seq) for seq in computed} == computed
            assert peer.delivered
        assert bench.wrong == []
        bench.close()


def test_of_a_dead_engine_only_what_is_proved_is_sent() -> None:
    """Nobody confirms its memory any more: a block with a hash that is known goes, a tail does not."""
    bench = Bench(3, slots=True)
    bench.engine.live["s"] = Live(list(range(10)))
    while bench.engine.live["s"].computed < 10:
        bench.engine.tick()
    bench.settle()
    bench.engine.session.dead = True
    peer = bench.peers[0]
    held = peer.store.replicas["s"].watermark
    assert held == bench.engine.live["s"].computed
    peer.lose_everything("s")
    while peer.shipment.unflushed():
        assert bench.ship(peer), "what cannot be proved is not waited for"
    assert peer.store.replicas["s"].watermark == 8 < held
    bench.engine._pages[:] = 0
    peer.lose_everything("s")
    while bench.ship(peer):
        pass
    assert peer.shipment.watermark("s") == 0, "these bytes were never confirmed"
    bench.close()


def bench_with_a_copy_held_back() -> Bench:
    """`s` is at both peers and proved up to 8 of 10 tokens; a copy of `t` waits for a word of the engine."""
    bench = Bench(3, slots=True, hold_bytes=0)
    bench.engine.live["s"] = Live(list(range(10)))
    while bench.engine.live["s"].computed < 10:
        bench.engine.tick()
    bench.settle()
    live = bench.engine.live["t"] = Live([60, 61], [bench.engine.free.pop()], 2)
    for position in range(2):
        bench.engine._write(live, position)
    bench.engine.publish()
    bench.drain()
    for peer in bench.peers:
        while "t" not in peer.shipment._hold:  # type: ignore[attr-defined]
            assert bench.ship(peer)
    return bench


def test_what_a_dead_engine_will_never_confirm_is_not_in_the_way_of_what_is_proved() -> None:
    """Its copies that wait fill the memory that there is for them: for good, now that it is dead."""
    bench = bench_with_a_copy_held_back()
    peer = bench.peers[0]
    bench.engine.session.dead = True
    peer.lose_everything("s")
    peer.shipment.flush(0)
    while peer.shipment.unflushed():
        assert bench.ship(peer)
    assert peer.store.replicas["s"].watermark == 8
    assert peer.shipment.held_bytes == 0
    bench.close()


def test_a_copy_of_what_was_forgotten_is_let_go_at_once() -> None:
    """The journal lost records: nothing that comes later confirms it, and others wait behind it."""
    bench = bench_with_a_copy_held_back()
    bench.engine.ring.set(Word.DROPPED, 1)
    bench.drain()
    assert [peer.shipment.held_bytes for peer in bench.peers] == [0, 0]
    bench.close()


def test_of_a_dead_engine_only_what_is_proved_is_kept_here() -> None:
    """Its own host keeps no block that somebody else may have written into meanwhile."""
    bench = Bench(3, slots=True)
    bench.engine.live["s"] = Live(list(range(10)))
    while bench.engine.live["s"].computed < 10:
        bench.engine.tick()
    bench.settle()
    bench.engine.session.dead = True

    def kept() -> int:
        store = ReplicaStore(np.zeros(1 << 16, np.uint8), lease_ns=1)
        for _ in OwnKeep(store, ttl_ns=1).slices(bench.engine.session, lambda _: False, lambda: 0):
            pass
        return store.replicas["s"].watermark if "s" in store.replicas else 0

    assert kept() == 8
    bench.engine._pages[:] = 0
    assert kept() == 0
    bench.close()


def test_held_copies_are_bounded_and_settle_in_order() -> None:
    """Past the limit no more copies are made; a commit before a copy says nothing about it."""
    first, second = (SimpleNamespace(seq=seq) for seq in "ab")
    built = Built(None, memoryview(bytes(100)), 4, None)  # type: ignore[arg-type]
    hold = HoldBack(150)
    hold.add(Held(first, built, 40, False))  # type: ignore[arg-type]
    assert not hold.full
    hold.add(Held(second, built, 80, True))  # type: ignore[arg-type]
    assert hold.full and hold.nbytes == 200
    assert hold.settled(40) is None
    oldest = hold.settled(48)
    assert oldest is not None and oldest.sequence is first
    hold.drop("a")
    assert not hold.full and hold.settled(48) is None and "b" in hold and hold.nbytes == 100


def send_unconfirmed(patch: Patch) -> None:
    """A copy counts as confirmed as soon as it is made."""
    patch.setattr(HoldBack, "settled", lambda self, _: next(iter(self._held.values()), None))


def believe_any_commit(patch: Patch) -> None:
    """A commit confirms, whoever has the blocks by then."""
    patch.setattr(Differ, "still_good", lambda *_: True)


def believe_a_commit_written_during_the_copy(patch: Patch) -> None:
    """A copy counts as made when it began."""
    add = HoldBack.add

    def early(self: HoldBack, held: Held) -> None:
        add(self, Held(held.sequence, held.built, held.written - 1, held.tail))

    patch.setattr(HoldBack, "add", early)


def take_any_bytes_for_proved(patch: Patch) -> None:
    """The scan does not look at the bytes."""
    patch.setattr(BlockScan, "proves", lambda self, key, block: key in self._hashes)


def overlook_missed_steps(patch: Patch) -> None:
    """An engine that publishes every other step is not noticed."""
    patch.setattr(
        PublishedTables, "missed_steps", property(lambda self: 0, lambda self, value: None), raising=False
    )


@pytest.mark.parametrize(
    ("mistake", "publish_every"),
    [
        (send_unconfirmed, 1),
        (believe_any_commit, 1),
        (believe_a_commit_written_during_the_copy, 1),
        (take_any_bytes_for_proved, 1),
        (overlook_missed_steps, 2),
    ],
)
def test_each_part_of_the_hold_back_is_needed(
    mistake: Callable[[Patch], None], publish_every: int, monkeypatch: Patch
) -> None:
    """With any of them left out, torn copies reach the peer: the test above would find them."""
    mistake(monkeypatch)
    found = 0
    for seed in range(60):
        bench = Bench(seed, slots=seed % 2 == 0, publish_every=publish_every)
        bench.run(300)
        found += bool(bench.wrong)
        bench.close()
        if found:
            return
    raise AssertionError("60 seeds found nothing")

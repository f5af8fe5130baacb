"""What goes when the replica store runs short, in which order, and who hears of it."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from segue_core.clock import MonotonicClock
from segue_core.content_key import TOKEN_BYTES, chain, root_key
from segue_core.errors import ConfigError
from segue_core.messages.peer import Delta, End, NackReason, Part, PartKind
from segue_daemon import keeper
from segue_daemon.arena import Arena
from segue_daemon.eviction import MAX_BLOCKS, HostPressure
from segue_daemon.keeper import StoreKeeper
from segue_daemon.replicas import Loss, MatchResult, Refusal, Wanted
from segue_daemon.scrub import Scrubber
from segue_daemon.settings import StoreSettings
from segue_daemon.store import ReplicaStore
from segue_daemon.writers import Losses

SIZE = 4
BLOCK = 64
FINGERPRINT = b"f" * 16


class Shelf:
    """A store for `blocks` blocks, what it told, and shorthands for what writers and engines do."""

    def __init__(self, blocks: int, **options: Any) -> None:
        self.memory = options.pop("memory", None)
        if self.memory is None:
            self.memory = np.zeros(blocks * BLOCK, np.uint8)
        self.losses: list[Loss] = []
        self.store = ReplicaStore(self.memory, lease_ns=10**9, on_loss=self.losses.append, **options)
        self.now = 1

    def ids(self, seq: str, count: int) -> bytes:
        first = crc32(seq.encode()) % 1_000_000 * 1000
        return array("I", range(first, first + count)).tobytes()

    def ship(self, seq: str, upto: int, *, epoch: int = 1) -> int | Refusal:
        """Take `seq` from where it is to `upto` tokens."""
        self.now += 1
        replica = self.store.replicas.get(seq)
        base = replica.watermark if replica is not None and replica.epoch == epoch else 0
        ids = self.ids(seq, upto)
        keys = list(chain(root_key(FINGERPRINT, b""), ids, SIZE))
        parts = tuple(
            Part(i, PartKind.WHOLE, keys[i] if i < len(keys) else b"", BLOCK)
            for i in range(base // SIZE, -(-upto // SIZE))
        )
        new = ids[base * TOKEN_BYTES :]
        delta = Delta(1, seq, epoch, 1, FINGERPRINT, b"", SIZE, BLOCK, base, new, parts, 0)
        reservation = self.store.reserve(delta, "w", self.now)
        if isinstance(reservation, Refusal):
            return reservation
        for index, part in enumerate(parts):
            room = self.store.room_for(reservation, index)
            assert room is not None
            room[:] = part.position % 251 + 1
        return self.store.commit(reservation, {}, self.now)

    def end(self, seq: str) -> None:
        self.store.end(End(seq, 1, 1))

    def match(self, seq: str, count: int, hint: str = "") -> MatchResult:
        """Ask for the first `count` tokens of `seq`, as an engine does for a request of another name."""
        self.now += 1
        wanted = Wanted(FINGERPRINT, b"", self.ids(seq, count), SIZE, BLOCK)
        return self.store.match(wanted, seq=hint, computed=0, limit=count, now_ns=self.now)

    def cached_tokens(self, seq: str, count: int) -> int:
        found = self.match(seq, count)
        self.store.release(found.lease)
        return found.tokens

    def evicted(self) -> tuple[int, int, int]:
        evictor = self.store.evictor
        return evictor.cached_blocks, evictor.stale_replicas, evictor.live_replicas


def test_cache_goes_first_then_stale_sessions_then_the_cheapest_live_replica() -> None:
    """Whoever is being protected loses that last; the longest answer of all."""
    shelf = Shelf(12, session_ttl_ns=100)
    shelf.ship("ended", 8)
    shelf.end("ended")
    shelf.ship("stale", 8)
    shelf.now += 200
    shelf.ship("long", 12)
    shelf.ship("short", 8)
    shelf.ship("grows", 12)
    assert (shelf.store.used_bytes, shelf.evicted()) == (12 * BLOCK, (0, 0, 0))
    shelf.ship("grows", 20)
    assert shelf.evicted() == (2, 0, 0), "the ended sequence's blocks"
    shelf.ship("grows", 28)
    assert shelf.evicted() == (4, 1, 0) and "stale" not in shelf.store.replicas
    shelf.ship("grows", 36)
    assert shelf.evicted() == (6, 1, 1) and set(shelf.store.replicas) == {"long", "grows"}
    told = [(loss.writer, loss.seq, loss.epoch, loss.watermark, loss.reason) for loss in shelf.losses]
    assert told == [("w", "stale", 1, 0, NackReason.NO_ROOM), ("w", "short", 1, 0, NackReason.NO_ROOM)]


def test_the_high_mark_starts_and_the_low_mark_ends_eviction() -> None:
    """Between the marks nothing happens: room is made in one go, not block by block."""
    shelf = Shelf(100, high_watermark=0.9, low_watermark=0.5)
    for number in range(18):
        shelf.ship(f"s{number}", 5 * SIZE)
        shelf.end(f"s{number}")
    assert shelf.evicted() == (0, 0, 0) and shelf.store.used_bytes == 90 * BLOCK
    shelf.ship("one more", SIZE)
    assert shelf.store.used_bytes == 50 * BLOCK


def test_one_call_gives_up_a_bounded_number_of_blocks() -> None:
    """A large cache is given up in steps, between which the daemon does its other work."""
    shelf = Shelf(5 * MAX_BLOCKS)
    shelf.ship("s", 4 * MAX_BLOCKS * SIZE)
    shelf.end("s")
    shelf.store.budget.limit = BLOCK
    before = shelf.store.used_bytes
    assert shelf.store.evictor.trim(shelf.now)
    assert before - shelf.store.used_bytes == MAX_BLOCKS * BLOCK
    while shelf.store.evictor.trim(shelf.now):
        pass
    assert shelf.store.used_bytes == BLOCK


def test_a_new_replica_pushes_no_other_one_out() -> None:
    """A store full of live replicas refuses and reports no room: nobody is sent in circles."""
    shelf = Shelf(20, high_watermark=0.9, low_watermark=0.5)
    shelf.ship("a", 5 * SIZE)
    shelf.ship("b", 5 * SIZE)
    refused = shelf.ship("c", SIZE)
    assert isinstance(refused, Refusal) and refused.reason == NackReason.NO_ROOM
    assert set(shelf.store.replicas) == {"a", "b"} and shelf.store.evictor.room_bytes == 0
    shelf.ship("a", 9 * SIZE)
    assert set(shelf.store.replicas) == {"a", "b"}, "up to the high mark those that are here grow"
    shelf.end("b")
    assert shelf.store.evictor.room_bytes == BLOCK
    assert shelf.ship("c", SIZE) == SIZE


def test_a_refused_newcomer_gets_the_room_of_sessions_that_go_stale_later() -> None:
    """What was refused for lack of room can be told of room without anybody else having ended."""
    shelf = Shelf(10, session_ttl_ns=100, low_watermark=0.5, high_watermark=0.9)
    shelf.ship("old", 5 * SIZE)
    assert isinstance(shelf.ship("new", SIZE), Refusal)
    shelf.store.evictor.trim(shelf.now)
    assert shelf.store.evictor.room_bytes == 0
    shelf.store.evictor.trim(shelf.now + 200)
    assert shelf.store.evictor.room_bytes == 5 * BLOCK and not shelf.store.replicas


def test_a_replica_that_outgrows_the_store_keeps_what_it_has() -> None:
    """It is refused, not thrown away, and the others are not thrown away for it in vain."""
    shelf = Shelf(10)
    shelf.ship("other", 2 * SIZE)
    shelf.ship("huge", 7 * SIZE)
    refused = shelf.ship("huge", 11 * SIZE)
    assert isinstance(refused, Refusal) and (refused.reason, refused.watermark) == (NackReason.NO_ROOM, 28)
    assert {seq: r.watermark for seq, r in shelf.store.replicas.items()} == {"other": 8, "huge": 28}


def test_what_is_being_loaded_is_not_evicted() -> None:
    """An engine that takes a sequence over finds it whole, however short the store is."""
    shelf = Shelf(10)
    shelf.ship("loading", 3 * SIZE)
    shelf.ship("grows", 6 * SIZE)
    found = shelf.match("loading", 3 * SIZE, hint="loading")
    assert isinstance(shelf.ship("grows", 10 * SIZE), Refusal)
    assert shelf.store.replicas["loading"].watermark == found.tokens == 3 * SIZE
    shelf.store.release(found.lease)
    assert shelf.ship("grows", 10 * SIZE) == 10 * SIZE
    assert "loading" not in shelf.store.replicas


def test_the_next_turn_of_a_conversation_finds_the_last_one() -> None:
    """Blocks outlive their request; a conversation that goes on stays longer than one that was left."""
    shelf = Shelf(20)
    for seq in ("left", "goes on"):
        shelf.ship(seq, 8 * SIZE + 2)
        shelf.end(seq)
    assert shelf.cached_tokens("left", 8 * SIZE) == 8 * SIZE
    assert shelf.cached_tokens("goes on", 10 * SIZE) == 8 * SIZE, "another request, the same prefix"
    assert (shelf.store.hits, shelf.store.misses) == (16, 2)
    shelf.ship("new", 8 * SIZE)
    assert shelf.cached_tokens("goes on", 8 * SIZE) == 8 * SIZE
    assert shelf.cached_tokens("left", 8 * SIZE) == 4 * SIZE, "what goes of a prefix is its end"


@pytest.mark.parametrize("verify", ["always", "load"])
def test_a_poisoned_block_is_never_loaded(verify: Any) -> None:
    """Memory that changes by itself costs the tokens from there on, not a wrong answer."""
    shelf = Shelf(20, verify=verify)
    shelf.ship("s", 6 * SIZE + 1)
    shelf.now += 10**12
    shelf.memory[shelf.store.replicas["s"].blocks[3].offset + 5] ^= 4
    found = shelf.match("s", 7 * SIZE, hint="s")
    assert found.tokens == 3 * SIZE and shelf.store.integrity.poisoned == 1
    assert shelf.losses == [Loss("w", "s", 1, 3 * SIZE, NackReason.CORRUPT)]
    assert shelf.store.replicas["s"].watermark == 3 * SIZE
    shelf.store.release(found.lease)
    assert shelf.ship("s", 6 * SIZE) == 6 * SIZE, "its writer sends it again"
    assert shelf.match("s", 6 * SIZE).tokens == 6 * SIZE


def test_the_scrubber_finds_a_poisoned_block_before_anybody_asks() -> None:
    """Every replica that contains it is cut before it, and its writer told."""
    shelf = Shelf(20)
    shelf.ship("s", 4 * SIZE)
    shelf.ship("t", 2 * SIZE)
    shelf.memory[shelf.store.replicas["s"].blocks[0].offset] ^= 1
    shelf.memory[shelf.store.replicas["t"].blocks[1].offset] ^= 1
    for _ in range(shelf.store.sealed_blocks):
        shelf.store.integrity.scrub_one(shelf.now)
    assert {loss.seq: loss.watermark for loss in shelf.losses} == {"s": 0, "t": SIZE}
    assert shelf.store.integrity.poisoned == 2
    assert shelf.cached_tokens("s", 4 * SIZE) == 0
    assert shelf.cached_tokens("t", 2 * SIZE) == SIZE


def test_scrubbing_keeps_to_its_rate_and_reaches_every_block() -> None:
    """In the background means: so many bytes a second, and none is left out."""
    shelf = Shelf(20)
    shelf.ship("s", 10 * SIZE)
    scrubber = Scrubber(bytes_per_s=5 * BLOCK, burst=3 * BLOCK)
    seen = []
    for tick in range(21):
        scrubber.tick(tick * 10**8, shelf.store.sealed_blocks, lambda: shelf.store.integrity.scrub_one(1))
        seen.append(scrubber.scrubbed_bytes // BLOCK)
    assert seen[-1] in (10, 11) and max(b - a for a, b in pairwise(seen)) == 1
    scrubber.tick(10**12, shelf.store.sealed_blocks, lambda: shelf.store.integrity.scrub_one(1))
    assert scrubber.scrubbed_bytes // BLOCK - seen[-1] <= 3
    off = Scrubber(bytes_per_s=0)
    off.tick(0, 10, lambda: BLOCK)
    off.tick(10**12, 10, lambda: BLOCK)
    assert off.scrubbed_bytes == 0


def test_the_host_gets_its_memory_back_at_once_and_lends_it_again_with_care() -> None:
    """The limit follows what is really resident, and does not swing around the mark."""
    pressure = HostPressure(1000, min_free_bytes=400)
    assert pressure.observe(400, 1000) == 1000
    assert pressure.observe(300, 1000) == 900
    assert pressure.observe(300, 900) == 800, "not enough yet"
    assert pressure.observe(450, 800) == 800, "not enough to spare"
    assert pressure.observe(600, 800) == 900
    assert pressure.observe(5000, 800) == 1000
    assert pressure.observe(0, 1000) == 600
    assert HostPressure(1000, min_free_bytes=0).observe(0, 1000) == 1000


async def test_replicas_give_way_to_the_host_and_its_pages_are_returned() -> None:
    """When the host runs short the arena really takes less memory, and is used again later."""
    arena = Arena(4 << 20)
    available = 100 << 20
    settings = StoreSettings(budget_bytes=4 << 20, min_host_free_bytes=100 << 20)
    shelf = Shelf(0, memory=arena.bytes)
    for number in range(100):
        shelf.ship(f"s{number}", 2000)
    full = shelf.store.used_bytes
    tender = StoreKeeper(settings, shelf.store, arena, MonotonicClock(), available_bytes=lambda: available)
    await tender.tick()
    assert (shelf.store.used_bytes, arena.resident_bytes) == (full, 4 << 20)
    available = 97 << 20
    await tender.tick()
    available = 100 << 20
    assert shelf.store.budget.limit == 1 << 20
    assert shelf.store.used_bytes <= 1 << 20 and arena.resident_bytes <= 2 << 20
    assert len(shelf.losses) == shelf.store.evictor.live_replicas > 60
    left = next(iter(shelf.store.replicas))
    assert shelf.match(left, 2000).tokens == 2000
    available = 200 << 20
    await tender.tick()
    assert shelf.store.budget.limit == 4 << 20
    assert shelf.ship("again", 20000) == 20000
    shelf.memory = np.empty(0, np.uint8)
    arena.close()


def test_the_host_is_asked_for_what_it_can_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MemAvailable, in bytes; without it there is an error and not a guess."""
    assert keeper.host_available_bytes() > 1 << 20
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  8 kB\nMemAvailable:  5 kB\n")
    monkeypatch.setattr(keeper, "MEMINFO", file)
    assert keeper.host_available_bytes() == 5120
    file.write_text("MemTotal:  8 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        keeper.host_available_bytes()


def test_marks_the_wrong_way_round_are_refused() -> None:
    """A configuration that cannot mean anything is an error at start."""
    with pytest.raises(ConfigError, match="low_watermark"):
        StoreSettings(high_watermark=0.5, low_watermark=0.6)
    with pytest.raises(ConfigError, match="gpu_budget_bytes"):
        StoreSettings(gpu_budget_bytes=1 << 30, verify="always")


def test_what_writers_must_be_told_is_bounded_and_told_once() -> None:
    """A peer that never comes back costs a bounded amount of memory; one that does hears the newest word."""
    losses = Losses(3)
    for watermark in (8, 4):
        losses.add(Loss("a", "s", 1, watermark, NackReason.CORRUPT))
    assert [loss.watermark for loss in losses.take("a")] == [4] and losses.take("a") == []
    for number in range(5):
        losses.add(Loss("b", f"s{number}", 1, 0, NackReason.NO_ROOM))
    assert [loss.seq for loss in losses.take("b")] == ["s2", "s3", "s4"]
    losses.add(Loss("c", "s", 1, 0, NackReason.NO_ROOM))
    assert len(losses.take("c")) == 1


def test_losses_of_writers_that_never_come_back_do_not_keep_others_from_hearing_theirs() -> None:
    """Hosts come and go; who is here still has to learn what is not held for it any more."""
    losses = Losses(3)
    gone = [Loss("gone", seq, 1, 0, NackReason.NO_ROOM) for seq in "abc"]
    here = [Loss("here", seq, 1, 0, NackReason.NO_ROOM) for seq in "st"]
    for loss in gone + here:
        losses.add(loss)
    assert losses.take("here") == here
    assert losses.take("gone") == gone[2:]
    for loss in here + here:
        losses.add(loss)
    assert losses.take("here") == here


@pytest.mark.parametrize(("verify", "reason"), [("always", NackReason.KEY_UNKNOWN), ("load", None)])
def test_with_always_a_poisoned_block_gets_no_new_replica(verify: Any, reason: NackReason | None) -> None:
    """A writer that refers to a block by its key is asked for the bytes if the block is not sound."""
    shelf = Shelf(10, verify=verify)
    shelf.ship("s", SIZE)
    ids = shelf.ids("s", SIZE)
    (key,) = chain(root_key(FINGERPRINT, b""), ids, SIZE)
    shelf.memory[shelf.store.replicas["s"].blocks[0].offset] ^= 1
    part = Part(0, PartKind.KEY, key, 0)
    outcome = shelf.store.reserve(
        Delta(1, "t", 1, 1, FINGERPRINT, b"", SIZE, BLOCK, 0, ids, (part,), 0), "w", 5
    )
    assert (outcome.reason if isinstance(outcome, Refusal) else None) == reason
    assert ("s" in shelf.store.replicas) == (reason is None)

"""What a dead engine left is kept by its own daemon: what, how much, how long, and at whose cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from segue_core.clock import ManualClock
from segue_core.messages.journal import Begin
from segue_core.messages.peer import End, NackReason
from segue_daemon.app import Daemon
from segue_daemon.arena import Bytes
from segue_daemon.kept import MAX_EXPIRED_AT_ONCE
from segue_daemon.replicas import OWN_WRITER, Refusal, Replica
from support.kept_host import (
    BLOCK,
    FINGERPRINT,
    GEOMETRY,
    SIZE,
    TTL_NS,
    Host,
    Life,
    Peer,
)


async def test_what_nobody_has_is_kept_to_the_last_token() -> None:
    """Full blocks and the tail, byte for byte, for an engine of the same kind and for no other; a replica is
    over once it was loaded."""
    at, life = Host(), Life(1)
    at.register(life)
    life.write("s", 10)
    life.write("t", 8)
    await at.dies(life)
    assert at.kept() == {"s": 10, "t": 8}
    assert (at.bytes_of("s"), at.bytes_of("t")) == ([1, 2, 3], [4, 5])
    assert at.host.session is not None and at.host.session.closed, "the memory was let go"
    other = Life(2, fingerprint=b"another model's.")
    at.register(other)
    assert at.store.promote("s", 2) == 10
    assert (at.load("s", 10), at.kept()) == (0, {"s": 10, "t": 8})
    await at.dies(other)
    at.register(Life(3))
    assert (at.load("s", 10), at.kept()) == (10, {"t": 8})
    at.host.stop()


@pytest.mark.parametrize(
    ("peer", "kept"),
    [
        (Peer(connected=True, has={"whole": 8, "part": 4}), {"part": 8, "none": 8}),
        (Peer(connected=False, has={"whole": 8, "part": 4}), {"whole": 8, "part": 8, "none": 8}),
    ],
    ids=["connected", "cut off"],
)
async def test_only_what_no_connected_peer_has_whole_is_kept(peer: Peer, kept: dict[str, int]) -> None:
    """What goes on elsewhere, or must not be copied at all, is not kept either."""
    at, life = Host(100, peer), Life(1)
    at.register(life)
    for seq in ("whole", "part", "none", "fenced"):
        life.write(seq, 8)
    life.write("private", 8, replication="off")
    at.host.drain()
    assert at.host.fence("fenced", 2)
    await at.dies(life)
    assert at.kept() == kept
    at.host.stop()


async def test_an_engine_that_hung_up_leaves_nothing() -> None:
    """It lives, and goes on overwriting what it has shared."""
    at, life = Host(), Life(1)
    at.register(life)
    life.write("s", 10)
    at.host.drain()
    session = at.host.live
    assert session is not None
    at.host.left(session, dead=False)
    assert session.closed and not at.salvages and not at.store.replicas


async def test_what_is_kept_never_costs_a_peer_anything() -> None:
    """It takes free room and cache below the low mark, the longest first; peers' growth and new replicas push
    it out before anything of theirs, the shortest first, and nobody needs to be told."""
    at, life = Host(20, low=0.8), Life(1)
    assert [at.from_peer("p", 12), at.from_peer("q", 12), at.from_peer("over", 12)] == [12, 12, 12]
    at.store.end(End("over", 1, 77))
    at.register(life)
    for seq, tokens in (("short", 4), ("long", 20), ("middle", 16), ("more", 12)):
        life.write(seq, tokens)
    await at.dies(life)
    assert at.kept() == {"long": 20, "middle": 16, "short": 4}, "16 blocks are below the low mark"
    assert at.store.evictor.room_bytes == 10 * BLOCK, "to peers all of that is room"
    assert at.from_peer("new", 8) == 8
    assert at.kept() == {"long": 20}
    assert at.from_peer("p", 44, base=12) == 44 and at.kept() == {}
    assert {seq: r.watermark for seq, r in at.store.replicas.items()} == {"p": 44, "q": 12, "new": 8}
    assert not at.losses and at.store.evictor.own_replicas == 3
    at.host.stop()


async def test_a_store_that_is_full_of_peers_replicas_keeps_nothing() -> None:
    """Single-node protection is what is left over, not what others pay for."""
    at, life = Host(8), Life(1)
    assert at.from_peer("p", 32) == 32
    at.register(life)
    life.write("s", 4)
    await at.dies(life)
    assert at.kept() == {} and at.store.replicas["p"].watermark == 32
    at.host.stop()


def slowly(at: Host) -> Callable[[], int]:
    """Copying from the live engine's pages takes long; returns how many blocks were copied."""
    session = at.host.live
    assert session is not None
    pages, copied = session.pages, [0]
    copy = pages.copy_block

    def copy_block(block: int, out: Bytes) -> None:
        copied[0] += 1
        time.sleep(0.003)  # as many blocks do, and nobody else runs
        copy(block, out)

    pages.copy_block = copy_block  # type: ignore[method-assign]
    return lambda: copied[0]


async def test_when_time_is_up_what_is_there_by_then_counts() -> None:
    """The engine's memory is let go in time; the longest sequence was first, whole or up to a whole block."""
    at, life = Host(200, salvage_ms=20, slice_bytes=2 * BLOCK), Life(1)
    at.register(life)
    life.write("first", 100)
    life.write("second", 300)
    at.host.drain()
    copied = slowly(at)
    await at.dies(life)
    assert at.host.session is not None and at.host.session.closed
    assert set(at.kept()) == {"second"} and copied() < 75
    kept = at.kept()["second"]
    assert at.bytes_of("second") == [26 + i for i in range(kept // SIZE)] and kept % SIZE == 0
    assert at.store.used_bytes == len(at.store.replicas["second"].blocks) * BLOCK, "nothing is left reserved"
    at.host.stop()


async def test_a_restart_in_the_middle_of_salvage_ends_it_and_the_next_death_is_salvaged_too() -> None:
    """The new engine has the memory at once; of the first life whole blocks are kept, of the second all."""
    at, first, second = Host(300, slice_bytes=2 * BLOCK), Life(1), Life(2, shade=101)
    at.register(first)
    first.write("s", 400)
    at.host.drain()
    slowly(at)
    at.begin_to_die(first)
    while not at.kept():  # noqa: ASYNC110  # the store has no event for it
        await asyncio.sleep(0)
    at.register(second)
    await asyncio.wait_for(at.salvages[0], 20)
    kept = at.kept()["s"]
    assert 0 < kept < 400 and at.bytes_of("s") == [1 + i for i in range(kept // SIZE)]
    second.write("s", 10, epoch=2)
    second.write("t", 4)
    await at.dies(second)
    assert at.kept() == {"s": 10, "t": 4}
    assert at.store.replicas["s"].incarnation == 2 and at.bytes_of("t") == [104]
    at.host.stop()


async def test_what_nobody_comes_back_for_is_let_go() -> None:
    """After its time, and at once when the engine here, or whoever went on with it, says that it is over."""
    clock = ManualClock(start_ns=1)
    at, life, again = Host(clock=clock), Life(1), Life(2)
    at.register(life)
    for seq in ("forgotten", "done", "elsewhere", "later"):
        life.write(seq, 8)
    await at.dies(life)
    at.register(again)
    again.write("done", 4, epoch=2)
    for record in (Begin(2, False, b"", (), (), (), ("done",)),):
        assert again.journal.append(msgspec.msgpack.encode(record))
    at.host.drain()
    assert set(at.kept()) == {"forgotten", "elsewhere", "later"}
    at.store.end(End("elsewhere", 2, 77))
    at.store.end(End("later", 1, 77))
    assert set(at.kept()) == {"forgotten", "later"}, "of the same epoch it may be anybody's"
    at.keep.expire(TTL_NS)
    assert set(at.kept()) == {"forgotten", "later"}
    at.keep.expire(TTL_NS + 1)
    assert at.kept() == {} and at.store.used_bytes == at.store.cached_bytes
    at.host.stop()


async def test_letting_go_of_much_at_once_is_done_in_pieces() -> None:
    """The engine's questions are answered by the same loop."""
    clock = ManualClock(start_ns=1)
    at, life = Host(200, clock=clock), Life(1)
    at.register(life)
    for number in range(MAX_EXPIRED_AT_ONCE + 1):
        life.write(f"s{number}", 4)
    await at.dies(life)
    left = []
    for _ in range(2):
        at.keep.expire(TTL_NS + 1)
        left.append(len(at.kept()))
    assert left == [1, 0]
    at.host.stop()


def test_a_living_engines_word_counts_more_than_what_was_kept_of_the_one_before() -> None:
    """Under the same epoch, as where no router gives one: it has begun anew, with other tokens."""
    replica = Replica("s", 1, 1, OWN_WRITER, FINGERPRINT, b"", SIZE, BLOCK, bytearray(4 * 8))
    sequence = SimpleNamespace(seq="s", epoch=1, fence=0, fenced=False, computed=3, known=4, blocks=[0])
    session = SimpleNamespace(ledger=SimpleNamespace(sequences={"s": sequence}, geometry=GEOMETRY))
    daemon: Any = SimpleNamespace(
        host=SimpleNamespace(session=session, live=session),
        links=[],
        store=SimpleNamespace(replicas={"s": replica}, fence=lambda _: 0),
    )
    said = Daemon.sequence_status(daemon, "s")
    assert said is not None and (said.role, said.computed) == ("owner", 3)
    daemon.host.live = None
    said = Daemon.sequence_status(daemon, "s")
    assert said is not None and (said.role, said.computed) == ("replica", 8)


async def test_keeping_can_be_switched_off() -> None:
    """`store.keep_own: false`."""
    at, life = Host(ttl_ns=0), Life(1)
    at.register(life)
    life.write("s", 8)
    await at.dies(life)
    assert not at.store.replicas
    at.host.stop()


async def test_a_block_that_is_here_already_is_not_copied() -> None:
    """Sequences that share a prompt take its room once, and a block that changed in memory is copied anew."""
    at, life = Host(), Life(1)
    at.register(life)
    life.write("s", 12)
    await at.dies(life)
    at.store.replicas["s"].blocks[1].checksum = 0  # as if it had changed
    at.store.integrity.verify = "always"
    again = Life(2, shade=51)
    at.register(again)
    again.write("s", 13)
    at.host.drain()
    copied = slowly(at)
    await at.dies(again)
    assert at.kept() == {"s": 13} and copied() == 2, "the changed one and the new one, of four"
    assert at.bytes_of("s") == [1, 52, 3, 54]
    at.host.stop()


async def test_a_delta_below_what_the_engine_here_writes_is_refused() -> None:
    """Also by a daemon that was restarted and has forgotten every fence: its engine has not."""
    at, life = Host(), Life(1)
    at.store.written_here = at.host.epoch_of
    at.register(life)
    life.write("s", 8, epoch=2)
    at.host.drain()
    late = at.from_peer("s", 8, epoch=1)
    assert isinstance(late, Refusal) and (late.reason, late.fence) == (NackReason.FENCED, 2)
    assert at.from_peer("s", 8, epoch=3) == 8
    at.host.stop()

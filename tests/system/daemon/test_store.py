"""Real daemons whose replica store is short of room, of the host's memory, or of sound memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.daemons import DaemonProcess, DaemonSet
from support.light_engine import LightEngine
from support.waiting import wait_for

BLOCK_TOKENS = 8


@pytest.fixture
def trio() -> Iterator[DaemonSet]:
    """`a` and `c` write to `b`, which has room for about 5,400 tokens."""
    daemons = DaemonSet("a", "b", "c", store={"budget_bytes": 1 << 20})
    for name, peers in (("a", {"b"}), ("b", set()), ("c", {"b"})):
        config = daemons[name].config
        config["peers"] = [peer for peer in config["peers"] if peer["name"] in peers]
    try:
        yield daemons.start()
    finally:
        daemons.stop()


def engine(daemons: DaemonSet, name: str, num_blocks: int = 1100) -> LightEngine:
    found = LightEngine(daemons[name].socket, name, incarnation=1, num_blocks=num_blocks)
    wait_for(lambda: found.exporter.registered, "engine registered")
    return found


def metric(daemon: DaemonProcess, name: str) -> float:
    """A figure of `/metrics`, by its name with labels."""
    text = str(daemon.get("/metrics")[1])
    (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


def test_cache_gives_way_first_and_another_writers_live_replica_last(trio: DaemonSet) -> None:
    """What nobody waits for goes first; a writer whose live replica goes knows it, and gets room again."""
    a, c, b = engine(trio, "a"), engine(trio, "c"), trio["b"]
    a.start("ended", [10_000 + i for i in range(1600)])
    a.step()
    wait_for(lambda: b.watermark("ended") == 1600, "the first is replicated")
    a.finish("ended")
    steady = a.start("steady", [20_000 + i for i in range(1600)])
    a.step()
    wait_for(lambda: b.watermark("steady") == 1600 and b.watermark("ended") == -1, "the second follows")
    grows = c.start("grows", [])
    for upto in (800, 1600, 2400):
        grows.ids += [30_000 + i for i in range(len(grows.ids), upto)]
        c.step()
        wait_for(lambda n=upto: b.watermark("grows") == n, f"{upto} tokens")
    store = b.status()["store"]
    assert store["evicted_cached_blocks"] > 0 and store["evicted_live_replicas"] == 0
    assert trio["a"].watermark("steady") == b.watermark("steady") == 1600
    for upto in (3200, 4000):
        grows.ids += [30_000 + i for i in range(len(grows.ids), upto)]
        c.step()
        wait_for(lambda n=upto: b.watermark("grows") == n, f"{upto} tokens")
    wait_for(lambda: trio["a"].watermark("steady") == 0, "the writer knows that it is not protected")
    assert b.status()["store"]["evicted_live_replicas"] == 1
    assert metric(b, 'segue_store_evicted_total{class="live"}') == 1
    assert b.watermark("steady") == -1
    steady.ids.append(1)
    a.step()
    c.finish("grows")
    c.step()
    wait_for(lambda: b.watermark("steady") == 1601, "protected again")
    assert trio["a"].watermark("steady") == 1601
    a.close()
    c.close()


def test_the_next_turn_elsewhere_computes_only_what_is_new(trio: DaemonSet) -> None:
    """An engine is gone between two turns of a conversation: the other one has all full blocks of it."""
    a, b = engine(trio, "a"), engine(trio, "b")
    turn = [7 * i % 997 for i in range(803)]
    a.start("turn-1", turn)
    a.step()
    wait_for(lambda: trio["b"].watermark("turn-1") == 803, "replicated")
    a.finish("turn-1")
    a.step()
    wait_for(lambda: trio["b"].watermark("turn-1") == -1, "the first turn is over")
    status, left = trio["b"].get("/v1/sequences/turn-1")
    assert (status, left["role"], left["watermark"]) == (200, "cached", 800)
    assert trio["c"].get("/v1/sequences/turn-1")[0] == 404
    a.close()
    assert b.resume("turn-2", [*turn, 1, 2, 3], 1) == 800
    b.step()
    assert b.wrong_tokens("turn-2") == []
    assert trio["b"].status()["store"]["hits"] == 800 // BLOCK_TOKENS
    b.close()


def test_a_poisoned_replica_is_found_dropped_and_sent_again(trio: DaemonSet) -> None:
    """A byte of the arena changes by itself: nobody loads it, and the sequence is soon protected again."""
    a, b = engine(trio, "a"), engine(trio, "b")
    live = a.start("s", list(range(803)))
    a.step()
    wait_for(lambda: trio["b"].watermark("s") == 803, "replicated")
    flip_a_byte_of_the_arena(trio["b"])
    wait_for(lambda: trio["b"].status()["store"]["poisoned_blocks"] == 1, "the scrubber finds it")
    assert metric(trio["b"], "segue_store_poisoned_blocks_total") == 1
    wait_for(lambda: trio["b"].watermark("s") == 803, "sent again")
    assert b.resume("s", [*live.ids, 1], 2) == 803
    b.step()
    assert b.wrong_tokens("s") == []
    assert trio["b"].log.read_text().count("changed by itself") == 1
    a.close()
    b.close()


def flip_a_byte_of_the_arena(daemon: DaemonProcess) -> None:
    """As failing memory would: in the first block, behind the daemon's back."""
    with open(arena_of(daemon), "r+b", buffering=0) as memory:
        before = memory.read(8)
        memory.seek(0)
        memory.write(bytes([before[0] ^ 1]))


def link(path: str) -> str:
    """Where a descriptor leads; empty if it was closed meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_a_host_without_memory_lends_none() -> None:
    """Replicas give way when the host is short of memory: they are refused, and the arena's pages go back."""
    daemons = DaemonSet("a", "b")
    daemons["b"].config["store"] = {"budget_bytes": 16 << 20, "min_host_free_bytes": 1 << 46}
    try:
        b = daemons.start()["b"]
        wait_for(lambda: b.status()["store"]["limit_bytes"] == 0, "the limit falls")
        wait_for(lambda: arena_bytes(b) == 0, "the pages are returned")
        a = engine(daemons, "a")
        a.start("s", list(range(100)))
        a.step()
        wait_for(lambda: b.status()["store"]["refused"] > 0, "refused")
        assert b.watermark("s") == -1 and arena_bytes(b) == 0
        assert b.log.read_text().count("host is short of memory") == 1
        a.close()
    finally:
        daemons.stop()


def arena_bytes(daemon: DaemonProcess) -> int:
    """Memory that the arena of a daemon takes."""
    return os.stat(arena_of(daemon)).st_blocks * 512


def arena_of(daemon: DaemonProcess) -> str:
    """The arena's file."""
    assert daemon.process is not None
    folder = f"/proc/{daemon.process.pid}/fd"
    files = [f"{folder}/{fd}" for fd in os.listdir(folder)]
    arena, *_ = [file for file in files if "segue-replicas" in link(file)]
    return arena

"""Engines of several ranks, a real daemon for each: a token is good when every rank has it.

One set of daemons for the whole file: engines a, b and c of two ranks; there is little room at b's rank 1.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest

from segue_shim.match_client import MatchClient
from segue_shim.plan import pack_u32
from support.light_engine import BLOCK_SIZE, FINGERPRINT, LightEngine
from support.light_group import DaemonGroups, LightGroup
from support.waiting import wait_for as wait_at_most

pytestmark = pytest.mark.timeout(240)

wait_for = partial(wait_at_most, timeout_s=60)
"""Six daemons and two engines share what processors there are."""

INCARNATIONS = count(1)
SMALL_STORE = 1 << 20


@pytest.fixture(scope="module")
def daemons() -> Iterator[DaemonGroups]:
    made = DaemonGroups("a", "b", "c", replication={"replace_after_ms": 300}, timeouts={"peer_ms": 1000})
    made.ranks[1]["b"].config["store"] = {"budget_bytes": SMALL_STORE}
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def a(daemons: DaemonGroups) -> Iterator[LightGroup]:
    """The engine that writes."""
    yield from engine(daemons, "a", num_blocks=2000)


@pytest.fixture
def b(daemons: DaemonGroups) -> Iterator[LightGroup]:
    """One that takes over."""
    yield from engine(daemons, "b")


@pytest.fixture
def c(daemons: DaemonGroups) -> Iterator[LightGroup]:
    """Another one."""
    yield from engine(daemons, "c")


def engine(daemons: DaemonGroups, name: str, **options: int) -> Iterator[LightGroup]:
    made = LightGroup(daemons, name, incarnation=next(INCARNATIONS), **options)
    try:
        yield made
    finally:
        made.close()
        wait_for(lambda: all(d.status()["engine"]["state"] != "running" for d in daemons.of(name)), "hung up")


def ids(number: int, tokens: int = 20) -> list[int]:
    return [(number * 50 + i) % 997 for i in range(tokens)]


def where(daemons: DaemonGroups, seq: str) -> list[dict[str, int]]:
    """For each rank of engine a: the peers' acked tokens, where there are any."""
    found = []
    for daemon in daemons.of("a"):
        peers = daemon.get(f"/v1/sequences/{seq}")[1].get("peers", {})
        found.append({peer: mark for peer, mark in peers.items() if mark})
    return found


def test_ranks_agree_where_a_sequence_goes_and_it_is_restored_from_all_of_them(
    daemons: DaemonGroups, a: LightGroup, b: LightGroup, c: LightGroup
) -> None:
    """Sequences spread over the peer engines, each at all ranks of one; what is loaded at each rank is that
    rank's KV, up to the token that the slowest has."""
    names = [f"spread{number}" for number in range(8)]
    for number, seq in enumerate(names):
        a.start(seq, ids(number))
    a.step()
    wait_for(lambda: all(daemons.watermarks("a", seq) == [20, 20] for seq in names), "all ranks have all")
    places = [where(daemons, seq) for seq in names]
    assert all(first == second for first, second in places)
    seq, (place,) = names[0], places[0][0]
    taker = {"b": b, "c": c}[place]
    # Rank 0 alone gets on: the link of the other is slow.
    fast = a.ranks[0].live[seq]
    for token in range(6):
        fast.ids.append(token)
        a.ranks[0].step()
    wait_for(lambda: daemons.watermarks(place, seq) == [26, 20], "the ranks are not equally far")
    for daemon, have in zip(daemons.of(place), (26, 20), strict=True):
        promoted = daemon.get(f"/v1/sequences/{seq}/promote", {"epoch": 2})[1]
        assert promoted["watermark"] == have
    assert taker.resume(seq, [*fast.ids, 1], 2) == 20
    taker.step()
    assert taker.wrong_tokens(seq) == []
    assert [each.live[seq].computed for each in taker.ranks] == [27, 27]
    wait_for(lambda: all(d.status()["store"]["leases"] == 0 for d in daemons.of(place)), "leases are over")


def test_a_rank_without_its_daemon_restores_nothing(
    daemons: DaemonGroups, a: LightGroup, b: LightGroup
) -> None:
    """One of the daemons of the engine that takes over is away: nothing is loaded, the lease of the other is
    given back, and the sequence goes to another engine with all ranks; it is used again when it is back."""
    a.start("away", ids(100))
    a.step()
    lost = daemons.ranks[1]["b"]
    lost.stop(signal.SIGKILL)
    wait_for(lambda: where(daemons, "away") == [{"c": 20}] * 2, "at c, with both ranks")
    wait_for(lambda: not b.ranks[1].exporter.registered, "the rank of b knows")
    assert b.resume("away", [*ids(100), 1], 2) == 0
    b.finish("away")
    lost.start(ready=False)
    wait_for(lambda: b.ranks[1].exporter.registered, "registered again")
    daemons.ranks[0]["c"].send(signal.SIGSTOP)
    wait_for(lambda: where(daemons, "away") == [{"b": 20}] * 2, "at b, with both ranks")
    daemons.ranks[0]["c"].send(signal.SIGCONT)
    wait_for(lambda: b.matches.match(**question("away", [*ids(100), 1])) is not None, "restorable again")
    assert b.resume("away", [*ids(100), 1], 3) == 20
    b.step()
    assert b.wrong_tokens("away") == []


def question(seq: str, tokens: list[int]) -> dict[str, Any]:
    asked = {"token_ids": pack_u32(tokens), "computed": 0, "limit": len(tokens) - 1}
    return {"seq": seq, "epoch": 2, "salt": b"", **asked}


def test_while_a_link_of_one_rank_is_cut_the_others_progress_counts_for_nothing(
    daemons: DaemonGroups, a: LightGroup
) -> None:
    """The least of the ranks stands still; then the sequence goes, with all ranks, where all are reached."""
    a.start("cut", ids(200))
    a.step()
    wait_for(lambda: daemons.watermarks("a", "cut") == [20, 20], "both ranks have it")
    ((before,), _) = where(daemons, "cut")
    other = "c" if before == "b" else "b"
    cut = daemons.ranks[1][before]
    cut.send(signal.SIGSTOP)
    for token in range(3):
        a.say("cut", token)
    wait_for(lambda: daemons.watermarks("a", "cut")[0] == 23, "rank 0 gets on")
    wait_for(lambda: where(daemons, "cut") == [{other: 23}] * 2, "all at the other engine")
    cut.send(signal.SIGCONT)
    assert where(daemons, "cut") == [{other: 23}] * 2


def test_the_leaders_daemon_may_die_and_come_back(daemons: DaemonGroups, a: LightGroup) -> None:
    """Without rank 0 the others keep what is placed; when it is back, all ranks agree, also on what began
    meanwhile."""
    a.start("before", ids(300))
    a.step()
    wait_for(lambda: daemons.watermarks("a", "before") == [20, 20], "both ranks have it")
    leader = daemons.ranks[0]["a"]
    leader.stop(signal.SIGKILL)
    wait_for(lambda: not a.ranks[0].exporter.registered, "rank 0 knows")
    wait_for(lambda: daemons.ranks[1]["a"].status()["group"]["joined"] == [], "the other daemon knows")
    a.start("meanwhile", ids(301))
    a.say("before", 1)
    wait_for(lambda: daemons.ranks[1]["a"].watermark("before") == 21, "the other rank gets on")
    assert daemons.ranks[1]["a"].watermark("meanwhile") == 0, "nobody said where it goes"
    leader.start(ready=False)
    wait_for(lambda: a.ranks[0].exporter.registered, "registered again")
    wait_for(lambda: leader.status()["group"]["joined"] == [1], "the other daemon follows again")
    a.say("before", 2)
    for seq, tokens in (("before", 22), ("meanwhile", 20)):
        wait_for(lambda s=seq, n=tokens: daemons.watermarks("a", s) == [n, n], "whole again")
        wait_for(lambda s=seq: len({tuple(each) for each in where(daemons, s)}) == 1, "at one engine")


def test_what_is_full_at_one_rank_is_full_for_the_engine(daemons: DaemonGroups, a: LightGroup) -> None:
    """b has no room for rank 1's part of a sequence: rank 0's part does not stay there either."""
    names, tokens = ["large0", "large1"], 3000
    daemons.ranks[0]["c"].send(signal.SIGSTOP)
    status = daemons.ranks[0]["a"].status
    wait_for(lambda: not next(p for p in status()["peers"] if p["peer"] == "c")["connected"], "c is away")
    for number, seq in enumerate(names):
        a.start(seq, ids(400 + number, tokens))
    a.step()
    wait_for(lambda: daemons.ranks[1]["b"].status()["store"]["refused"] > 0, "rank 1 is full at b")
    wait_for(lambda: all(where(daemons, seq)[0] == {"b": tokens} for seq in names), "rank 0 is not")
    daemons.ranks[0]["c"].send(signal.SIGCONT)
    wait_for(lambda: all(daemons.watermarks("a", seq) == [tokens] * 2 for seq in names), "whole")
    wait_for(lambda: all(a0 == a1 for a0, a1 in (where(daemons, seq) for seq in names)), "at one engine")


def test_kv_of_one_rank_is_never_anothers(
    daemons: DaemonGroups, a: LightGroup, b: LightGroup, c: LightGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Same tokens, other bytes: a rank that asks the daemon of another gets nothing, and one that registers
    there is refused with a line that says what to set."""
    a.start("mine", ids(500))
    a.step()
    wait_for(lambda: daemons.watermarks("a", "mine") == [20, 20], "both ranks have it")
    prints = [[d.status()["engine"]["fingerprint"] for d in daemons.of(name)] for name in "ab"]
    assert prints[0] == prints[1] and len(set(prints[0])) == 2
    (place,) = where(daemons, "mine")[0]
    for rank, found in ((0, True), (1, False)):
        client = MatchClient(
            daemons.ranks[0][place].socket,
            engine=place,
            incarnation=1,
            fingerprint=FINGERPRINT,
            block_size=BLOCK_SIZE,
            rank=rank,
            ranks=2,
        )
        matched = client.match(**question("mine", [*ids(500), 1]))
        assert (matched is not None) == found
        client.close()
    with caplog.at_level(logging.WARNING, "segue_shim"):
        lost = LightEngine(daemons.ranks[1]["a"].socket, "a", incarnation=9, rank=0, ranks=2)
        wait_for(lambda: "set `group: {rank: 0, ranks: 2}`" in caplog.text, "refused")
        assert not lost.exporter.registered
        lost.close()

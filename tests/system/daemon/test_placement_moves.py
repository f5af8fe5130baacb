"""Replicas on the move: real daemons, of which some die, fill up or come late."""

from __future__ import annotations

import signal
from typing import Any

from support.daemons import DaemonSet
from support.light_engine import LightEngine
from support.waiting import wait_for

NAMES = [f"s{n}" for n in range(8)]
FAST = {"replace_after_ms": 300}


def engine(daemons: DaemonSet, name: str, incarnation: int = 1, **options: Any) -> LightEngine:
    found = LightEngine(daemons[name].socket, name, incarnation=incarnation, **options)
    wait_for(lambda: found.exporter.registered, "engine registered")
    return found


def begin(a: LightEngine, tokens: int = 20, names: list[str] = NAMES) -> None:
    for number, seq in enumerate(names):
        a.start(seq, [(number * 50 + i) % 997 for i in range(tokens)])
    a.step()


def held(daemons: DaemonSet, names: list[str] = NAMES) -> dict[str, dict[str, int]]:
    """For each sequence the peers' acked tokens, where there are any."""
    found = {}
    for seq in names:
        body = daemons["a"].get(f"/v1/sequences/{seq}")[1]
        found[seq] = {peer: mark for peer, mark in body["peers"].items() if mark}
    return found


def copies(daemons: DaemonSet) -> dict[str, int]:
    found: dict[str, int] = daemons["a"].status()["copies"]
    return found


def test_a_killed_peers_sequences_are_restorable_at_the_others() -> None:
    """One of two peers dies: what it held is sent to the other from the start, while tokens go on coming."""
    daemons = DaemonSet("a", "b", "c", replication=FAST)
    try:
        a = engine(daemons.start(), "a", num_blocks=200)
        begin(a)
        wait_for(lambda: all(sum(h.values()) == 20 for h in held(daemons).values()), "one copy of each")
        before = held(daemons)
        assert {peer for holders in before.values() for peer in holders} == {"b", "c"}, "they spread"
        daemons["b"].stop(signal.SIGKILL)
        for token in range(5):
            for live in a.live.values():
                live.ids.append(token)
            a.step()
        wait_for(lambda: all(h.get("c") == 25 for h in held(daemons).values()), "all at c")
        wait_for(lambda: copies(daemons)["achieved"] == len(NAMES), "as many copies as wanted")
        assert copies(daemons)["moves"] == sum("b" in holders for holders in before.values())
        c = engine(daemons, "c", num_blocks=200)
        for seq in NAMES:
            assert c.resume(seq, [*a.live[seq].ids, 1], 2) == 25
        c.step()
        assert [c.wrong_tokens(seq) for seq in NAMES] == [[]] * len(NAMES)
        a.close()
        c.close()
    finally:
        daemons.stop()


def test_a_peer_that_is_back_in_the_same_life_gives_back_what_moved_away() -> None:
    """A peer that was stopped for a while holds nothing that is held elsewhere by now."""
    daemons = DaemonSet("a", "b", "c", replication=FAST, timeouts={"peer_ms": 500})
    try:
        a = engine(daemons.start(), "a", num_blocks=200)
        begin(a)
        wait_for(lambda: all(sum(h.values()) == 20 for h in held(daemons).values()), "one copy of each")
        daemons["b"].send(signal.SIGSTOP)
        wait_for(lambda: all(h == {"c": 20} for h in held(daemons).values()), "all at c, and only there")
        daemons["b"].send(signal.SIGCONT)
        wait_for(lambda: all(p["connected"] for p in daemons["a"].status()["peers"]), "b is back")
        wait_for(lambda: daemons["b"].status()["store"]["replicas"] == 0, "b let go of them")
        assert copies(daemons)["achieved"] == len(NAMES)
        a.close()
    finally:
        daemons.stop()


def test_two_replicas_are_two_copies_and_one_survives() -> None:
    """With `replicas: 2` each sequence is whole at two peers; one dies, the other has it, and a third copy's
    place is filled again by who is left."""
    daemons = DaemonSet("a", "b", "c", "d", replication={"replicas": 2, **FAST})
    try:
        a = engine(daemons.start(), "a", num_blocks=200)
        begin(a)
        wait_for(lambda: all(list(h.values()) == [20, 20] for h in held(daemons).values()), "two copies")
        assert copies(daemons)["wanted"] == copies(daemons)["achieved"] == 2 * len(NAMES)
        survivors = {seq: set(h) - {"b"} for seq, h in held(daemons).items()}
        assert all(survivors.values())
        daemons["b"].stop(signal.SIGKILL)
        for seq, peers in survivors.items():
            assert all(daemons[peer].watermark(seq) == 20 for peer in peers)
        wait_for(lambda: all(h == {"c": 20, "d": 20} for h in held(daemons).values()), "two copies again")
        a.finish(NAMES[0])
        a.step()
        for peer in "cd":
            wait_for(
                lambda d=daemons[peer]: d.status()["store"]["replicas"] == len(NAMES) - 1,  # type: ignore[misc]
                "an ended sequence is freed at both",
            )
        a.close()
    finally:
        daemons.stop()


def test_without_replicas_nothing_is_sent() -> None:
    """`replicas: 0` turns protection off and says so."""
    daemons = DaemonSet("a", "b", replication={"replicas": 0})
    try:
        a = engine(daemons.start(), "a")
        begin(a, names=["s"])
        wait_for(lambda: daemons["a"].watermark("s") == 0, "the daemon knows the sequence")
        assert copies(daemons) == {"wanted": 0, "placed": 0, "achieved": 0, "moves": 0}
        assert daemons["a"].status()["peers"][0]["sent_bytes"] == 0
        a.close()
    finally:
        daemons.stop()


def test_what_does_not_fit_at_a_full_peer_goes_to_one_with_room() -> None:
    """Peer b is too small for what hashing gives it: the rest moves to c, and nothing is left unprotected."""
    daemons = DaemonSet("a", "b", "c", replication=FAST)
    daemons["b"].config["store"] = {"budget_bytes": 1 << 20}
    daemons["c"].config["store"] = {"budget_bytes": 1 << 20}
    try:
        a = engine(daemons.start(), "a", num_blocks=2000)
        daemons["c"].stop()
        tokens = 3200
        begin(a, tokens, NAMES[:3])
        wait_for(lambda: daemons["a"].status()["peers"][0]["sequences"] == 3, "all begun at b")
        wait_for(lambda: copies(daemons)["placed"] == 3, "b is all there is")
        wait_for(lambda: daemons["b"].status()["store"]["refused"] > 0, "b is full")
        assert any(sum(h.values()) < tokens for h in held(daemons, NAMES[:3]).values())
        daemons["c"].config["store"] = {"budget_bytes": 16 << 20}
        daemons["c"].start()
        wait_for(
            lambda: all(sum(h.values()) == tokens for h in held(daemons, NAMES[:3]).values()),
            "every sequence is whole somewhere",
            timeout_s=30,
        )
        assert copies(daemons)["moves"] > 0
        a.close()
    finally:
        daemons.stop()


def test_peers_say_where_they_run_and_replicas_go_to_another_host() -> None:
    """A peer on the engine's own host gets nothing while there is one elsewhere."""
    daemons = DaemonSet("a", "b", "c", replication=FAST)
    for name, host, zone in (("a", "h1", "z1"), ("b", "h1", "z1"), ("c", "h2", "z2")):
        daemons[name].config["labels"] = {"host": host, "zone": zone}
    try:
        a = engine(daemons.start(), "a", num_blocks=200)
        begin(a)
        wait_for(lambda: all(h == {"c": 20} for h in held(daemons).values()), "all at c")
        peers = {p["peer"]: (p["host"], p["zone"]) for p in daemons["a"].status()["peers"]}
        assert peers == {"b": ("h1", "z1"), "c": ("h2", "z2")}
        text = daemons["a"].get("/metrics")[1]
        assert "segue_copies_wanted 8.0" in text and "segue_copies_achieved 8.0" in text
        daemons["c"].stop(signal.SIGKILL)
        wait_for(lambda: all(h == {"b": 20} for h in held(daemons).values()), "better there than nowhere")
        daemons["c"].start()
        wait_for(lambda: all(h == {"c": 20} for h in held(daemons).values()), "at c again")
        wait_for(lambda: daemons["b"].status()["store"]["replicas"] == 0, "ended at b")
        a.close()
    finally:
        daemons.stop()

"""Where replicas go: elsewhere, where there is room, and no more often than necessary."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_daemon.placement import Move, Placement

GRACE_NS = 1000
ROOM = 1 << 30


def placement(peers: str = "bcd", **changes: object) -> Placement:
    """Peers with names of one letter, each on a host of its own unless told otherwise, all usable."""
    made = Placement(peers, **({"host": "a", "grace_ns": GRACE_NS} | changes))  # type: ignore[arg-type]
    for name in peers:
        bring_up(made, name, host=name)
    made.review([], 0)
    return made


def bring_up(made: Placement, name: str, *, host: str, zone: str = "", free: int = ROOM) -> None:
    made.up(name, host=host, zone=zone)
    made.room(name, free, budget_bytes=ROOM)


@pytest.mark.parametrize(
    ("own", "peers", "replicas", "allowed"),
    [
        (("h1", ""), {"b": ("h1", ""), "c": ("h2", "")}, 1, "c"),
        (("h1", ""), {"b": ("h1", "")}, 1, "b"),
        (("h1", "z1"), {"b": ("h2", "z1"), "c": ("h3", "z2"), "d": ("h4", "z1")}, 1, "c"),
        (("h1", "z1"), {"b": ("h1", "z2"), "c": ("h2", "z1")}, 1, "c"),
        (("h1", ""), {"b": ("h2", ""), "c": ("h2", ""), "d": ("h3", "")}, 2, "bd cd db dc"),
        (("h1", "z1"), {"b": ("h2", "z2"), "c": ("h3", "z2"), "d": ("h4", "z3")}, 2, "bd cd db dc"),
        (("h1", ""), {"b": ("", ""), "c": ("h1", "")}, 1, "b"),
        (("h1", ""), {"b": ("h2", ""), "c": ("h3", "")}, 3, "bc cb"),
        (("h1", ""), {"b": ("h2", "")}, 0, ""),
    ],
    ids=[
        "another host",
        "the same host where there is no other",
        "another zone",
        "the host counts more than the zone",
        "two copies on two hosts",
        "two copies in two zones",
        "no label is elsewhere",
        "as many copies as there are peers",
        "no replicas wanted",
    ],
)
def test_failure_domains(
    own: tuple[str, str], peers: dict[str, tuple[str, str]], replicas: int, allowed: str
) -> None:
    """What kills the engine does not kill its replica, as far as there is a choice."""
    made = Placement(peers, host=own[0], zone=own[1], replicas=replicas)
    for name, (host, zone) in peers.items():
        bring_up(made, name, host=host, zone=zone)
    for number in range(40):
        assert "".join(made.holders(f"s{number}")) in allowed.split(" ")


def test_room_load_and_link_decide_how_many_each_gets() -> None:
    """A peer with three times the room gets about three times the sequences; a busy or slow one fewer."""
    made = placement("bcd")
    made.room("b", 3 * ROOM, budget_bytes=3 * ROOM)
    made.room("c", ROOM, budget_bytes=ROOM)
    made.room("d", ROOM, budget_bytes=ROOM, link_ms=1000)
    shares = Counter(made.holders(f"s{n}")[0] for n in range(900))
    assert shares["b"] > 1.4 * shares["c"] and shares["c"] > 1.5 * shares["d"] > 0
    busy = placement("bc")
    busy.room("b", ROOM, budget_bytes=ROOM, running=100)
    shares = Counter(busy.holders(f"s{n}")[0] for n in range(100))
    assert shares["c"] > 2 * shares["b"]


def test_a_peer_without_an_engine_comes_after_those_that_could_go_on() -> None:
    """A replica is worth most where somebody can take the sequence over; but a copy is a copy."""
    made = placement("bc")
    made.room("b", ROOM, budget_bytes=ROOM, serving=False)
    assert {made.holders(f"s{n}") for n in range(20)} == {("c",)}
    made.room("c", 0, budget_bytes=ROOM)
    made.refused("s0", "c", 100)
    assert made.review(["s0"], 0) == [Move("s0", ("c",), ("b",))]


def test_without_peers_that_are_up_nothing_is_placed_and_later_everything_is() -> None:
    """A daemon that starts before its peers protects what is there as soon as the first one comes."""
    made = Placement("b", host="a", grace_ns=GRACE_NS)
    assert made.holders("s") == () and not made.due(0)
    made.up("b", host="b")
    assert made.holders("s") == () and not made.due(0), "its room is not known yet"
    made.room("b", ROOM)
    assert made.due(0)
    assert made.review(["s"], 0) == [Move("s", (), ("b",))]
    assert made.holds("s", "b") and not made.due(0)


def test_a_dead_peers_sequences_move_after_the_grace_and_no_others() -> None:
    """A short break moves nothing; a long one moves exactly what the dead peer held."""
    made = placement()
    names = [f"s{n}" for n in range(60)]
    before = {seq: made.holders(seq) for seq in names}
    made.lost("c", 100)
    assert not made.due(100 + GRACE_NS - 1)
    assert {seq: made.holders(seq) for seq in names} == before
    assert "c" not in made.holders("new"), "nothing new goes to a peer that is away"
    assert made.due(100 + GRACE_NS)
    moves = made.review(names, 100 + GRACE_NS)
    assert {move.seq for move in moves} == {seq for seq in names if before[seq] == ("c",)}
    assert all(move.dropped == ("c",) and move.added in (("b",), ("d",)) for move in moves)
    assert {move.added for move in moves} == {("b",), ("d",)}, "they spread over who is left"
    assert not made.due(10**12)
    bring_up(made, "c", host="c")
    assert made.review(names, 10**12) == [], "a peer that is back does not pull sequences from where they are"


def test_a_peer_that_is_back_in_time_keeps_what_it_holds() -> None:
    """A link that broke for a moment costs no copy."""
    made = placement()
    names = [f"s{n}" for n in range(30)]
    before = [made.holders(seq) for seq in names]
    made.lost("c", 0)
    bring_up(made, "c", host="c")
    assert made.review(names, GRACE_NS * 9) == []
    assert [made.holders(seq) for seq in names] == before


def test_the_only_peer_keeps_its_sequences_while_it_is_dead() -> None:
    """With nowhere else to go there is nothing to win by forgetting where a sequence was."""
    made = placement("b")
    assert made.holders("s") == ("b",)
    made.lost("b", 0)
    assert made.review(["s"], GRACE_NS) == [] and made.holders("s") == ("b",)
    bring_up(made, "b", host="b")
    assert made.review(["s"], GRACE_NS) == []


def test_a_copy_that_was_missing_is_made_when_a_peer_comes() -> None:
    """Two copies are wanted, one peer is there; the second copy follows with the second peer."""
    made = Placement("bc", host="a", replicas=2)
    bring_up(made, "b", host="b")
    assert made.holders("s") == ("b",) and made.copies == 1
    bring_up(made, "c", host="c")
    assert made.review(["s"], 0) == [Move("s", (), ("c",))] and made.copies == 2


def test_a_sequence_that_a_full_peer_refused_goes_where_it_fits() -> None:
    """Only that one moves, and only to a peer that has the room."""
    made = placement("bc")
    first = next(f"s{n}" for n in range(99) if made.holders(f"s{n}") == ("b",))
    other = next(f"t{n}" for n in range(99) if made.holders(f"t{n}") == ("b",))
    made.room("c", 1000, budget_bytes=ROOM)
    made.refused(first, "b", 5000)
    assert made.review([first, other], 0) == [], "it fits nowhere: it waits where it is"
    made.room("c", 6000, budget_bytes=ROOM)
    assert made.due(0)
    assert made.review([first, other], 0) == [Move(first, ("b",), ("c",))]
    assert made.holders(other) == ("b",)
    assert made.holders("new") == ("c",), "a full peer gets nothing new"
    for name in "bc":
        made.room(name, ROOM // 2, budget_bytes=ROOM)
    assert {made.holders(f"u{n}") for n in range(60)} == {("b",), ("c",)}, "until it has room again"


def test_a_refusal_that_was_made_good_moves_nothing() -> None:
    """The peer took the sequence after all before anybody else had room."""
    made = placement("bc")
    seq = next(f"s{n}" for n in range(99) if made.holders(f"s{n}") == ("b",))
    made.room("c", 0, budget_bytes=ROOM)
    made.refused(seq, "b", 5000)
    assert made.review([seq], 0) == []
    made.accepted(seq, "b")
    made.room("c", ROOM, budget_bytes=ROOM)
    assert made.review([seq], 0) == [] and made.holders(seq) == ("b",)


def test_a_replica_on_the_engines_own_host_moves_away_when_it_can() -> None:
    """Better than nothing, but not longer than necessary."""
    made = Placement("bc", host="h1")
    bring_up(made, "b", host="h1")
    assert made.holders("s") == ("b",)
    bring_up(made, "c", host="h2")
    assert made.review(["s"], 0) == [Move("s", ("b",), ("c",))]


def test_a_sequence_that_comes_back_to_a_lost_peer_moves_then() -> None:
    """Nobody spoke for it (its engine registered anew, its journal had a gap) when its peer was given up."""
    made = placement("bc")
    (holder,) = made.holders("s")
    other = "c" if holder == "b" else "b"
    made.lost(holder, 10)
    assert made.review([], 10 + GRACE_NS) == []
    assert not made.due(11 + GRACE_NS)
    assert made.holds("s", holder)
    assert made.due(12 + GRACE_NS)
    assert made.review(["s"], 12 + GRACE_NS) == [Move("s", (holder,), (other,))]
    made.forget("s")
    assert not made.due(13 + GRACE_NS)


def test_sequences_of_a_dead_engine_stay_where_they_can_be_restored() -> None:
    """Only what is live is reviewed: nothing else could be sent from its start."""
    made = placement()
    names = [f"s{n}" for n in range(20)]
    before = {seq: made.holders(seq) for seq in names}
    made.lost("c", 0)
    made.review([], GRACE_NS)
    assert {seq: made.holders(seq) for seq in names} == before


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_whatever_happens_to_peers(seed: int, replicas: int) -> None:
    """Peers come, go, fill up and empty while sequences come and go. After each review: no sequence is on its
    engine's host, or twice on one host, while another usable peer with room has none of it; nobody has more
    holders than wanted; holders that are well keep what they have; counts add up."""
    rng = random.Random(seed)
    peers = {name: rng.choice(["h0", "h1", "h2", "h3", ""]) for name in "bcdef"}
    made = Placement(peers, host="h0", replicas=replicas, grace_ns=GRACE_NS)
    live: dict[str, int] = {}
    now_ns = 0
    for step in range(60):
        now_ns += rng.choice([0, 1, GRACE_NS])
        action, name = rng.random(), rng.choice(list(peers))
        before = {seq: made.holders(seq) for seq in live}
        well = {p.name for p in made.peers.values() if p.usable}
        if action < 0.25:
            bring_up(made, name, host=peers[name], free=rng.choice([0, 100, ROOM]))
        elif action < 0.4:
            made.lost(name, now_ns)
            well.discard(name)
        elif action < 0.5 and live:
            made.refused(rng.choice(list(live)), name, 1000)
        elif action < 0.7 or not live:
            live[f"s{step}"] = step
            made.holders(f"s{step}")
        elif action < 0.8:
            seq = rng.choice(list(live))
            del live[seq]
            made.forget(seq)
        else:
            made.room(name, rng.choice([0, 100, ROOM]), budget_bytes=ROOM)
        refused = set(made._turned_away)
        moves = {move.seq: move for move in made.review(list(live), now_ns)} if made.due(now_ns) else {}
        for seq in live:
            holders = made.holders(seq)
            assert len(set(holders)) == len(holders) <= replicas
            if seq in before:
                move = moves.get(seq, Move(seq, (), ()))
                assert set(before[seq]) - set(move.dropped) | set(move.added) == set(holders)
                if seq not in refused and not conflicts(made, before[seq]):
                    assert not set(move.dropped) & well, "moved away from a peer that was well"
        assert made.copies == sum(len(made.holders(seq)) for seq in live)
    for name in peers:
        bring_up(made, name, host=peers[name])
    made.review(list(live), now_ns)
    assert not made.due(now_ns)
    for seq in live:
        assert len(made.holders(seq)) == replicas
        spare = [p for p in made.peers.values() if p.name not in made.holders(seq)]
        for name in conflicts(made, made.holders(seq)):
            others = {"h0", *(made.peers[n].host for n in made.holders(seq) if n != name)}
            assert all(peer.host in others for peer in spare if peer.host)
            assert all(peer.host for peer in spare), "a peer without a label is elsewhere"


def conflicts(made: Placement, holders: tuple[str, ...]) -> list[str]:
    """Holders that share a host with the engine or with another holder."""
    hosts = Counter(made.peers[name].host for name in holders)
    return [n for n in holders if (h := made.peers[n].host) and (h == made.labels[0] or hosts[h] > 1)]

"""Placement in a group: the ranks of an engine put a sequence at the ranks of one peer engine, or nowhere."""

from __future__ import annotations

import random

import msgspec
import pytest

from segue_core.clock import MonotonicClock
from segue_core.errors import ProtocolError
from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import Control, Join, Joined, PeerView, Placements, Report
from segue_daemon import group_placement
from segue_daemon.group import Leader
from segue_daemon.group_placement import FollowingPlacement, LeadingPlacement
from segue_daemon.placement import Placement
from segue_daemon.settings import DaemonSettings, GroupSettings

PEERS = ("b", "c", "d")
SEQS = [f"s{number}" for number in range(40)]
BUDGET = 1000


class Group:
    """A leader and followers, whose messages arrive at once."""

    def __init__(self, ranks: int = 2, **options: int) -> None:
        self.leader = LeadingPlacement(PEERS, ranks=ranks, **options)
        self.followers = [FollowingPlacement(PEERS, **options) for _ in range(ranks - 1)]
        self.now = 0
        for rank in range(ranks):
            for name in PEERS:
                self.placements[rank].up(name, host=name)
                self.placements[rank].room(name, BUDGET, budget_bytes=BUDGET)
        for rank in range(1, ranks):
            self.join(rank)

    @property
    def placements(self) -> list[Placement]:
        return [self.leader, *self.followers]

    def join(self, rank: int) -> None:
        self.followers[rank - 1].joined()
        self.leader.joined(rank, self.now)
        self.talk()

    def talk(self) -> None:
        """Reports go one way, words the other, until nobody has news."""
        for rank, follower in enumerate(self.followers, start=1):
            self.leader.reported(rank, follower.views(), follower.turned_away(), self.now)
        self.leader.review(SEQS, self.now)
        for rank, follower in enumerate(self.followers, start=1):
            while words := self.leader.words(rank):
                follower.told(words)
            follower.review(SEQS, self.now)

    def at(self, seq: str) -> set[tuple[str, ...]]:
        """Where the ranks hold `seq`: one answer if they agree."""
        return {placement.holders(seq) for placement in self.placements}


@pytest.mark.parametrize("order", ["leader first", "follower first"])
def test_ranks_agree_whoever_hears_of_a_sequence_first(order: str) -> None:
    """A rank that has the sequence before the leader's word places it nowhere, and then where it is told."""
    group = Group()
    for seq in SEQS:
        for placement in group.placements if order == "leader first" else reversed(group.placements):
            placement.holders(seq)
    group.talk()
    assert all(len(group.at(seq)) == 1 for seq in SEQS)
    assert {holders for seq in SEQS for holders in group.at(seq)} == {("b",), ("c",), ("d",)}, "they spread"


def test_without_a_word_nothing_is_placed() -> None:
    """A copy at a peer that rank 0 may not have chosen is worth nothing."""
    group = Group()
    assert [group.followers[0].holders(seq) for seq in SEQS] == [()] * len(SEQS)


def test_a_peer_that_is_full_at_one_rank_gives_the_sequence_up_at_all() -> None:
    """The rank that was refused says so; the leader moves the sequence, and all ranks follow."""
    group = Group(3)
    ((name,),) = group.at("s1") if group.leader.holders("s1") and not group.talk() else {()}
    group.followers[1].refused("s1", name, 10)
    group.followers[1].room(name, 0, budget_bytes=BUDGET)
    group.talk()
    ((moved,),) = group.at("s1")
    assert moved != name
    assert not group.followers[1].turned_away(), "the refusal is over with the move"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_one_rank_does_not_reach_is_used_by_none(rank: int) -> None:
    """Nothing new goes there at once; what is there moves after the grace time."""
    group = Group(grace_ns=100)
    for seq in SEQS[:20]:
        group.leader.holders(seq)
    group.talk()
    group.placements[rank].lost("b", group.now)
    group.talk()
    for seq in SEQS:
        group.leader.holders(seq)
    group.talk()
    assert not any(("b",) in group.at(seq) for seq in SEQS[20:])
    group.now += 200
    group.talk()
    assert all(len(group.at(seq)) == 1 and ("b",) not in group.at(seq) for seq in SEQS)


def test_while_a_rank_is_away_nothing_new_is_placed_and_what_is_placed_stays() -> None:
    """A copy without that rank's part cannot be restored; when it is back all goes on."""
    group = Group(grace_ns=100)
    group.leader.holders("s1")
    group.talk()
    before = group.at("s1")
    group.leader.left(1, group.now)
    group.now += 200
    group.leader.review(SEQS, group.now)
    assert group.leader.holders("s2") == () and {group.leader.holders("s1")} == before
    group.join(1)
    assert group.at("s1") == before and len(group.at("s2")) == 1 and group.at("s2") != {()}


def test_a_rank_that_was_started_again_is_told_everything() -> None:
    """It knows nothing; the sequences are where they were at the other ranks."""
    group = Group()
    for seq in SEQS:
        group.leader.holders(seq)
    group.talk()
    before = {seq: group.leader.holders(seq) for seq in SEQS}
    group.followers[0] = FollowingPlacement(PEERS)
    for name in PEERS:
        group.followers[0].up(name, host=name)
        group.followers[0].room(name, BUDGET, budget_bytes=BUDGET)
    group.join(1)
    assert {seq: group.followers[0].holders(seq) for seq in SEQS} == before


def test_a_leader_that_was_started_again_takes_nothing_away() -> None:
    """It does not know yet where anything could go: what the other rank has placed stays until it does."""
    group = Group()
    group.leader.holders("s1")
    group.talk()
    (before,) = group.at("s1")
    group.leader = LeadingPlacement(PEERS, ranks=2)
    assert group.leader.holders("s1") == (), "no peer is there for all ranks yet"
    group.followers[0].joined()
    group.leader.joined(1, group.now)
    group.followers[0].told(group.leader.words(1))
    assert group.followers[0].review(SEQS, group.now) == []
    assert group.followers[0].holders("s1") == before
    for name in PEERS:
        group.leader.up(name, host=name)
        group.leader.room(name, BUDGET, budget_bytes=BUDGET)
    group.talk()
    assert len(group.at("s1")) == 1 and group.at("s1") != {()}


def test_a_name_that_is_used_again_goes_where_the_leader_says_then() -> None:
    """Whichever rank hears first that the first sequence of that name is over."""
    group = Group()
    group.leader.holders("s1")
    group.talk()
    for first, second in ((group.leader, group.followers[0]), (group.followers[0], group.leader)):
        for placement in (first, second):
            placement.forget("s1")
            placement.holders("s1")
        group.talk()
        assert len(group.at("s1")) == 1 and group.at("s1") != {()}


def test_nothing_is_kept_of_sequences_that_are_over() -> None:
    """In whatever order the ranks hear of it."""
    group = Group()
    for number, seq in enumerate(SEQS):
        group.leader.holders(seq)
        group.followers[0].holders(seq)
        if number % 2:
            group.talk()
        for placement in group.placements if number % 3 else reversed(group.placements):
            placement.forget(seq)
        if number % 5:
            group.talk()
    group.talk()
    assert group.followers[0]._told == {} and group.leader.words(1) == ()
    assert all(placement.copies == 0 for placement in group.placements)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_kept_of_sequences_that_end_while_the_ranks_do_not_hear_each_other(when: str) -> None:
    """Nobody will say any more that they are over, be it before or after this rank joins again."""
    group = Group()
    for seq in SEQS:
        group.leader.holders(seq)
    group.talk()
    for seq in SEQS:
        group.followers[0].holders(seq)
    group.leader.left(1, group.now)
    for seq in SEQS:
        group.leader.forget(seq)
        if when == "before":
            group.followers[0].forget(seq)
    group.join(1)
    for seq in SEQS:
        group.followers[0].forget(seq)
    assert group.followers[0]._told == {} and group.followers[0]._unsure == set()


async def test_a_rank_that_cannot_be_told_everything_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer to its reports would let it believe that it has heard all there is."""
    monkeypatch.setattr(group_placement, "MAX_TOLD", 10)
    settings = DaemonSettings(name="a", socket="/run/a.sock", group=GroupSettings(ranks=2))
    sent: list[Joined | Placements] = []

    async def send(identity: bytes, message: Joined | Placements) -> bool:
        sent.append(message)
        return True

    placement = LeadingPlacement(PEERS, ranks=2)
    leader = Leader(settings, placement, MonotonicClock(), send)
    await leader.hear(b"follower", Join(PROTOCOL_VERSION, "a", 1, 2))
    views = tuple(PeerView(name, True, BUDGET, BUDGET, 0.0) for name in PEERS)
    for name in PEERS:
        placement.up(name, host=name)
        placement.room(name, BUDGET, budget_bytes=BUDGET)
    await leader.hear(b"follower", Report(1, views))
    assert isinstance(sent[-1], Placements) and leader.status().joined == (1,)
    for seq in SEQS[:11]:
        assert placement.holders(seq)
    heard = len(sent)
    await leader.hear(b"follower", Report(2, views))
    assert len(sent) == heard and leader.status().joined == ()
    await leader.hear(b"follower", Join(PROTOCOL_VERSION, "a", 1, 2))
    await leader.hear(b"follower", Report(3, views))
    told = [word for message in sent[heard:] if isinstance(message, Placements) for word in message.words]
    assert {word.seq for word in told} == set(SEQS[:11])


@pytest.mark.parametrize("link_ms", [-100.0, float("nan"), float("inf")])
def test_a_rank_that_reports_an_impossible_lag_is_not_heard(link_ms: float) -> None:
    """Rank 0 divides by it, and would place nothing any more."""
    raw = msgspec.msgpack.encode(Report(1, (PeerView("b", True, 1, 1, link_ms),)))
    with pytest.raises(ProtocolError, match="float"):
        decode(raw, Control, peer="rank 1")


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_ranks_agree_once_all_is_said(seed: int) -> None:
    """Links break, peers fill up, ranks join again, rank 0's daemon is another one, sequences come and go:
    after the last word every rank holds each sequence where the others do."""
    rng = random.Random(seed)
    group = Group(3, grace_ns=50)
    live: list[str] = []
    for _ in range(200):
        group.now += rng.randrange(40)
        placement, name = rng.choice(group.placements), rng.choice(PEERS)
        match rng.randrange(8):
            case 0:
                placement.lost(name, group.now)
            case 1:
                placement.up(name, host=name)
                placement.room(name, BUDGET, budget_bytes=BUDGET)
            case 2:
                placement.room(name, rng.randrange(BUDGET), budget_bytes=BUDGET)
            case 3 if live:
                placement.refused(rng.choice(live), name, rng.randrange(BUDGET))
            case 4 if len(live) < len(SEQS):
                seq = rng.choice(sorted(set(SEQS) - set(live)))
                live.append(seq)
                for each in rng.sample(group.placements, 3):
                    each.holders(seq)
            case 5 if live:
                seq = live.pop()
                for each in rng.sample(group.placements, 3):
                    each.forget(seq)
            case 6:
                group.leader = LeadingPlacement(PEERS, ranks=3, grace_ns=50)
                for seq in live:
                    group.leader.holders(seq)
                group.join(1)
                group.join(2)
            case _:
                rank = rng.randrange(1, 3)
                group.leader.left(rank, group.now)
                group.join(rank)
        if rng.random() < 0.5:
            group.talk()
    for placement in group.placements:
        for name in PEERS:
            placement.up(name, host=name)
            placement.room(name, BUDGET, budget_bytes=BUDGET)
    for _ in range(3):
        group.now += 100
        group.talk()
    for seq in set(live):
        assert len(group.at(seq)) == 1 and group.at(seq) != {()}, (seq, group.at(seq))

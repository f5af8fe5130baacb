"""Placement in a group: the ranks of an engine put a sequence at the ranks of one peer engine, or nowhere."""

from __future__ import annotations

import random

import pytest

from segue_daemon.group_placement import FollowingPlacement, LeadingPlacement
from segue_daemon.placement import Placement

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
        self.followers[rank - 1].joined(1)
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


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_ranks_agree_once_all_is_said(seed: int) -> None:
    """Links break, peers fill up, ranks join again, sequences come and go: after the last word every rank
    holds each sequence where the others do."""
    rng = random.Random(seed)
    group = Group(3, grace_ns=50)
    live: list[str] = []
    for _ in range(200):
        group.now += rng.randrange(40)
        placement, name = rng.choice(group.placements), rng.choice(PEERS)
        match rng.randrange(7):
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

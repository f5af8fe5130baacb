"""What a client's word on replication does: whose bytes go first, that nobody starves, and what stays."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.messages.request import Replication
from segue_daemon.ledger import Sequence
from segue_daemon.planner import PRICE, Planner

BLOCK, DELTA = 8, 32


def sequence(name: str, replication: Replication, computed: int) -> Sequence:
    ids = bytearray(4 * computed)
    return Sequence(name, 1, b"", ids, array("I"), [], computed, replication=replication)


def planner() -> Planner:
    return Planner(block_size=BLOCK, sync_every_tokens=1, delta_tokens=DELTA)


def shares(live: dict[str, Sequence], turns: int, *, growing: bool) -> Counter[str]:
    """Tokens of each after so many deltas, of prompts that nobody gets to the end of. `growing`: the journal
    says of each while it is copied that there is more of it."""
    plans, sent = planner(), Counter[str]()
    for found in live.values():
        plans.note(found)
    for _ in range(turns):
        plan = plans.next(live.get)
        assert plan is not None
        if growing:
            plans.note(live[plan.seq])
        plans.sent(live[plan.seq], plan.upto)
        sent[plan.seq] += plan.upto - plan.base
    return sent


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(sorted(PRICE)), min_size=2), st.booleans())
def test_a_short_way_is_shared_by_weight_and_nobody_starves(
    words: dict[str, Replication], growing: bool
) -> None:
    """Sixteen bytes of high, four of normal and one of low, to within a delta of each."""
    live = {name: sequence(name, word, 1_000_000) for name, word in words.items()}
    turns = 40 * sum(16 // PRICE[word] for word in words.values())
    sent = shares(live, turns, growing=growing)
    paid = {name: sent[name] * PRICE[word] for name, word in words.items()}
    assert max(paid.values()) - min(paid.values()) <= 2 * DELTA * max(PRICE.values())
    assert all(sent[name] > 0 for name in words)


def test_a_low_tail_goes_before_a_high_prompt() -> None:
    """Priority orders what is alike: a token being written never waits behind somebody's prompt."""
    plans = planner()
    low = sequence("low", "low", 4)
    plans.note(low)
    plans.sent(low, 4) if plans.next({"low": low}.get) else pytest.fail("nothing to send")
    low.computed, low.token_ids = 5, bytearray(20)
    high = sequence("high", "high", 10_000)
    plans.note(high)
    plans.note(low)
    plan = plans.next({"low": low, "high": high}.get)
    assert plan is not None and plan.seq == "low"


def test_what_is_not_to_be_replicated_is_never_planned() -> None:
    """Neither its prompt nor its tokens, nor when everything is flushed after the engine's death."""
    plans = planner()
    off = sequence("off", "off", 100)
    plans.note(off)
    plans.flush()
    plans.note(off)
    assert plans.waiting == 0 and plans.due_ns() is None and plans.next({"off": off}.get) is None

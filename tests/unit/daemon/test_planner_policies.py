"""When a tail is due, whose turn it is, and what a slow link makes of it."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.errors import ConfigError
from segue_daemon.bucket import NS, Bucket
from segue_daemon.fair_queue import FairQueue
from segue_daemon.ledger import Sequence
from segue_daemon.planner import TAIL_BYTES_PER_BULK_BYTE, Plan, Planner
from segue_daemon.settings import ReplicationSettings

MS = 1_000_000
BLOCK = 8


def sequence(name: str, computed: int) -> Sequence:
    return Sequence(name, 1, b"", bytearray(4 * computed), array("I"), [], computed)


def grow(found: Sequence, tokens: int = 1) -> Sequence:
    found.computed += tokens
    found.token_ids += bytes(4 * tokens)
    return found


def planner(**changes: int) -> Planner:
    return Planner(**({"block_size": BLOCK, "sync_every_tokens": 1, "delta_tokens": 2 * BLOCK} | changes))


def begun(plans: Planner, name: str, tokens: int) -> Sequence:
    """A sequence of which the peer has everything so far."""
    found = sequence(name, tokens)
    plans.note(found)
    while (plan := plans.next({name: found}.get)) is not None:
        plans.sent(found, plan.upto)
    return found


def test_a_tail_is_due_after_so_many_milliseconds() -> None:
    """The planner says when it wants to be asked again, and hands the tail out then, not before."""
    plans = planner(sync_every_tokens=0, sync_every_ms=20)
    a = begun(plans, "a", 3)
    plans.note(grow(a), 5 * MS)
    plans.note(grow(a), 9 * MS)
    assert plans.due_ns() == 25 * MS and plans.waiting == 0
    assert plans.next({"a": a}.get, 24 * MS) is None and not plans.urgent(24 * MS)
    assert plans.urgent(25 * MS)
    assert plans.next({"a": a}.get, 25 * MS) == Plan("a", 3, 5)
    plans.sent(a, 5, 25 * MS)
    assert plans.due_ns() is None


def test_whichever_of_tokens_and_milliseconds_comes_first() -> None:
    """Both rules together bound what is lost by count and by age."""
    plans = planner(sync_every_tokens=3, sync_every_ms=20)
    fast, slow = begun(plans, "fast", 1), begun(plans, "slow", 1)
    live = {"fast": fast, "slow": slow}
    plans.note(grow(slow), 0)
    plans.note(grow(fast, 3), 1 * MS)
    assert plans.next(live.get, 1 * MS) == Plan("fast", 1, 4)
    plans.sent(fast, 4, 1 * MS)
    assert plans.next(live.get, 19 * MS) is None
    assert plans.next(live.get, 20 * MS) == Plan("slow", 1, 2)


def test_a_full_block_is_due_at_once() -> None:
    """A sealed block goes whole and only once: waiting longer would save nothing."""
    plans = planner(sync_every_tokens=0, sync_every_ms=1000)
    a = begun(plans, "a", 6)
    plans.note(grow(a, 2), 0)
    assert plans.next({"a": a}.get, 0) == Plan("a", 6, 8)


def test_a_block_that_was_filled_between_two_looks_is_due_too() -> None:
    """Steps may be taken note of several at once."""
    plans = planner(sync_every_tokens=64)
    a = begun(plans, "a", 6)
    plans.note(grow(a, 3))
    assert plans.next({"a": a}.get) == Plan("a", 6, 9)


def test_flushing_makes_everything_due() -> None:
    """When the engine is dead the last tokens do not wait for more to come."""
    plans = planner(sync_every_tokens=4)
    a = begun(plans, "a", 1)
    plans.note(grow(a, 2))
    assert plans.next({"a": a}.get) is None
    plans.flush()
    plans.note(a)
    assert plans.next({"a": a}.get) == Plan("a", 1, 3)


def test_no_rule_at_all_is_refused() -> None:
    """Tails that are never sent are no protection."""
    with pytest.raises(ConfigError, match="sync_every_tokens and sync_every_ms"):
        ReplicationSettings(sync_every_tokens=0)
    assert ReplicationSettings(sync_every_tokens=0, sync_every_ms=5).sync_every_ms == 5


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.integers(0, 12)),
        min_size=1,
        max_size=120,
    ),
    st.sampled_from([(1, 0), (3, 0), (0, 7), (3, 7)]),
)
def test_every_due_token_goes_out_and_no_token_is_older_than_the_rule(
    script: list[tuple[str, int, int]], rule: tuple[int, int]
) -> None:
    """Sequences grow at random times: plans cover all tokens in order, and with a link that is free no tail
    waits longer than `sync_every_ms` or grows beyond `sync_every_tokens`."""
    every_tokens, every_ms = rule
    plans = planner(sync_every_tokens=every_tokens, sync_every_ms=every_ms)
    live: dict[str, Sequence] = {}
    upto: Counter[str] = Counter()
    since_ns: dict[str, int] = {}
    now_ns = 0

    def serve() -> None:
        while (plan := plans.next(live.get, now_ns)) is not None:
            assert plan.base == upto[plan.seq] and plan.upto > plan.base
            upto[plan.seq] = plan.upto
            plans.sent(live[plan.seq], plan.upto, now_ns)
            if upto[plan.seq] == live[plan.seq].shippable:
                since_ns.pop(plan.seq, None)

    for name, tokens, pause_ms in script:
        until_ns = now_ns + pause_ms * MS
        while (due_ns := plans.due_ns()) is not None and due_ns <= until_ns:
            now_ns = max(now_ns, due_ns)
            serve()
        now_ns = until_ns
        grow(live.setdefault(name, sequence(name, 0)), tokens)
        if tokens:
            since_ns.setdefault(name, now_ns)
        plans.note(live[name], now_ns)
        serve()
        for seq, found in live.items():
            behind = found.shippable - upto[seq]
            assert not every_tokens or behind < max(1, every_tokens)
            assert not every_ms or behind == 0 or now_ns - since_ns[seq] < every_ms * MS


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 1000)), min_size=1, max_size=200))
def test_a_fair_queue_never_lets_two_that_wait_drift_apart(turns: list[tuple[str, int]]) -> None:
    """Whatever the turns cost, who waits all the time is served within one turn of everybody else."""
    queue = FairQueue()
    names = sorted({name for name, _ in turns})
    costs = {name: [cost for who, cost in turns if who == name] for name in names}
    for name in names:
        queue.add(name)
    served: Counter[str] = Counter()
    for turn in range(200):
        name = queue.pop()
        assert name is not None
        cost = costs[name][turn % len(costs[name])]
        queue.charge(name, cost)
        served[name] += cost
        queue.add(name)
        assert max(served[n] for n in names) - min(served[n] for n in names) <= 2 * max(
            map(max, costs.values())
        )


def test_who_was_idle_saves_nothing_up() -> None:
    """A sequence that comes back does not lock the others out until it has caught up in bytes."""
    queue = FairQueue()
    for _ in range(100):
        queue.add("busy")
        assert queue.pop() == "busy"
        queue.charge("busy", 1000)
    order = []
    for _ in range(6):
        queue.add("busy")
        queue.add("idle")
        name = queue.pop()
        assert name is not None
        queue.charge(name, 1000)
        order.append(name)
    assert order.count("busy") == order.count("idle") == 3


def test_a_queue_does_not_grow_with_names_that_left() -> None:
    """Sequences come and go by the million."""
    queue = FairQueue()
    for number in range(10_000):
        queue.add(f"s{number}")
        queue.forget(f"s{number}")
    assert len(queue._heap) < 50 and not queue._served and queue.pop() is None


def shipped(plans: Planner, live: dict[str, Sequence], turns: int) -> list[Plan]:
    found = []
    for _ in range(turns):
        plan = plans.next(live.get)
        if plan is None:
            break
        plans.sent(live[plan.seq], plan.upto)
        found.append(plan)
    return found


def test_long_prompts_take_turns() -> None:
    """A prompt that came later does not wait for the whole of an earlier one."""
    plans = planner()
    live = {name: sequence(name, 400) for name in "abc"}
    for found in live.values():
        plans.note(found)
    tokens = Counter[str]()
    for plan in shipped(plans, live, 30):
        tokens[plan.seq] += plan.upto - plan.base
    assert max(tokens.values()) - min(tokens.values()) <= 2 * BLOCK


def test_tails_go_first_but_do_not_starve_bulk() -> None:
    """Answers that grow with every delta take most of the link; a prompt still gets through."""
    plans = planner()
    writing = {name: begun(plans, name, 1) for name in "abcd"}
    prompt = sequence("prompt", 10_000)
    plans.note(prompt)
    live = {**writing, "prompt": prompt}
    for found in writing.values():
        plans.note(grow(found))
    order = []
    for _ in range(4000):
        (plan,) = shipped(plans, live, 1)
        order.append(plan)
        if plan.seq in writing:
            plans.note(grow(writing[plan.seq]))
    bulk = sum(p.upto - p.base for p in order if p.seq == "prompt")
    tails = sum(p.upto - p.base for p in order if p.seq != "prompt")
    assert order[0].seq != "prompt"
    assert tails / TAIL_BYTES_PER_BULK_BYTE * 0.9 <= bulk <= tails / TAIL_BYTES_PER_BULK_BYTE + 2 * BLOCK


@pytest.mark.parametrize("slowdown", [4, 16, 64])
def test_a_throttled_link_merges_and_its_lag_stays_bounded(slowdown: int) -> None:
    """A token a millisecond; a delta costs a block, whatever it carries. The smaller the budget, the fewer
    bytes a token takes, and lag is what one round of deltas takes within the budget: it does not grow."""
    block_bytes = 10_000
    plans = planner(token_bytes=block_bytes // BLOCK)
    bucket = Bucket(block_bytes * 1000 // slowdown, burst=block_bytes)
    live = {name: begun(plans, name, 1) for name in "ab"}
    sent_bytes = worst_lag = 0
    tokens = 4000
    for step in range(tokens // 2):
        now_ns = step * 2 * MS
        for found in live.values():
            plans.note(grow(found), now_ns)
        while not bucket.wait_ns(now_ns) and (plan := plans.next(live.get, now_ns)) is not None:
            blocks = -(-plan.upto // BLOCK) - plan.base // BLOCK
            plans.sent(live[plan.seq], plan.upto, now_ns, blocks * block_bytes)
            bucket.take(blocks * block_bytes, now_ns)
            sent_bytes += blocks * block_bytes
        if step > 200:
            worst_lag = max(worst_lag, *(f.shippable - plans.progress[s].sent for s, f in live.items()))
    sustainable = sent_bytes / (tokens * MS) * NS
    assert sustainable <= bucket.rate + 3 * bucket.burst / (tokens / 1000)
    assert sent_bytes / tokens <= 1.1 * block_bytes / slowdown
    if slowdown <= BLOCK:
        assert worst_lag <= 2 * slowdown + BLOCK
    else:
        assert sent_bytes >= 0.9 * bucket.rate * tokens / 1000, "beyond that it gives all it has"


def test_plans_are_made_from_what_is_true_when_there_is_room() -> None:
    """While the budget is spent nothing is queued: the one plan afterwards covers all that came meanwhile."""
    plans = planner()
    a = begun(plans, "a", 1)
    for step in range(6):
        plans.note(grow(a), step * MS)
        assert plans.waiting == 1
    found = shipped(plans, {"a": a}, 9)
    assert found == [Plan("a", 1, 7)]
    assert all(before.upto == after.base for before, after in pairwise(found))

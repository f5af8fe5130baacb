"""What is sent next, and whether an engine is stuck: decisions without any I/O."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from segue_daemon.ledger import Sequence
from segue_daemon.planner import Plan, Planner
from segue_daemon.progress import ProgressJudge, Sample


def sequence(name: str, computed: int, known: int | None = None, epoch: int = 1) -> Sequence:
    ids = bytearray(4 * (computed if known is None else known))
    return Sequence(name, epoch, b"", ids, array("I", range(1 + computed // 4)), [0] * 99, computed)


def planner(**changes: int) -> Planner:
    return Planner(**({"block_size": 4, "sync_every_tokens": 1, "delta_tokens": 8} | changes))


def drain(plans: Planner, live: dict[str, Sequence]) -> list[Plan]:
    found = []
    while (plan := plans.next(live.get)) is not None:
        found.append(plan)
        plans.sent(live[plan.seq], plan.upto)
    return found


def test_decode_tails_go_before_prefill_bulk() -> None:
    """An answer being written does not wait behind somebody's long prompt."""
    plans = planner()
    short, long = sequence("short", 5), sequence("long", 100)
    plans.note(short)
    drain(plans, {"short": short})
    plans.note(long)
    short.computed, short.token_ids = 6, bytearray(24)
    plans.note(short)
    assert plans.next({"short": short, "long": long}.get) == Plan("short", 5, 6)


def test_bulk_is_cut_into_deltas_of_whole_blocks() -> None:
    """One delta never grows past its bound, and all tokens are covered without gap or overlap."""
    live = {"a": sequence("a", 30)}
    plans = planner()
    plans.note(live["a"])
    found = drain(plans, live)
    assert [p.base for p in found] == [0, *[p.upto for p in found[:-1]]]
    assert found[-1].upto == 30 and all(p.upto - p.base <= 8 for p in found)


def test_only_what_is_computed_and_known_is_sent() -> None:
    """Engines may run ahead of the token ids."""
    live = {"a": sequence("a", computed=9, known=7)}
    plans = planner()
    plans.note(live["a"])
    assert drain(plans, live)[-1].upto == 7


def test_a_slow_link_merges_what_came_meanwhile() -> None:
    """Nothing is queued: the next plan covers everything that is true by then."""
    a = sequence("a", 5)
    plans = planner()
    plans.note(a)
    drain(plans, {"a": a})
    for computed in (6, 7, 8):
        a.computed, a.token_ids = computed, bytearray(4 * computed)
        plans.note(a)
    assert drain(plans, {"a": a}) == [Plan("a", 5, 8)]


def test_an_ack_beyond_what_was_sent_is_capped() -> None:
    """A peer that lies cannot raise the watermark."""
    a = sequence("a", 6)
    plans = planner()
    plans.note(a)
    drain(plans, {"a": a})
    plans.acked("a", 1, 1_000_000)
    assert plans.progress["a"].acked == 6
    plans.acked("a", 1, 3)
    assert plans.progress["a"].acked == 6


def test_a_fenced_sequence_is_sent_no_more_until_a_higher_epoch() -> None:
    """Whoever lost the sequence stops shipping it."""
    a = sequence("a", 6)
    plans = planner()
    plans.note(a)
    plans.stop("a", 1, "fenced")
    plans.note(a)
    assert plans.next({"a": a}.get) is None
    again = sequence("a", 6, epoch=2)
    plans.note(again)
    assert plans.next({"a": again}.get) == Plan("a", 0, 6)


def sample(ms: int, *, begun: int = 1, committed: int = 0, running: int = 1, cpu: int = 0) -> Sample:
    return Sample(ms * 1_000_000, begun, committed, running, cpu)


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ([sample(0), sample(1500)], "running"),
        ([sample(0), sample(2500)], "stalled"),
        ([sample(0), sample(1500, begun=2), sample(3000, begun=2)], "running"),
        ([sample(0), sample(1500, cpu=9), sample(3000, cpu=20), sample(4500, cpu=31)], "running"),
        ([sample(0), sample(1500, cpu=9), sample(3600, cpu=9)], "stalled"),
        ([sample(0, running=0), sample(60_000, running=0)], "running"),
        ([sample(0, running=0), sample(60_000, running=1), sample(61_000)], "running"),
        ([sample(i * 1000, cpu=i) for i in range(12)], "stalled"),
    ],
    ids=[
        "short",
        "stood still",
        "step",
        "long prefill burns CPU",
        "then stops",
        "idle",
        "woke up",
        "step limit",
    ],
)
def test_progress_decides(script: list[Sample], state: str) -> None:
    """Slow is not dead, idle is not dead, and a step cannot burn CPU for ever."""
    judge = ProgressJudge(stall_ms=2000, step_ms=10_000)
    verdict = ""
    for before, after in zip([script[0], *script], script, strict=False):
        for now_ns in range(before.now_ns, after.now_ns, 500_000_000):
            judge.judge(replace(before, now_ns=now_ns))
        verdict = judge.judge(after)[0]
    assert verdict == state


def test_a_paused_observer_suspects_itself_first() -> None:
    """A host that slept for ten seconds does not declare its engines stalled when it wakes up."""
    judge = ProgressJudge(stall_ms=2000, step_ms=60_000)
    judge.judge(sample(0))
    assert judge.judge(sample(10_000))[0] == "running"
    assert [judge.judge(sample(10_000 + 500 * i))[0] for i in range(1, 6)][-1] == "stalled"

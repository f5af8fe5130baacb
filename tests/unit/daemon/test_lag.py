"""Lag: what an operator reads as milliseconds is the age of tokens, and costs next to nothing to know."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue_daemon.lag import BOUNDS_MS, MAX_MARKS, LagMarks, LagMeter

MS = 1_000_000


def test_a_token_counts_from_its_commit_to_its_ack() -> None:
    """One ack may cover tokens of several steps; each has its own age."""
    meter = LagMeter()
    marks = LagMarks(meter)
    marks.grew("s", 0, 10, 0)
    marks.grew("s", 0, 11, 30 * MS)
    assert marks.oldest_ms(40 * MS) == 40
    marks.acked("s", 11, 40 * MS)
    counted = dict(zip([*BOUNDS_MS, "later"], meter.counts, strict=True))
    assert (counted[50], counted[10], sum(meter.counts)) == (10, 1, 11)
    assert meter.sum_ms == 10 * 40 + 10
    assert marks.oldest_ms(99 * MS) == 0


def test_a_part_that_is_acked_leaves_the_rest_with_its_age() -> None:
    """A long prompt is acked delta by delta."""
    meter = LagMeter()
    marks = LagMarks(meter)
    marks.grew("s", 0, 100, 5 * MS)
    marks.acked("s", 60, 10 * MS)
    marks.acked("s", 60, 11 * MS)
    assert sum(meter.counts) == 60 and marks.oldest_ms(25 * MS) == 20
    marks.forget("s")
    assert marks.oldest_ms(25 * MS) == 0 and marks.lagging() == ()


def test_the_histogram_is_cumulative_as_prometheus_wants_it() -> None:
    """The last bucket holds everything."""
    meter = LagMeter()
    meter.observe(3, 0.4)
    meter.observe(2, 1.5)
    meter.observe(1, 1e9)
    found = meter.cumulative()
    assert found[0] == ("1.0", 3.0) and found[1] == ("2.0", 5.0) and found[-1] == ("+Inf", 6.0)
    assert [count for _, count in found] == sorted(count for _, count in found)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 50)), max_size=400))
def test_each_token_is_counted_once_and_never_too_young(script: list[tuple[bool, int, int]]) -> None:
    """However growth and acks alternate, memory stays bounded; merging may only overstate an age."""
    meter = LagMeter()
    marks = LagMarks(meter)
    committed: list[int] = []
    acked = now_ns = 0
    least_ms = 0.0
    for grows, count, pause_ms in script:
        now_ns += pause_ms * MS
        if grows:
            committed += [now_ns] * count
            marks.grew("s", acked, len(committed), now_ns)
        else:
            upto = min(len(committed), acked + count)
            least_ms += sum((now_ns - at) / MS for at in committed[acked:upto])
            acked = upto
            marks.acked("s", acked, now_ns)
        assert len(marks._marks.get("s", ())) <= MAX_MARKS
        oldest = (now_ns - committed[acked]) / MS if acked < len(committed) else 0
        assert marks.oldest_ms(now_ns) >= oldest - 1e-6
    assert sum(meter.counts) == acked
    assert meter.sum_ms >= least_ms - 1e-3

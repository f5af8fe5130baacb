"""Bandwidth budgets: never more than allowed, never less than possible, and nobody is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue_daemon.bucket import BURST_MS, LATE_NS, NS, Bucket, SharedBudget, Throttle

MS = 1_000_000


@given(
    rate=st.integers(1, 10_000_000),
    burst=st.integers(1, 1_000_000),
    sizes=st.lists(st.integers(1, 500_000), min_size=1, max_size=40),
    pauses_ms=st.lists(st.integers(0, 3000), min_size=40, max_size=40),
)
def test_no_stretch_of_time_carries_more_than_the_bucket_allows(
    rate: int, burst: int, sizes: list[int], pauses_ms: list[int]
) -> None:
    """However sending and pausing alternate: burst + rate x time + the delta that overdrew it, no more; and
    whoever waits as told may always send."""
    bucket = Bucket(rate, burst)
    now_ns = 0
    sent: list[tuple[int, int]] = []
    for nbytes, pause_ms in zip(sizes, pauses_ms, strict=False):
        now_ns += pause_ms * MS
        now_ns += bucket.wait_ns(now_ns)
        assert bucket.wait_ns(now_ns) == 0
        bucket.take(nbytes, now_ns)
        sent.append((now_ns, nbytes))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            total = sum(nbytes for _, nbytes in sent[first : last + 1])
            elapsed_ns = sent[last][0] - sent[first][0]
            assert (total - sent[last][1] - burst) * NS <= rate * elapsed_ns


def test_a_saturated_bucket_gives_its_whole_rate() -> None:
    """A budget is a limit, not a penalty: with something to send all of it is used."""
    bucket = Bucket(1_000_000)
    now_ns = total = 0
    while now_ns < 10 * NS:
        now_ns += bucket.wait_ns(now_ns)
        bucket.take(70_000, now_ns)
        total += 70_000
    assert 10_000_000 <= total <= 10_000_000 + 1_000_000 * BURST_MS // 1000 + 2 * 70_000


def test_no_rate_is_no_limit() -> None:
    """Without a configured budget nothing ever waits."""
    bucket = Bucket(0)
    bucket.take(1 << 40, 0)
    assert bucket.wait_ns(0) == 0
    shared = SharedBudget(0)
    shared.take("a", 1 << 40, 0)
    assert shared.wait_ns("b", urgent=False, now_ns=0) == 0


def run_links(shared: SharedBudget, links: dict[str, bool], nbytes: int, until_ns: int) -> dict[str, int]:
    """Links that always have something to send; each asks again exactly when it was told to."""
    ask_at = dict.fromkeys(links, 0)
    sent = dict.fromkeys(links, 0)
    while (now_ns := min(ask_at.values())) < until_ns:
        for name, urgent in links.items():
            if ask_at[name] <= now_ns:
                wait_ns = shared.wait_ns(name, urgent=urgent, now_ns=now_ns)
                if not wait_ns:
                    shared.take(name, nbytes, now_ns)
                    sent[name] += nbytes
                ask_at[name] = now_ns + max(wait_ns, 1000)
    return sent


def test_links_share_the_daemons_budget_evenly() -> None:
    """The link that happens to be asked first does not take it all."""
    sent = run_links(SharedBudget(1_000_000), {"a": False, "b": False, "c": False}, 20_000, 5 * NS)
    assert max(sent.values()) - min(sent.values()) <= 2 * 20_000
    assert sum(sent.values()) >= 4_800_000


def test_a_link_with_tails_goes_before_links_with_bulk() -> None:
    """Somebody's prompt on its way to one peer does not hold up an answer on its way to another."""
    shared = SharedBudget(1_000_000, burst=10_000)
    shared.take("bulk", 200_000, 0)
    wait_ns = shared.wait_ns("bulk", urgent=False, now_ns=0)
    again_ns = shared.wait_ns("tails", urgent=True, now_ns=wait_ns // 2)
    now_ns = wait_ns // 2 + again_ns
    assert shared.wait_ns("bulk", urgent=False, now_ns=now_ns) > 0, "the other one's turn"
    assert shared.wait_ns("tails", urgent=True, now_ns=now_ns) == 0


def test_tails_that_would_take_the_whole_budget_leave_links_without_tails_their_part() -> None:
    """A peer that has nothing yet has no tails either: it would stay without for as long as others decode."""
    shared = SharedBudget(1_000_000, burst=20_000)
    sent = run_links(shared, {"tails": True, "bulk": False, "new": False}, 20_000, 20 * NS)
    rest = sent["bulk"] + sent["new"]
    assert 6 * rest <= sent["tails"] <= 10 * rest
    assert abs(sent["bulk"] - sent["new"]) <= 40_000


def test_a_link_that_went_away_does_not_block_the_others() -> None:
    """A claim on the budget lapses if nobody comes back for it."""
    shared = SharedBudget(1_000_000, burst=10_000)
    shared.take("a", 100_000, 0)
    wait_ns = shared.wait_ns("dead", urgent=True, now_ns=0)
    shared.wait_ns("a", urgent=False, now_ns=0)
    assert shared.wait_ns("a", urgent=False, now_ns=wait_ns) > 0
    assert shared.wait_ns("a", urgent=False, now_ns=wait_ns + LATE_NS + 1) == 0


def test_what_throttling_cost_is_counted() -> None:
    """An operator sees how long the budget stood in the way, and of how many bytes."""
    throttle = Throttle("b", Bucket(1_000_000, 10_000), SharedBudget(0))
    assert throttle.wait_ns(urgent=False, now_ns=0) == 0
    throttle.take(110_000, 0)
    assert (throttle.waited_ns, throttle.deferred_bytes) == (0, 0), "the first delta did not wait"
    assert throttle.wait_ns(urgent=False, now_ns=20 * MS) == 80 * MS
    assert throttle.wait_ns(urgent=True, now_ns=60 * MS) == 40 * MS
    assert throttle.wait_ns(urgent=True, now_ns=100 * MS) == 0
    throttle.take(5_000, 100 * MS)
    assert (throttle.waited_ns, throttle.deferred_bytes) == (80 * MS, 5_000)
    throttle.take(200_000, 100 * MS)
    throttle.wait_ns(urgent=False, now_ns=110 * MS)
    throttle.idle(150 * MS)
    assert (throttle.waited_ns, throttle.deferred_bytes) == (120 * MS, 5_000)

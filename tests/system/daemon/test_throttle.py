"""Bandwidth budgets and lag on real daemons, by their own counters."""

from __future__ import annotations

import re
import time
from typing import Any

from segue_daemon.bucket import BURST_MS
from support.daemons import DaemonSet
from support.light_engine import BLOCK_SIZE, DIM, HEADS, LAYERS, LightEngine
from support.waiting import wait_for

BLOCK_BYTES = LAYERS * HEADS * DIM * BLOCK_SIZE * 2
HEADER_BYTES = 1024
"""More than a delta's header, and all that an END takes."""


def engine(daemons: DaemonSet, name: str, incarnation: int = 1, **options: Any) -> LightEngine:
    found = LightEngine(daemons[name].socket, name, incarnation=incarnation, **options)
    wait_for(lambda: found.exporter.registered, "engine registered")
    return found


def peer_status(daemons: DaemonSet) -> dict[str, Any]:
    found: dict[str, Any] = daemons["a"].status()["peers"][0]
    return found


def decode(a: LightEngine, seq: str, tokens: int) -> None:
    live = a.live[seq]
    for token in range(tokens):
        live.ids.append(token)
        a.step()


def test_a_throttled_link_keeps_to_its_budget_and_lets_everything_through() -> None:
    """Bulk and tails together never take more than the budget, and the replica catches up all the same."""
    rate = 200_000
    daemons = DaemonSet("a", "b", replication={"max_bytes_per_s": rate})
    try:
        a = engine(daemons.start(), "a", num_blocks=400)
        before, started = peer_status(daemons)["sent_bytes"], time.monotonic()
        a.start("prompt", list(range(1600)))
        a.start("answer", [1, 2, 3])
        a.step()
        decode(a, "answer", 200)
        samples = []

        def arrived() -> bool:
            # The counter is read before the clock, so that a slow read never looks like a fast link.
            sent = peer_status(daemons)["sent_bytes"] - before
            samples.append((time.monotonic() - started, sent))
            return daemons["b"].watermark("prompt") == 1600 and daemons["b"].watermark("answer") == 203

        wait_for(arrived, "all tokens at b", timeout_s=30)
        overdraft = rate * BURST_MS // 1000 + 2 * (rate * BURST_MS // 1000 + BLOCK_BYTES + HEADER_BYTES)
        for elapsed_s, sent in samples:
            assert sent <= rate * elapsed_s + overdraft
        status = peer_status(daemons)
        assert status["throttled_ms"] > 0 and 0 < status["throttled_bytes"] <= status["sent_bytes"]
        a.close()
    finally:
        daemons.stop()


def test_throttling_merges_tokens_instead_of_queueing_them() -> None:
    """With less bandwidth a decoded token takes fewer bytes: what was superseded is never sent."""
    taken = {}
    for rate in (0, 30_000):
        daemons = DaemonSet("a", "b", replication={"max_bytes_per_s": rate})
        try:
            a = engine(daemons.start(), "a")
            a.start("s", [1])
            a.step()
            wait_for(lambda d=daemons: d["b"].watermark("s") == 1, "begun")  # type: ignore[misc]
            for token in range(300):
                decode(a, "s", 1)
                if not rate:
                    wait_for(lambda d=daemons, n=token + 2: d["b"].watermark("s") == n, "token by token")  # type: ignore[misc]
            wait_for(lambda d=daemons: d["b"].watermark("s") == 301, "all tokens at b")  # type: ignore[misc]
            taken[rate] = peer_status(daemons)["sent_bytes"]
            a.close()
        finally:
            daemons.stop()
    assert taken[30_000] < 0.8 * taken[0], taken  # two thirds of it is the KV itself


def test_an_answer_is_not_held_up_by_a_prompt_under_the_budget() -> None:
    """While a long prompt is on its way for seconds, the tokens of an answer arrive."""
    daemons = DaemonSet("a", "b", replication={"max_bytes_per_s": 200_000})
    try:
        a = engine(daemons.start(), "a", num_blocks=800)
        a.start("answer", [1, 2, 3])
        a.step()
        wait_for(lambda: daemons["b"].watermark("answer") == 3, "begun")
        a.start("prompt", list(range(5000)))
        a.step()
        decode(a, "answer", 5)
        wait_for(lambda: daemons["b"].watermark("answer") == 8, "the answer's tokens at b")
        assert daemons["b"].watermark("prompt") < 5000, "the prompt is still under way"
        assert peer_status(daemons)["lag_ms"] > 0
        wait_for(lambda: daemons["b"].watermark("prompt") == 5000, "the prompt at b", timeout_s=30)
        wait_for(lambda: peer_status(daemons)["lag_ms"] == 0, "no lag left")
        a.close()
    finally:
        daemons.stop()


def test_a_tail_is_sent_by_the_clock_when_no_token_follows() -> None:
    """With `sync_every_ms` alone a sequence that pauses is protected to its last token."""
    daemons = DaemonSet("a", "b", replication={"sync_every_tokens": 0, "sync_every_ms": 100})
    try:
        a = engine(daemons.start(), "a")
        a.start("s", [1, 2])
        a.step()
        wait_for(lambda: daemons["b"].watermark("s") == 2, "begun")
        before = peer_status(daemons)["sent_bytes"]
        decode(a, "s", 3)
        wait_for(lambda: daemons["b"].watermark("s") == 5, "the tail at b")
        assert peer_status(daemons)["sent_bytes"] - before < 2 * (BLOCK_BYTES + HEADER_BYTES)
        a.close()
    finally:
        daemons.stop()


def test_lag_is_a_histogram_over_tokens() -> None:
    """Each acked token is counted once, with the time from its commit to its ack."""
    daemons = DaemonSet("a", "b")
    try:
        a = engine(daemons.start(), "a")
        a.start("s", list(range(20)))
        a.step()
        decode(a, "s", 30)
        wait_for(lambda: daemons["a"].watermark("s") == 50, "all acked")
        text = daemons["a"].get("/metrics")[1]
        buckets = re.findall(r'segue_peer_lag_ms_bucket\{le="([^"]+)",peer="b"\} (\S+)', text)
        assert buckets[-1] == ("+Inf", "50.0")
        assert 'segue_peer_lag_ms_count{peer="b"} 50.0' in text
        assert re.search(r'segue_peer_throttled_ms_total\{peer="b"\} 0\.0', text)
        a.close()
    finally:
        daemons.stop()

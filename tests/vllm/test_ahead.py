"""Asynchronous scheduling, vLLM's default on GPUs, inside real vLLM: its own scheduler and queue of steps, on
a CPU (see ahead.py for what stands in for a GPU's streams)."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(150)]


@pytest.fixture
def run(ahead_run: dict[str, Any]) -> dict[str, Any]:
    """See ahead_run.py."""
    assert ahead_run["engine"] == ["AsyncScheduler", True]
    return ahead_run


def test_what_may_be_shipped_is_what_the_model_computes(run: dict[str, Any]) -> None:
    """KV runs a token ahead of its ids; with chunks, prefix hits, a preemption and an abort, KV of the ids
    that are known is right and stays."""
    together = run["together"]
    assert all(together["equal"].values())
    assert together["ahead"] == 1 and together["paused"]
    assert max(together["errors"].values()) < 1e-3
    assert together["changed"] == together["problems"] == together["left"] == []


def test_at_most_two_tokens_of_an_answer_are_not_protected(run: dict[str, Any]) -> None:
    """The last one, which nobody computes, and the one before it, whose id the end outruns."""
    assert set(run["together"]["missing"].values()) <= {1, 2}


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_an_answer_goes_on_from_a_replica(run: dict[str, Any], kind: str) -> None:
    """The load is complete before anything is computed on it; the answer is the whole one."""
    loaded = run[kind]["loaded"]
    assert loaded["different"] == [[]] and loaded["loaded"] == [144]
    assert run[kind]["junk"]["loaded"] == [144] and run[kind]["junk"]["different"] != [[]]


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_nothing_is_computed_on_a_load_that_failed(run: dict[str, Any], kind: str) -> None:
    """The next step would have been scheduled by the time it is known: the request has waited instead."""
    assert run[kind]["failed"] == {"different": [[], [], []], "loaded": [0, 0, 0], "cached": 0}

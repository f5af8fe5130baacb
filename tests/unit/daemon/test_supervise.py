"""A task that must live is started again, and says why it failed only once."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from segue_daemon import supervise as module


async def test_a_failed_task_runs_again_and_logs_its_cause_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon whose accept loop died silently would look healthy and protect nobody."""
    monkeypatch.setattr(module, "RESTART_S", 0.001)
    runs = 0
    fifth = asyncio.Event()

    async def task() -> None:
        nonlocal runs
        runs += 1
        if runs == 5:
            fifth.set()
        raise RuntimeError("no descriptors left")

    with structlog.testing.capture_logs() as logs:
        supervised = asyncio.create_task(module.supervise("accept", task))
        await asyncio.wait_for(fifth.wait(), 10)
        supervised.cancel()
        await asyncio.gather(supervised, return_exceptions=True)
    assert [entry["task"] for entry in logs] == ["accept"]

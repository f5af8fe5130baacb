"""The fuzzer notices what it is there for: a check that is taken away is missed within a few thousand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import segue_daemon.local
import segue_daemon.receiver
import segue_daemon.store
import segue_router.transcript
from fuzz.run import run_target
from fuzz.targets import TARGETS
from segue_daemon.outbox import Outbox
from segue_daemon.store import ReplicaStore


def without(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    monkeypatch.setattr(owner, name, instead)


PLANTED: dict[str, tuple[str, int, Callable[[pytest.MonkeyPatch], None]]] = {
    "patches are not checked": (
        "bulk",
        4_000,
        lambda patch: without(patch, segue_daemon.store, "patch_fits", lambda *_: True),
    ),
    "a reservation that failed is kept": (
        "bulk",
        2_000,
        lambda patch: without(patch, ReplicaStore, "cancel", lambda *_: None),
    ),
    "a new link begins with what the last one owed": (
        "link",
        10_000,
        lambda patch: without(patch, Outbox, "opened", lambda box, nbytes: setattr(box, "window", nbytes)),
    ),
    "descriptors that nobody wants are kept": (
        "local",
        1_000,
        lambda patch: without(patch, segue_daemon.local, "close_fds", lambda _: None),
    ),
    "any JSON is an event": (
        "transcript",
        2_000,
        lambda patch: without(patch, segue_router.transcript, "choices_in", lambda chunk: chunk["choices"]),
    ),
}


@pytest.mark.parametrize("planted", sorted(PLANTED))
async def test_a_check_that_is_missing_is_missed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that finds nothing proves something only if it would have found this."""
    target, frames, plant = PLANTED[planted]
    plant(monkeypatch)
    report = await run_target(TARGETS[target][0], frames, seed=3)
    assert report.problems, f"not within {frames} frames"

"""The connector inside real vLLM: what daemons learn, what engines load, and what goes wrong on the way."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(150)]


@pytest.fixture
def journal(journal_run: dict[str, Any]) -> dict[str, Any]:
    """See journal_run.py."""
    return journal_run


@pytest.fixture
def load(load_run: dict[str, Any]) -> dict[str, Any]:
    """See load_run.py."""
    return load_run


def test_without_a_daemon_the_engine_serves_and_says_once_what_to_do(journal: dict[str, Any]) -> None:
    """A missing socket folder is one warning, not a failed start."""
    assert journal["varied"] > 40
    assert journal["log"].count("no segue-daemon at") == 1


def test_a_daemon_that_comes_later_is_found(journal: dict[str, Any]) -> None:
    """Registration needs no restart of the engine and no request."""
    assert journal["registered_after_s"] < 3


def test_protection_does_not_change_any_answer(journal: dict[str, Any]) -> None:
    """Chunks, prefix hits and preemptions included."""
    assert all(journal["first"]["equal"].values())


def test_what_the_daemon_may_ship_is_what_the_model_computes(journal: dict[str, Any]) -> None:
    """Bytes of committed slots, through the shared memory, against transformers' own KV."""
    first = journal["first"]
    assert max(first["errors"].values()) < 1e-3
    assert all(first["known_right"].values())


def test_every_computed_token_is_told(journal: dict[str, Any]) -> None:
    """With k tokens delivered, KV of prompt + k - 1 is known (the very last commit may come with the end)."""
    first = journal["first"]
    assert all(first["tokens"][seq] >= wanted - 1 for seq, wanted in first["wanted"].items())


def test_committed_kv_never_changes_under_the_daemon(journal: dict[str, Any]) -> None:
    """Nothing that counts as computed is overwritten without having been assigned before."""
    assert journal["first"]["changed"] == []
    assert journal["first"]["problems"] == []


def test_the_scenario_is_as_hard_as_it_claims(journal: dict[str, Any]) -> None:
    """Several sequences a step, and at least one was preempted."""
    assert journal["first"]["at_once"] >= 3
    assert journal["first"]["paused"]


def test_ends_and_aborts_are_told_at_once(journal: dict[str, Any]) -> None:
    """An idle engine looks idle, not stalled, and leaves no sequence behind."""
    first = journal["first"]
    assert first["left"] == []
    assert "aborted" in first["ended"]
    begun, committed, running = first["words"]
    assert begun == committed > 0 and running == 0


def test_a_sleeping_daemon_is_woken_once(journal: dict[str, Any]) -> None:
    """The bell is rung for the first record after the daemon fell asleep, and not again."""
    assert journal["first"]["doorbell"] == 1


def test_a_restarted_daemon_learns_of_live_sequences(journal: dict[str, Any]) -> None:
    """Killed under load and started again: everything that runs is announced anew, whole."""
    again = journal["again"]
    assert all(again["equal"].values())
    assert again["resets"] == 1
    assert set(again["errors"]) == {"again-aligned", "again-chunked"}
    assert max(again["errors"].values()) < 1e-3
    assert again["problems"] == again["changed"] == []


def test_one_writer_a_sequence(journal: dict[str, Any]) -> None:
    """A late writer is not protected, one with a higher epoch takes over; siblings are counted once."""
    assert journal["epochs"] == [5, 6]
    assert journal["after_all"] == {"left": [], "problems": [], "running": 0}


def test_the_answer_goes_on_from_a_replica(load: dict[str, Any]) -> None:
    """All but one token is loaded, and the rest of the answer is what it would have been."""
    assert load["computed_after_45"] == 144
    assert load["loaded"]["equal"]
    assert load["loaded"]["cached"] == 144
    assert load["loaded"]["releases"] == [[101, 144]]
    assert all(load["question"].values())


def test_a_replica_that_ends_inside_a_block_is_used_to_its_last_token(load: dict[str, Any]) -> None:
    """70 tokens are two blocks and six slots."""
    assert load["partly"]["equal"] and load["partly"]["cached"] == 70


def test_the_loaded_bytes_are_the_ones_used(load: dict[str, Any]) -> None:
    """Other bytes give another answer, so the tests above would notice a load that does nothing."""
    assert not load["junk"]["equal"] and load["junk"]["cached"] == 144


@pytest.mark.parametrize("what", ["outside", "expired", "other_daemon"])
def test_a_load_that_fails_is_computed_instead(load: dict[str, Any], what: str) -> None:
    """Extents outside the arena, a lease that ran out, an arena that the worker does not map."""
    assert load[what]["equal"]
    assert [loaded for _, loaded in load[what]["releases"]] == [0]
    assert load["after_expired"]["equal"] and load["after_expired"]["cached"] == 144


@pytest.mark.parametrize("what", ["nonsense", "garbage", "silent", "silent_again"])
def test_a_daemon_that_answers_badly_or_not_holds_nothing(load: dict[str, Any], what: str) -> None:
    """The engine computes; it waits for no more than the deadline, and does not ask again at once."""
    assert load[what]["equal"] and load[what]["cached"] == 0
    assert load[what]["first_step_s"] < 2
    assert load["recovered"]["equal"] and load["recovered"]["cached"] == 144


@pytest.mark.parametrize("what", ["loader_bug", "scheduler_bug", "after_bug"])
def test_a_bug_in_the_shim_costs_protection_not_answers(load: dict[str, Any], what: str) -> None:
    """Tokens that were promised but never loaded are computed; the engine lives."""
    assert load[what]["equal"]
    assert load["exporter_broken"]

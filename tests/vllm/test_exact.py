"""Continued answers inside real vLLM: they equal the whole ones, or it shows that they are none."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(150)]


@pytest.fixture
def run(exact_run: dict[str, Any]) -> dict[str, Any]:
    """See exact_run.py."""
    return exact_run


@pytest.fixture
def tight(exact_tight_run: dict[str, Any]) -> dict[str, Any]:
    """See exact_tight_run.py."""
    return exact_tight_run


@pytest.fixture
def kv(exact_kv_run: dict[str, Any]) -> dict[str, Any]:
    """See exact_kv_run.py."""
    return exact_kv_run


def test_continued_answers_are_the_whole_ones(run: dict[str, Any]) -> None:
    """Greedy, seeded, penalised, with log probabilities: after the first token, at a block's boundary, inside
    one and before the last token, in one batch with fresh requests."""
    assert len(run["plain"]) == 10
    for name, places in run["plain"].items():
        assert places == {"1": [], "14": [], "20": [], "39": []}, name


def test_answers_that_end_near_the_seam_end_as_they_would(run: dict[str, Any]) -> None:
    """A stop string with its first half delivered, a stop token next, the earliest end that is allowed, a
    forbidden word with its first token delivered."""
    assert set(run["ends"]) == {
        "stop_string",
        "stop_string_included",
        "stop_token",
        "min_tokens",
        "bad_words",
    }
    for name, places in run["ends"].items():
        assert places and not any(places.values()), (name, places)


def test_structured_answers_go_on_inside_their_structure(run: dict[str, Any]) -> None:
    """JSON schema, regular expression and grammar, down to the point where only the end is left."""
    cases = {name: case for name, case in run["structured"].items() if name != "rejected"}
    assert len(cases) == 6
    for name, case in cases.items():
        assert case["finish"] == "stop" and len(case["places"]) >= 3, name
        assert not any(case["places"].values()), (name, case)


def test_ids_that_the_structure_does_not_allow_are_not_continued(run: dict[str, Any]) -> None:
    """They would make a grammar that is wrong from there on."""
    assert run["structured"]["rejected"]["finish"] == "error"
    assert run["structured"]["rejected"]["ids"] == []


def test_each_choice_is_continued_on_its_own(run: dict[str, Any]) -> None:
    """One over by length, one by a stop string, one by a stop token, one still going or not begun."""
    choices = run["choices"]
    assert choices["finish"] == [
        ["length", "NoneType"],
        ["stop", "str"],
        ["stop", "int"],
        ["length", "NoneType"],
    ]
    for name in ("at_once", "one_by_one", "not_begun"):
        assert choices[name] == [[], [], [], []], name
    assert choices["unseeded"] == [True, True, True]


def test_what_cannot_be_right_is_an_error(run: dict[str, Any]) -> None:
    """Whatever the parameters are, nothing is made up and the engine lives."""
    assert len(run["wrong"]) == 15
    for name, answer in run["wrong"].items():
        assert (answer["finish"], answer["ids"]) == ("error", []), name


def test_aborted_requests_leave_nothing_behind(run: dict[str, Any]) -> None:
    """Neither in the front end nor in the scheduler."""
    assert run["left_behind"] == {"front_end": 0, "scheduler": 0}


def test_bugs_of_the_shim_do_not_make_up_a_continuation(run: dict[str, Any]) -> None:
    """The delivered ids are not said again, and the engine serves everybody as before."""
    bugs = run["bugs"]
    beginning = bugs["beginning"]
    for name in ("front_end", "scheduler"):
        assert bugs[name]["ids"][:3] != [beginning[0], 77, 78], name
    assert bugs["front_end_after"] == [beginning[0], 77, 78]
    assert bugs["scheduler_after"]["ids"] == beginning and bugs["whole"]


def test_seeded_prompts_that_take_several_steps_do_not_kill_the_engine(tight: dict[str, Any]) -> None:
    """Plain vLLM 0.32 dies of them on a CPU; draws in vain are taken back, with and without Segue."""
    assert len(tight["chunks"]) == 5
    assert tight["chunks"].pop("together") == [[], [], [], []]
    assert not any(tight["chunks"].values()), tight["chunks"]


def test_a_prefix_cache_that_holds_what_was_delivered_is_used(tight: dict[str, Any]) -> None:
    """More tokens than the prompt has: vLLM would not expect it, and no more than the prompt are reported."""
    assert len(tight["prefix_hits"]) == 6
    for name, case in tight["prefix_hits"].items():
        assert case == {"different": [], "cached": 40 if name.endswith("60") else 32}, name


def test_log_probabilities_of_a_prompt_do_not_kill_the_engine(tight: dict[str, Any]) -> None:
    """vLLM asserts that they come with a token. Where they could come before one, the request is refused."""
    assert tight["prompt_logprobs"]["several steps"] == ["error", ["ids", "text", "finish"]]
    assert tight["prompt_logprobs"]["one step"] == ["length", []]


def test_continued_answers_survive_preemption(tight: dict[str, Any]) -> None:
    """They are computed anew and are not given their output twice."""
    assert tight["preemptions"]["preempted"] >= 1
    assert not any(tight["preemptions"]["different"])


def test_the_daemon_is_told_what_can_be_continued(kv: dict[str, Any]) -> None:
    """By the self-test, in the registration."""
    assert kv["registered"] == [["output", "seed", "grammar"], ""]


@pytest.mark.parametrize("setting", ["greedy", "seeded"])
def test_continued_answers_use_a_replica_of_prompt_and_output(kv: dict[str, Any], setting: str) -> None:
    """All but one token is loaded, or as much as there is."""
    assert kv[setting]["loaded"] == {"different": [[]], "loaded": [144], "cached": 100}
    assert kv[setting]["partly"] == {"different": [[]], "loaded": [70], "cached": 70}


@pytest.mark.parametrize("setting", ["greedy", "seeded"])
def test_a_replica_that_does_not_come_changes_nothing(kv: dict[str, Any], setting: str) -> None:
    """The step without it has drawn random numbers in vain."""
    assert kv[setting]["failed"]["different"] == [[]]
    assert kv[setting]["failed"]["loaded"] == [0]
    assert kv[setting]["failed together"]["different"] == [[], [], []]

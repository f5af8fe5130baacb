"""A real vLLM engine of two ranks: what both have is loaded, each its own part, or nothing at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"world_size": 2}, 'write {rank} into `socket`, for example "/run/segue/a-{rank}.sock"'),
        ({"world_size": 2, "pipeline_parallel_size": 2}, "pipeline"),
        ({"world_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"data_parallel_size": 2}, "2 data-parallel engines"),
    ],
    ids=["one socket", "pipeline", "context", "data"],
)
def test_ranks_that_cannot_be_protected_are_refused_with_the_way_out(
    parallel: dict[str, int], says: str
) -> None:
    """The engine runs on, unprotected, and its log says what to do."""
    from segue_shim.vllm_compat import refusal

    alone = {"world_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1}
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**(alone | parallel)))
    assert says in refusal(config, None, "/run/segue/a.sock")


@pytest.fixture
def group(group_run: dict[str, Any]) -> dict[str, Any]:
    """See group_run.py."""
    return group_run


SETTINGS = ["greedy", "seeded"]


def test_each_rank_registers_with_its_own_daemon(group: dict[str, Any]) -> None:
    """As one engine in one life; and what they can continue exactly is tried out at each."""
    assert group["ranks"] == [[0, 2], [1, 2]] and group["alike"]
    assert group["exact"] == [["output", "seed", "grammar"]] * 2
    assert group["problems"] == [[], []]


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_rank_loads_its_own_part(group: dict[str, Any], setting: str) -> None:
    """All but one token of prompt and output, or as much as the rank with the least has; the answer is the
    same to the last token."""
    found = group[setting]
    assert found["parts differ"]
    assert (found["loaded"]["different"], found["loaded"]["cached"]) == ([[]], 100)
    assert found["loaded"]["loaded"] == [[144], [144]]
    assert (found["least"]["different"], found["least"]["loaded"]) == ([[]], [[70], [70]])


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_one_rank_cannot_load_is_computed_at_all(group: dict[str, Any], setting: str) -> None:
    """The step was in vain for all ranks: no rank claims what it computed there, and each draws its random
    numbers again."""
    failed = group[setting]["failed at rank 1"]
    assert failed["different"] == [[], []]
    assert failed["loaded"] == [[144, 144], [0, 0]]
    assert failed["claimed"][0] == [0, 0], "before both ranks know"
    assert failed["claimed"][1] == [64, 64], "the first tokens that were computed instead"


def test_without_one_ranks_answer_nothing_is_loaded(group: dict[str, Any]) -> None:
    """The other rank's lease is given back unused."""
    silent = group["rank 1 silent"]
    assert (silent["different"], silent["cached"]) == ([[]], 0)
    assert silent["loaded"] == [[0], []]

"""The pure parts of `seguectl bench chaos`: which faults come, what is counted, what has leaked."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import pytest

from segue_core.messages.status import Move, RequestStory
from segue_ctl.chaos.census import grown, high_water_bytes, open_files, total, words
from segue_ctl.chaos.figures import Figures, render
from segue_ctl.chaos.plan import ROUGH, WEIGHTS, Fault, allowed, proposals
from segue_ctl.chaos.reference import continuation, text_of
from segue_ctl.chaos.storm import toy_asks
from segue_ctl.chaos.tally import Stream, Tally, percentile
from segue_ctl.openai_stream import Answer

ENGINES = ["a", "b", "c", "d"]
EXPECTED = continuation([1, 2, 3], 40)


def test_a_seed_says_it_all() -> None:
    """The same seed proposes the same faults and asks the same questions; another one others."""
    first, again, other = (list(islice(proposals(seed, ENGINES, wired=["a"]), 50)) for seed in (1, 1, 2))
    assert first == again != other
    bodies = [[ask.body for ask in islice(toy_asks(seed), 20)] for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1] != bodies[2]


def test_every_kind_of_fault_comes_and_reaches_only_what_has_a_wire() -> None:
    """Two daemons in a fault of their link, a wired engine where a wire of the router is harmed."""
    seen = list(islice(proposals(3, ENGINES, wired=["a", "c"]), 2_000))
    assert {fault.kind for fault in seen} == set(WEIGHTS)
    for fault in seen:
        who, _, what = fault.kind.partition("_")
        if who == "peer":
            one, _, other = fault.target.partition(">")
            assert {one, other} <= set(ENGINES) and one != other
        elif who == "watch" or (who == "engine" and what in ("cut", "hole")):
            assert fault.target in ("a", "c")
    without: dict[Any, int] = {kind: 1 for kind in WEIGHTS if kind != "engine_kill"}
    weather = replace(ROUGH, weights=without)
    some = islice(proposals(3, ENGINES, wired=["a"], weather=weather), 500)
    assert "engine_kill" not in {fault.kind for fault in some}


def test_enough_is_always_left_to_stand_on() -> None:
    """However faults begin and end: two engines are untouched, and nothing has two faults at once."""
    chance = random.Random(5)
    active: list[Fault] = []
    for fault in islice(proposals(5, ENGINES, wired=["a", "c"]), 3_000):
        if active and chance.random() < 0.4:
            active.pop(chance.randrange(len(active)))
        if not allowed(fault, active, len(ENGINES)):
            continue
        active.append(fault)
        assert len({f.target for f in active if f.of_engine}) <= len(ENGINES) - 2
        assert len({f.harms for f in active}) == len(active)
    assert len(active) > 1


def stream(ids: list[int], *, error: str = "", moves: tuple[Move, ...] = (), **changes: Any) -> Stream:
    """One that brought `ids`, a token a millisecond."""
    answer = Answer(text=text_of(ids), token_ids=ids, prompt_tokens=3, completion_tokens=40)
    answer.token_at_ns = [1_000_000 * number for number in range(len(ids))]
    answer.finish_reason = "" if error else "length"
    for name, value in changes.items():
        setattr(answer, name, value)
    story = RequestStory("s", "/v1/completions", "ok", ("a",), 3, len(ids), moves)
    return Stream(1, 3, EXPECTED, text_of(EXPECTED), answer, error, story)


def tallied(one: Stream) -> Tally:
    tally = Tally()
    problem = tally.add(one)
    assert bool(problem) == bool(tally.unequal or tally.failed) == bool(tally.examples)
    return tally


def test_a_right_answer_counts_nothing_but_itself() -> None:
    """Also one that moved: its move, its gap and what was computed again are counted."""
    move = Move(
        "a",
        "b",
        "daemon_dead",
        0,
        1.0,
        watermark=10,
        how="exact",
        delivered_tokens=12,
        dropped_tokens=0,
        decide_ms=1,
    )
    tally = tallied(stream(EXPECTED, moves=(move, msgspec.structs.replace(move, to="c"))))
    assert (tally.lost, tally.repeated, tally.unequal, tally.failed) == (0, 0, 0, 0)
    assert (tally.failovers, tally.moved_streams, tally.gaps_ms) == (2, 1, [1.0])
    assert tally.recomputed == 2 * (3 + 12 - 10)


@pytest.mark.parametrize(
    ("ids", "lost", "repeated"),
    [
        (EXPECTED[:20] + EXPECTED[21:], 1, 0),
        (EXPECTED[:20] + EXPECTED[17:], 0, 3),
        (EXPECTED[:-2], 2, 0),
        (EXPECTED[:20] + [0] * 20, 0, 0),
    ],
)
def test_a_wrong_answer_is_found(ids: list[int], lost: int, repeated: int) -> None:
    """A token that is skipped, tokens that are said twice, an end that is missing, other tokens."""
    tally = tallied(stream(ids))
    assert (tally.lost, tally.repeated, tally.unequal) == (lost, repeated, 1)


@pytest.mark.parametrize(
    "changes",
    [{"text": "other"}, {"finish_reason": "abort"}, {"completion_tokens": 39}, {"prompt_tokens": 4}],
)
def test_right_tokens_with_a_wrong_end_are_not_equal(changes: dict[str, Any]) -> None:
    """Text, finish and usage belong to the answer."""
    assert tallied(stream(EXPECTED, **changes)).unequal == 1


def test_what_a_failed_stream_brought_must_be_right() -> None:
    """An error is a failed stream; the rest of it is not lost, but a wrong beginning is found as well."""
    tally = tallied(stream(EXPECTED[:9], error="error event: no engine"))
    assert (tally.failed, tally.lost, tally.unequal) == (1, 0, 0)
    assert tallied(stream([5, *EXPECTED[1:9]], error="broke")).unequal == 1


def test_growth_of_one_kind_is_not_hidden_by_another() -> None:
    """One descriptor more of a kind is a leak although others were closed, or another process has fewer."""
    before = {"router": Counter(socket=9, pipe=2), "daemon-a": Counter(socket=5)}
    after = {"router": Counter(socket=4, pipe=3), "daemon-a": Counter(socket=4), "engine-a": Counter(file=1)}
    more = grown(before, after)
    assert total(more) == 2
    assert words(more) == "engine-a: 1 file; router: 1 pipe"
    assert not grown(before, before)


def test_open_files_are_counted_by_kind() -> None:
    """A memfd of this process appears under its name, and is gone once it is closed."""
    before = open_files(os.getpid())
    memory = os.memfd_create("segue-census")
    try:
        assert open_files(os.getpid()) - before == Counter({"memfd:segue-census": 1})
    finally:
        os.close(memory)
    assert not open_files(os.getpid())["memfd:segue-census"]
    assert high_water_bytes(os.getpid()) > 1 << 20
    assert (open_files(1 << 30), high_water_bytes(1 << 30)) == (Counter(), 0)


MUST_BE_ZERO = (
    "lost_tokens",
    "repeated_tokens",
    "unequal_streams",
    "failed_streams",
    "leaked_replicas",
    "leaked_fds",
)
FREE = ("failovers", "streams", "gap_ms_p50", "gap_ms_p99", "gap_ms_max")


def test_every_figure_that_must_be_zero_decides() -> None:
    """A run is clean only if nothing is lost, wrong or left, and it came as far as it was asked to."""
    figures = msgspec.convert(dict.fromkeys(FREE, 7) | dict.fromkeys(MUST_BE_ZERO, 0), Figures)
    assert figures.clean
    for name in MUST_BE_ZERO:
        assert not msgspec.structs.replace(figures, **{name: 1}).clean
    assert not msgspec.structs.replace(figures, left_behind=("x",)).clean
    assert not msgspec.structs.replace(figures, reached=False).clean
    assert "tokens lost" in render(figures)


def test_percentiles() -> None:
    """Of nothing 0, of one that one."""
    assert (percentile([], 0.5), percentile([3.0], 0.99)) == (0.0, 3.0)
    assert percentile([float(number) for number in range(100)], 0.99) == 99.0

"""The benchmarks' arithmetic: what is paired with what, and where failures are placed."""

from __future__ import annotations

from segue_ctl.bench_overhead import render, summarize
from segue_ctl.bench_seam import BLOCK_SIZE, places
from segue_ctl.openai_stream import Answer


def answer(ttft_ms: int, itl_ms: int, ids: int = 4) -> Answer:
    """An answer with equal waits between its tokens."""
    made = Answer(headers={}, started_ns=0)
    made.token_ids = list(range(ids))
    made.token_at_ns = [(ttft_ms + i * itl_ms) * 1_000_000 for i in range(ids)]
    return made


def test_differences_are_taken_pair_by_pair() -> None:
    """A machine that slows down in between hits both sides of each pair alike."""
    plain = [answer(100, 10), answer(200, 20)]
    unprotected = [answer(102, 11), answer(202, 21)]
    guarded = [answer(105, 13), answer(205, 23)]
    result = summarize(plain, unprotected, guarded)
    assert (result.paired_ttft_ms, result.paired_itl_ms) == (5, 3)
    assert (result.protection_ttft_ms, result.protection_itl_ms) == (3, 2)
    assert result.equal_answers
    assert "+2.000" in render(result)


def test_different_answers_are_said() -> None:
    """Speed is worth nothing if the answers are not the same."""
    result = summarize([answer(1, 1)], [answer(1, 1)], [answer(1, 1, ids=5)])
    assert not result.equal_answers
    assert "differ" in render(result)


def test_failures_are_placed_at_the_edges_first() -> None:
    """The first and the last token and every block boundary, whatever the number of runs; none twice."""
    found = places(prompt_tokens=454, max_tokens=80, runs=20)
    after = [k for _, k in found]
    assert len(after) == len(set(after)) == 20
    assert after[0] == 1 and after[-1] == 79
    boundaries = [k for name, k in found if name == "block boundary"]
    assert boundaries == [27, 59]
    assert all((454 + k - 1) % BLOCK_SIZE == 0 for k in boundaries)

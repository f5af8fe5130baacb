"""The verdict about a seam: lost, repeated, or merely different."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue_ctl.seam import compare

IDS = list(range(100, 180))


def test_an_equal_answer_has_lost_and_repeated_nothing() -> None:
    """The good case."""
    verdict = compare(IDS, IDS, reported=80, asked=80)
    assert (verdict.equal, verdict.lost, verdict.repeated, verdict.diverged_at) == (True, 0, 0, -1)


@given(at=st.integers(1, 60), count=st.integers(1, 10))
def test_repeated_tokens_are_counted_even_if_the_length_is_right(at: int, count: int) -> None:
    """A seam that says tokens twice is found, although the answer then stops at the asked length."""
    received = (IDS[:at] + IDS[max(0, at - count) : at] + IDS[at:])[: len(IDS)]
    verdict = compare(IDS, received, reported=len(received), asked=len(received))
    assert verdict.repeated == min(count, at) and not verdict.equal


@given(at=st.integers(1, 60), count=st.integers(1, 10))
def test_lost_tokens_are_counted_even_if_the_length_is_right(at: int, count: int) -> None:
    """A seam that skips tokens is found, although the engine went on to the asked length."""
    longer = IDS + list(range(500, 500 + count))
    received = longer[:at] + longer[at + count :]
    verdict = compare(IDS, received, reported=80, asked=80)
    assert verdict.lost == count and not verdict.equal


def test_a_different_continuation_is_neither_lost_nor_repeated() -> None:
    """Recomputed KV may change last bits and with them the words; that is reported as such."""
    received = IDS[:30] + list(range(900, 950))
    verdict = compare(IDS, received, reported=80, asked=80)
    assert (verdict.lost, verdict.repeated, verdict.diverged_at) == (0, 0, 30)


def test_the_count_must_agree_with_usage() -> None:
    """Fewer tokens than the usage says were lost on the way."""
    assert compare(IDS[:50], IDS[:50], reported=52, asked=None).lost == 2
    assert compare(IDS[:50], IDS[:50], reported=49, asked=None).repeated == 1


def test_a_cut_answer_is_not_equal() -> None:
    """A prefix of the reference is not the reference."""
    verdict = compare(IDS, IDS[:40], reported=80, asked=80)
    assert not verdict.equal and verdict.lost == 40 and verdict.diverged_at == 40

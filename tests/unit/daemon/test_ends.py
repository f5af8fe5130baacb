"""What a peer must hear of sequences that are over."""

from __future__ import annotations

import pytest

from segue_core.messages.peer import End
from segue_daemon import ends as ends_module
from segue_daemon.ends import Ends

S, T, U = (End(seq, 1, 7) for seq in "stu")


def said_after(ends: Ends, number: int) -> list[End]:
    """All that is to be said, after `number` deltas."""
    found = []
    while ends:
        found.append(ends.say(number))
    return found


def test_what_was_not_heard_is_said_again_in_its_order() -> None:
    """A peer frees what is over although the link broke; what ended twice is not lost with the first."""
    ends = Ends()
    for end, number in ((S, 0), (T, 3), (S, 5)):
        ends.add(end)
        assert said_after(ends, number) == [end]
    ends.heard(5)
    ends.add(U)
    ends.again()
    assert said_after(ends, 0) == [S, U]
    ends.heard(1)
    ends.again()
    assert not ends


def test_what_began_anew_and_what_another_life_never_held_is_not_ended() -> None:
    """A sequence that came back to a peer would be dropped there by its own old end."""
    ends = Ends()
    for end in (S, T):
        ends.add(end)
    said_after(ends, 0)
    ends.begun({"s"})
    ends.again()
    assert said_after(ends, 0) == [T]
    ends.add(U)
    ends.clear()
    ends.again()
    assert not ends


def test_a_peer_that_stays_away_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends meanwhile."""
    monkeypatch.setattr(ends_module, "MAX_PENDING_ENDS", 2)
    ends = Ends()
    for _ in range(2):
        for end in (S, T, U):
            ends.add(end)
        assert said_after(ends, 0) == [S, T]
    for end in (U, S, T):
        ends.add(end)
    said_after(ends, 0)
    assert len(ends.said) == 2

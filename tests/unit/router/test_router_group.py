"""What the daemons of an engine's ranks say together: a token counts only if every rank has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from segue_core.messages.status import EngineStatus, Promoted, SequenceStatus
from segue_router.group import Heard, engine_of, promoted_of, sequence_of


def heard(state: str = "running", incarnation: int = 1, *, fresh: bool = True, **more: Any) -> Heard:
    told = {"fingerprint": "fp", "exact": ("output", "seed"), "running": 1} | more
    return Heard(EngineStatus("e", state, incarnation, **told), fresh)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    ranks: tuple[Heard, ...]
    state: str
    incarnation: int


CASES = {
    "all run": Case((heard(), heard()), "running", 1),
    "one died": Case((heard(), heard("dead")), "dead", 1),
    "one died, the other's daemon is silent": Case((heard(fresh=False), heard("dead")), "dead", 1),
    "all died": Case((heard("dead"), heard("dead")), "dead", 1),
    "one stands still": Case((heard(), heard("stalled")), "stalled", 1),
    "one daemon is silent": Case((heard(), heard(fresh=False)), "absent", 1),
    "one daemon was never heard": Case((Heard(), heard()), "absent", 1),
    "one has not registered": Case((heard(), heard("absent", 0)), "absent", 1),
    "one remembers the life before": Case((heard(incarnation=2), heard("dead", 1)), "absent", 2),
    "two lives": Case((heard(incarnation=1), heard(incarnation=2)), "absent", 0),
    "two lives, one of which died": Case(
        (heard(incarnation=1), heard(incarnation=2), heard("dead")), "absent", 0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_runs_if_all_ranks_do_and_is_dead_if_one_is(name: str) -> None:
    """One dead rank is a dead engine at once; one that is missing leaves an engine without protection; one
    that only remembers an earlier life does not bring the new one down."""
    case = CASES[name]
    for ranks in (case.ranks, case.ranks[::-1]):
        engine = engine_of(ranks)
        assert engine is not None and (engine.state, engine.incarnation) == (case.state, case.incarnation)
        assert bool(engine.detail) == (case.state != "running")


def test_what_the_engine_can_do_is_what_all_ranks_can() -> None:
    """And its KV can be exchanged only where each rank's can."""
    assert engine_of([Heard(), Heard()]) is None
    engine = engine_of([heard(exact=("output", "seed", "grammar")), heard(fingerprint="fq", running=2)])
    assert engine is not None and engine.exact == ("output", "seed")
    assert (engine.fingerprint, engine.running) == ("fp+fq", 2)
    half = engine_of([heard(), Heard()])
    assert half is not None and half.exact == () and half.fingerprint == ""
    silent = engine_of([heard(), heard(fresh=False)])
    assert silent is not None and silent.exact, "its shim is there, whatever its daemon does"


def held(tokens: int, role: str = "replica", epoch: int = 1, **peers: int) -> SequenceStatus:
    return SequenceStatus("s", role, epoch, tokens, tokens, tokens, 100, peers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "watermark"),
    [
        ((held(20), held(30)), 20),
        ((held(20), None), 0),
        ((held(20), held(20, epoch=2)), 0),
        ((held(20), held(20, "owner")), 0),
        ((held(20), held(20, "fenced")), 0),
        ((held(20), held(16, "cached")), 16),
        ((held(20, "owner", b=20, c=0), held(30, "owner", b=0, c=30)), 0),
        ((held(20, "owner", b=20, c=9), held(25, "owner", b=15, c=25)), 15),
    ],
    ids=["least", "missing", "fenced higher", "written at one", "fenced at one", "cached", "apart", "owner"],
)
def test_what_can_be_restored_is_what_every_rank_holds(
    ranks: tuple[SequenceStatus | None, ...], watermark: int
) -> None:
    """The least of them; nothing if one has none, or has it of another writer, or two peers have halves."""
    for each in (ranks, ranks[::-1]):
        found = sequence_of(each, whole=True)
        assert found is not None and found.watermark == watermark
        assert found.epoch == max(rank.epoch for rank in ranks if rank)


def test_an_engine_that_is_not_whole_restores_nothing() -> None:
    """Its ranks are of different lives, or one is not there: none of them could load."""
    found = sequence_of([held(20), held(20)], whole=False)
    assert found is not None and found.watermark == 0
    own = sequence_of([held(20, "owner"), held(22, "owner")], whole=False)
    assert own is not None and own.known == 20, "but how far its answers are is known"
    assert sequence_of([None, None], whole=True) is None


def test_a_promotion_is_worth_what_the_weakest_rank_has() -> None:
    """And nothing if one rank did not answer: its writer was not fenced there."""
    promoted = [Promoted("s", 2, 20), Promoted("s", 2, 12)]
    assert promoted_of(promoted, whole=True) == Promoted("s", 2, 12)
    assert promoted_of(promoted, whole=False) == Promoted("s", 2, 0)
    assert promoted_of([promoted[0], None], whole=True) is None

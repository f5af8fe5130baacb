"""Asking the daemons of all ranks: what every rank holds, in one wait, or nothing."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue_core.messages.local import Match, Matched
from segue_shim.match_client import MatchClient
from segue_shim.match_group import GroupMatch, MatchGroup
from support.daemon_stub import DaemonStub, wait_until
from support.kv_pages import FAST

pytestmark = pytest.mark.timeout(30)

BLOCK = 4
OPTIONS = dataclasses.replace(FAST, match_timeout_ms=400)
Stubs = tuple[DaemonStub, DaemonStub]


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    """The daemons of two ranks."""
    made = (
        DaemonStub(str(tmp_path / "0.sock"), incarnation=70),
        DaemonStub(str(tmp_path / "1.sock"), incarnation=71),
    )
    yield made
    for stub in made:
        if Path(stub.path).exists():
            stub.kill()


@pytest.fixture
def group(stubs: Stubs) -> Iterator[MatchGroup]:
    """The scheduler's side."""
    clients = [
        MatchClient(
            stub.path,
            engine="a",
            incarnation=5,
            fingerprint=b"f" * 16,
            block_size=BLOCK,
            rank=rank,
            ranks=2,
            options=OPTIONS,
        )
        for rank, stub in enumerate(stubs)
    ]
    made = MatchGroup(clients, BLOCK, OPTIONS)
    yield made
    made.close()


def ask(group: MatchGroup, computed: int = 0) -> GroupMatch | None:
    return group.match(seq="s", epoch=2, salt=b"", token_ids=bytes(80), computed=computed, limit=19)


def held(match: Match, tokens: int, first: int = 0) -> Matched:
    """Block number n lies at 1000 * (rank + 1) + n."""
    at = 1000 * (match.rank + 1)
    extents = array("Q", range(at + first, at - (-tokens // BLOCK))).tobytes()
    return Matched(match.request, tokens, first, extents, 9 + match.rank, (1 << 62) - match.rank)


def test_what_the_rank_with_the_least_holds_is_held(group: MatchGroup, stubs: Stubs) -> None:
    """Each rank's own places, cut to the same blocks; both leases go back to whose they are."""
    stubs[0].answer = lambda match: held(match, 19)
    stubs[1].answer = lambda match: held(match, 9, first=1)
    found = ask(group, computed=4)
    assert found is not None and (found.tokens, found.first_block) == (9, 1)
    assert found.deadline_ns == (1 << 62) - 1, "the earlier of them"
    assert [source.extents for source in found.sources] == [(1001, 1002), (2001, 2002)]
    assert [source.extents for source in found.blocks(2, 3)] == [(1002,), (2002,)]
    assert [source.daemon for source in found.sources] == [70, 71]
    assert [(match.rank, match.ranks) for stub in stubs for match in stub.matches] == [(0, 2), (1, 2)]
    group.drop(found)
    wait_until(lambda: [[release.lease for release in stub.releases] for stub in stubs] == [[9], [10]])


def test_ranks_are_asked_at_the_same_time(group: MatchGroup, stubs: Stubs) -> None:
    """The first answers only once the second has been asked: one wait, whatever the number of ranks."""
    stubs[0].answer = lambda match: wait_until(lambda: stubs[1].matches) and held(match, 19)
    stubs[1].answer = lambda match: held(match, 19)
    assert ask(group) is not None


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["silent", "absent", "nothing held"])
def test_without_one_ranks_answer_nothing_is_held(
    group: MatchGroup, stubs: Stubs, rank: int, how: str
) -> None:
    """The lease of the other is given back at once."""
    stubs[1 - rank].answer = lambda match: held(match, 19)
    if how == "nothing held":
        stubs[rank].answer = lambda match: Matched(match.request, 0, 0, b"", 0, 0)
    if how == "absent":
        stubs[rank].kill()
    assert ask(group) is None
    if how != "absent" or rank == 1:  # with the first one absent, nobody else is asked
        wait_until(lambda: [release.loaded for release in stubs[1 - rank].releases] == [0])


def test_while_one_rank_is_known_to_be_silent_no_other_is_troubled(group: MatchGroup, stubs: Stubs) -> None:
    """Until its pause is over."""
    stubs[0].answer = lambda match: held(match, 19)
    assert ask(group) is None
    asked = len(stubs[0].matches)
    assert ask(group) is None and len(stubs[0].matches) == asked

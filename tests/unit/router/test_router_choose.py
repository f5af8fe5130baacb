"""Which engine: availability before affinity, affinity before load, cost when resuming."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from segue_router.choose import Candidate, affinity_key, rank_for_resume, rank_new
from segue_router.request import parse_request

NAMES = ["a", "b", "c", "d"]


@given(st.text(min_size=1, max_size=20), st.integers(0, 3))
def test_only_the_sessions_of_a_lost_engine_move(key: str, lost: int) -> None:
    """Rendezvous hashing: taking an engine away changes nothing for others' sessions."""
    before = rank_new([Candidate(name) for name in NAMES], key)
    after = rank_new([Candidate(name) for name in NAMES if name != NAMES[lost]], key)
    assert after == [name for name in before if name != NAMES[lost]]


def test_sessions_spread() -> None:
    """Many sessions use all engines."""
    first = {rank_new([Candidate(name) for name in NAMES], f"session {i}")[0] for i in range(100)}
    assert first == set(NAMES)


def test_availability_comes_before_affinity() -> None:
    """A session's engine that is not up is not used while another is."""
    key = "mine"
    home = rank_new([Candidate(name) for name in NAMES], key)[0]
    for state in ("suspect", "down"):
        ranked = rank_new([Candidate(n, state if n == home else "up") for n in NAMES], key)
        assert home not in ranked
    assert rank_new([Candidate(n, "down") for n in NAMES], key)[0] == home, "all down: still tried"
    assert rank_new([], key) == []


def test_an_overloaded_home_is_left() -> None:
    """Affinity yields when the home has far more to do than the least loaded engine."""
    key = "mine"
    home = rank_new([Candidate(name) for name in NAMES], key)[0]
    assert rank_new([Candidate(n, active=4 if n == home else 0) for n in NAMES], key)[0] == home
    ranked = rank_new([Candidate(n, active=5 if n == home else 0) for n in NAMES], key)
    assert ranked[0] != home
    assert ranked[-1] == home


def test_without_a_key_the_least_loaded_is_first() -> None:
    """No affinity at all."""
    assert rank_new([Candidate("a", active=3), Candidate("b", active=1)], "") == ["b", "a"]


def test_the_freshest_replica_wins() -> None:
    """Tokens to recompute dominate."""
    candidates = [
        Candidate("a", fingerprint="f", watermark=100),
        Candidate("b", fingerprint="f", watermark=900),
        Candidate("c"),
    ]
    assert rank_for_resume(candidates, tokens=1000, fingerprint="f") == ["b", "a", "c"]


def test_a_replica_of_another_fingerprint_is_worth_nothing() -> None:
    """Its bytes cannot be loaded."""
    candidates = [Candidate("a", fingerprint="other", watermark=900), Candidate("b", fingerprint="f")]
    assert rank_for_resume(candidates, tokens=1000, fingerprint="f") == ["a", "b"]
    busy = [Candidate("a", fingerprint="other", watermark=900, active=1), Candidate("b", fingerprint="f")]
    assert rank_for_resume(busy, tokens=1000, fingerprint="f") == ["b", "a"]
    assert rank_for_resume(busy, tokens=1000, fingerprint="") == ["b", "a"]


def test_load_and_queue_cost_too() -> None:
    """A few tokens more to recompute beat a long queue, and bytes that take longer to load than that."""
    queue = [
        Candidate("a", fingerprint="f", watermark=1000, active=20),
        Candidate("b", fingerprint="f", watermark=900),
    ]
    assert rank_for_resume(queue, tokens=1000, fingerprint="f") == ["b", "a"]
    heavy = [
        Candidate("a", fingerprint="f", watermark=1000, replica_bytes=10**12),
        Candidate("b", fingerprint="f", watermark=500),
    ]
    assert rank_for_resume(heavy, tokens=1000, fingerprint="f") == ["b", "a"]


def test_any_bytes_name_a_session() -> None:
    """Headers that are not UTF-8 arrive as surrogates."""
    assert sorted(rank_new([Candidate(name) for name in NAMES], "session:caf\udce9")) == NAMES


def test_what_names_the_session() -> None:
    """Header, then user, then how the prompt begins; a longer chat keeps its key."""

    def of(body: dict[str, object], session: str | None = None, chars: int = 10) -> str:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return affinity_key(parse_request(path, json.dumps(body).encode()), session, chars)

    assert of({"prompt": "p", "user": "u"}, "s") == "session:s"
    assert of({"prompt": "p", "user": "u"}) == "user:u"
    assert of({"prompt": "0123456789abc"}) == of({"prompt": "0123456789xyz"}) == "prefix:0123456789"
    assert of({"prompt": ["0123456789abc"]}) == "prefix:0123456789"
    assert of({"prompt": [1, 2, 3, 4]}) == of({"prompt": [1, 2, 9]})
    first = {"role": "system", "content": "a long system prompt"}
    more = {"role": "user", "content": "and more"}
    assert of({"messages": [first]}) == of({"messages": [first, more]})
    assert of({"prompt": "p"}, chars=0) == ""

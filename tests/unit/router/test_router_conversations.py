"""Under which name a conversation is found again, and where its next turn goes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from segue_router.choose import Candidate, affinity_key, at_writer, home_of, rank_for_turn, worth_asking
from segue_router.conversations import LOOK_BACK, Conversations, Last, continues, names_of
from segue_router.errors import ClientError
from segue_router.request import GenerationRequest, parse_request, replication_of

NAMES = ("a", "b", "c")
TOKENS = 1_000
HOME = home_of(NAMES, "key")
AWAY, OTHER = (name for name in NAMES if name != HOME)


def chat(*messages: tuple[str, Any], **more: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]} | more
    return parse_request("/v1/chat/completions", json.dumps(body).encode())


def key_of(request: GenerationRequest, session: str | None = None) -> str:
    return affinity_key(request, session, 1_024)


FIRST = (("system", "be brief"), ("user", "what is a lighthouse?"))
SECOND = (*FIRST, ("assistant", "a tower"), ("user", "and a lightship?"))
THIRD = (*SECOND, ("assistant", "a ship"), ("tool", "42"), ("user", "and?"))


def test_a_turn_is_found_under_the_messages_of_the_turn_before() -> None:
    """Without any session header, whatever came in between; another conversation, or model, is another."""
    known = Conversations(10)
    first, second, third = (chat(*messages) for messages in (FIRST, SECOND, THIRD))
    last = Last("seq-1", "a", 1, 30, "fp")
    known.note(names_of(first, key_of(first))[0], last)
    assert known.find(names_of(second, key_of(second))) is last
    assert known.find(names_of(third, key_of(third))) is last
    newer = Last("seq-2", "b", 1, 60, "fp")
    known.note(names_of(second, key_of(second))[0], newer)
    assert known.find(names_of(third, key_of(third))) is newer
    for other in (
        chat(*FIRST[:1], ("user", "what is a buoy?")),
        chat(*FIRST, model="n"),
        chat(*FIRST, cache_salt="somebody else's"),
        chat(("user", "what is a lighthouse?")),
    ):
        assert known.find(names_of(other, key_of(other))) is None


def test_a_chat_keeps_its_affinity_from_the_first_turn_on() -> None:
    """However short it begins: what names it is there in the first turn already."""
    keys = {key_of(chat(*messages)) for messages in (FIRST, SECOND, THIRD)}
    assert len(keys) == 1


def test_the_clients_own_name_for_a_session_goes_before_what_was_said() -> None:
    """A client that shortens its history is still in the same session; without affinity there is none."""
    whole, cut = chat(*THIRD), chat(*THIRD[3:])
    assert names_of(whole, key_of(whole, "s")) == names_of(cut, key_of(cut, "s"))
    assert names_of(whole, "") == ()
    plain = parse_request("/v1/completions", json.dumps({"prompt": "p" * 2_000}).encode())
    longer = parse_request("/v1/completions", json.dumps({"prompt": "p" * 3_000}).encode())
    assert names_of(plain, key_of(plain)) == names_of(longer, key_of(longer))


def test_what_is_remembered_is_bounded() -> None:
    """In conversations, the one that was used longest ago goes first; and in messages looked back over."""
    known = Conversations(2)
    last = Last("s", "a", 1, 1, "")
    known.note(b"one", last)
    known.note(b"two", last)
    assert known.find([b"one"]) is last
    known.note(b"three", last)
    assert known.find([b"two"]) is None and known.find([b"one"]) is last and len(known) == 2
    long = chat(*(("user", str(n)) for n in range(500)))
    assert len(names_of(long, key_of(long))) == LOOK_BACK + 1
    plain = parse_request("/v1/completions", json.dumps({"prompt": "p", "user": "u" * 100_000}).encode())
    for key in (key_of(plain), key_of(long, "s" * 8_000)):
        assert max(map(len, names_of(plain, key))) <= 16, "a client's own name is kept as a digest"
    assert len(key_of(plain)) < 2_000


def test_only_a_request_with_an_answer_in_it_continues_something() -> None:
    """A first question is nobody's next turn."""
    assert continues(chat(*SECOND).body) and not continues(chat(*FIRST).body)
    assert not continues({"prompt": "p"}) and not continues({"messages": ["assistant"]})


def candidates(**changes: dict[str, Any]) -> list[Candidate]:
    return [Candidate(**({"name": name, "fingerprint": "fp"} | changes.get(name, {}))) for name in NAMES]


def ranked(found: list[Candidate], fingerprint: str = "fp", tokens: int = TOKENS) -> list[str]:
    return rank_for_turn(found, "key", tokens=tokens, fingerprint=fingerprint)


def test_nobody_is_asked_while_the_last_turn_is_where_the_next_one_goes_anyway() -> None:
    """Its home until that is overloaded; elsewhere while no engine has less to do."""
    assert at_writer(candidates(**{HOME: {"wrote": True, "active": 4}}), "key") == HOME
    assert at_writer(candidates(**{HOME: {"wrote": True, "active": 5}}), "key") is None
    assert at_writer(candidates(**{AWAY: {"wrote": True}}), "key") == AWAY
    assert at_writer(candidates(**{AWAY: {"wrote": True, "active": 1}}), "key") is None
    assert at_writer(candidates(**{AWAY: {"wrote": True, "state": "suspect"}}), "key") is None
    assert at_writer(candidates(), "key") is None


def test_only_those_are_asked_whose_answer_could_decide() -> None:
    """Who has no less to do than the engine with the last turn is no cheaper; alone, nobody is asked."""
    busy = candidates(**{HOME: {"wrote": True, "active": 7}, AWAY: {"active": 6}, OTHER: {"active": 7}})
    assert worth_asking(busy) == [AWAY]
    assert set(worth_asking(candidates())) == set(NAMES)
    gone = candidates(**{HOME: {"wrote": True, "state": "down"}, OTHER: {"active": 9}})
    assert set(worth_asking(gone)) == {AWAY, OTHER}
    assert worth_asking([Candidate(HOME)]) == [] and worth_asking([]) == []
    held = {"watermark": TOKENS, "replica_bytes": 0, "active": 7}
    assert ranked(candidates(**{HOME: {"wrote": True, "active": 7}, OTHER: held, AWAY: held}))[0] == HOME


def test_the_next_turn_goes_where_it_is_cheapest() -> None:
    """What would have to be computed, against the queue; nothing held: home, if it has no more to do."""
    held = {"watermark": TOKENS, "replica_bytes": TOKENS * 1_000}
    assert ranked(candidates(**{AWAY: held}))[0] == AWAY
    assert ranked(candidates(**{AWAY: held}), fingerprint="other")[0] == HOME
    assert ranked(candidates(**{AWAY: held | {"active": 4}, OTHER: {"wrote": True, "active": 1}}))[0] == OTHER
    assert ranked(candidates(**{AWAY: held, OTHER: {"wrote": True, "active": 1}}))[0] == AWAY
    assert ranked(candidates())[0] == HOME
    assert ranked(candidates(**{HOME: {"active": 1}}))[0] != HOME


def test_a_conversation_does_not_follow_its_kv_to_an_engine_that_is_overloaded() -> None:
    """There its turn would wait for everybody else's."""
    busy = {"wrote": True, "active": 5, "watermark": TOKENS}
    assert ranked(candidates(**{HOME: busy}), tokens=100_000)[-1] == HOME


@pytest.mark.parametrize("header", ["Off", " low ", "normal", "HIGH", None])
def test_a_clients_word_on_replication_is_taken(header: str | None) -> None:
    """In any case; none means normal."""
    assert replication_of(header) == (header or "normal").strip().lower()


@pytest.mark.parametrize("header", ["no", "0", "highest", "off, low"])
def test_any_other_word_is_refused_with_those_that_there_are(header: str) -> None:
    """A client that misspells `off` must not believe that its KV stays where it is."""
    with pytest.raises(ClientError, match="off, low, normal, high") as caught:
        replication_of(header)
    assert caught.value.status == 400

"""How to resume, as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from segue_core.messages.request import SegueParams
from segue_router.request import parse_request
from segue_router.resume import (
    ByIds,
    ChoiceProgress,
    Exact,
    Finish,
    Plan,
    Progress,
    Refuse,
    Restart,
    Target,
    how_to_resume,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TWO = (ChoiceProgress([4, 5], 2),)
ONE = (ChoiceProgress([2], 1),)
BEGUN = Progress(client_has=True, prompt_ids=[1, 2, 3], choices=TWO)
ROOM = Target(100)
PARAMS = SegueParams(seq="s", epoch=2, resume=True)


def plan(
    path: str,
    progress: Progress = BEGUN,
    target: Target = ROOM,
    **more: Any,
) -> Plan:
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 10}
    body |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    body |= more
    return how_to_resume(parse_request(path, json.dumps(body).encode()), progress, target, PARAMS)


REFUSED = [
    ("n", {"n": 2}),
    ("n", {"best_of": 3}),
    ("beam_search", {"use_beam_search": True}),
    ("echo", {"echo": True}),
    ("logprobs", {"prompt_logprobs": 1}),
    ("penalties", {"presence_penalty": 1.0}),
    ("penalties", {"frequency_penalty": -1}),
    ("bad_words", {"bad_words": ["a"]}),
    ("seed", {"seed": 0}),
    ("seed", {"seed": 1, "temperature": 0.5}),
    ("stop", {"stop": "x"}),
    ("stop", {"stop": ["x"]}),
    ("structured_output", {"response_format": {"type": "json_object"}}),
    ("structured_output", {"structured_outputs": {"regex": "a"}}),
    ("structured_output", {"guided_json": {}}),
    ("truncated_prompt", {"truncate_prompt_tokens": 5}),
    ("output_state", {"vllm_xargs": {"a": 1}}),
    ("output_state", {"thinking_token_budget": 5}),
    ("output_state", {"thinking_token_budget": 0}),
    ("output_state", {"repetition_detection": {"max_pattern_size": 3}}),
    ("max_tokens", {"max_tokens": "ten"}),
    ("max_tokens", {"min_tokens": 1.5}),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("reason", "more"), REFUSED)
def test_refused(path: str, reason: str, more: dict[str, Any]) -> None:
    """Where prompt + delivered is another request: refused with its reason; nothing delivered: restarted."""
    assert plan(path, **more) == Refuse(reason)
    restart = plan(path, Progress(prompt_ids=[1]), **more)
    assert isinstance(restart, Restart)
    assert restart.path == path
    assert restart.body["kv_transfer_params"]["segue"] == {"seq": "s", "epoch": 2, "resume": True}
    assert {key: restart.body[key] for key in more} == more


CHAT_REFUSED = [
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"functions": [{}]}),
    ("logprobs", {"logprobs": True}),
    ("multimodal", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("multimodal", {"modalities": ["text", "audio"]}),
]


@pytest.mark.parametrize(("reason", "more"), CHAT_REFUSED)
def test_refused_in_chat(reason: str, more: dict[str, Any]) -> None:
    """Chat has more that is not plain text."""
    assert plan(CHAT, **more) == Refuse(reason)


def test_several_prompts_are_refused() -> None:
    """Each would be a choice of its own."""
    assert plan(COMPLETIONS, prompt=["a", "b"]) == Refuse("n")
    assert plan(COMPLETIONS, prompt=[[1], [2]]) == Refuse("n")
    assert isinstance(plan(COMPLETIONS, prompt=["a"]), ByIds)
    assert isinstance(plan(COMPLETIONS, prompt=[1, 2]), ByIds)


SAME = [
    {},
    {"temperature": 0.7},
    {"temperature": 0, "seed": 3},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"5": 1}},
    {"stop_token_ids": [3]},
    {"ignore_eos": True},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"thinking_token_budget": -1},
    {"n": 1, "stop": [], "bad_words": [], "response_format": {"type": "text"}},
    {"cache_salt": "x", "priority": 1, "user": "u", "unknown": {"a": 1}},
    {"tools": [{}], "tool_choice": "none"},
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("more", SAME)
def test_resumed_by_ids(path: str, more: dict[str, Any]) -> None:
    """Where it is right: prompt + delivered, the budget reduced, the rest as it was."""
    found = plan(path, **more)
    assert isinstance(found, ByIds)
    assert found.path == COMPLETIONS
    assert found.body["prompt"] == [1, 2, 3, 4, 5]
    assert found.body["max_tokens"] == 8
    assert found.body["stream"] is True
    assert found.body["return_token_ids"] is True
    assert "messages" not in found.body
    for key in ("temperature", "repetition_penalty", "logit_bias", "stop_token_ids", "cache_salt", "unknown"):
        assert found.body.get(key) == more.get(key)


@pytest.mark.parametrize(
    ("path", "more", "length", "left"),
    [
        (COMPLETIONS, {"max_tokens": None}, 100, 14),
        (COMPLETIONS, {"max_tokens": 1000}, 100, 95),
        (COMPLETIONS, {"max_tokens": 1000}, None, 998),
        (CHAT, {"max_tokens": None}, 100, 95),
        (CHAT, {"max_tokens": 50, "max_completion_tokens": 20}, 100, 18),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 20}, None, 18),
    ],
)
def test_budgets(path: str, more: dict[str, Any], length: int | None, left: int) -> None:
    """Each API's default, its own fields and the model's room."""
    found = plan(path, target=Target(length), **more)
    assert isinstance(found, ByIds)
    assert found.body["max_tokens"] == left
    assert "max_completion_tokens" not in found.body


@pytest.mark.parametrize(("asked", "left"), [(None, 10), (8, 6), (1000, 10)])
def test_an_engines_own_limit_caps_every_request(asked: int | None, left: int) -> None:
    """vLLM takes the smaller of the request's and its generation config's."""
    found = plan(CHAT, target=Target(100, defaults={"max_tokens": 12.0}), max_tokens=asked)
    assert isinstance(found, ByIds)
    assert found.body["max_tokens"] == left


def test_a_penalty_by_default_is_one_unless_the_request_sets_it() -> None:
    """It looks at the output alone, whoever asked for it."""
    target = Target(100, defaults={"presence_penalty": 0.5, "repetition_penalty": 1.1})
    assert plan(COMPLETIONS, target=target) == Refuse("penalties")
    assert isinstance(plan(COMPLETIONS, target=target, presence_penalty=0), ByIds)
    assert isinstance(plan(COMPLETIONS, target=Target(100, defaults={"presence_penalty": 0.0})), ByIds)


def test_ids_without_their_text_are_generated_again() -> None:
    """The prompt ends where the client's text ends, and the budget has room for them."""
    found = plan(COMPLETIONS, target=Target(100, give_back=1), min_tokens=5)
    assert isinstance(found, ByIds)
    assert found.body["prompt"] == [1, 2, 3, 4]
    assert (found.body["max_tokens"], found.body["min_tokens"]) == (9, 4)
    assert (found.given_back, found.dropped_tokens) == (1, 1)


def test_an_unknown_seam_is_refused_unless_nothing_was_delivered() -> None:
    """Text would be lost there. An unstreamed answer starts again instead."""
    target = Target(100, give_back=None)
    assert plan(COMPLETIONS, target=target) == Refuse("seam_text")
    unstreamed = Progress(client_has=False, prompt_ids=[1, 2, 3], choices=TWO)
    assert isinstance(plan(COMPLETIONS, unstreamed, target), Restart)


def test_a_request_without_a_model_names_the_one_it_began_on() -> None:
    """Elsewhere the first model may be another."""
    for progress in (BEGUN, Progress()):
        found = plan(COMPLETIONS, progress, Target(100, model="first"), model=None)
        assert isinstance(found, (ByIds, Restart))
        assert found.body["model"] == "first"
        kept = plan(COMPLETIONS, progress, Target(100, model="first"))
        assert isinstance(kept, (ByIds, Restart))
        assert kept.body["model"] == "m"


def test_nobody_speaks_for_segue() -> None:
    """A client that names a sequence itself could reach somebody else's: its key is dropped everywhere."""
    body = b'{"prompt": "x", "stream": true, "kv_transfer_params": {"segue": {"seq": "other"}, "mine": 1}}'
    request = parse_request(COMPLETIONS, body)
    assert request.engine_body(None)["kv_transfer_params"] == {"mine": 1}
    assert request.engine_body(PARAMS)["kv_transfer_params"]["segue"]["seq"] == "s"


def test_min_tokens_are_reduced_and_not_below_zero() -> None:
    """They count output."""
    found = plan(COMPLETIONS, min_tokens=5)
    assert isinstance(found, ByIds)
    assert found.body["min_tokens"] == 3
    found = plan(COMPLETIONS, min_tokens=1)
    assert isinstance(found, ByIds)
    assert found.body["min_tokens"] == 0


def test_a_chat_without_any_known_limit_is_refused() -> None:
    """/v1/completions would stop after 16 tokens."""
    assert plan(CHAT, target=Target(None), max_tokens=None) == Refuse("unknown_model_length")


def test_nothing_left_to_generate_is_a_finish() -> None:
    """The budget or the model's room is used up."""
    assert plan(COMPLETIONS, max_tokens=2) == Finish("length")
    assert plan(COMPLETIONS, target=Target(5)) == Finish("length")


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (Progress(client_has=True, ids_known=False), Refuse("unknown_token_ids")),
        (Progress(client_has=True, prompt_ids=[1], choices=ONE, parsed=True), Refuse("parsed_output")),
        (
            Progress(client_has=True, prompt_ids=[1], choices=ONE, overflow=True),
            Refuse("transcript_limit"),
        ),
        (
            Progress(client_has=True, prompt_ids=[1], choices=ONE, whole_characters=False),
            Refuse("unfinished_character"),
        ),
        (Progress(client_has=True, finish_reason="stop"), Finish("stop")),
        (Progress(client_has=True, finish_reason="stop", closable=False), Refuse("unknown_usage")),
    ],
)
def test_what_is_known_decides(progress: Progress, expected: Plan) -> None:
    """Without ids, or with parsed output, there is no right way on; a finish needs none."""
    assert plan(COMPLETIONS, progress) == expected


def test_an_unstreamed_request_is_streamed_inside() -> None:
    """With ids and the engine's own usage; what cannot be assembled again is asked for as it is."""
    inside = parse_request(CHAT, b'{"messages": [], "stream": false}').engine_body(None)
    assert inside["stream"] is True
    assert inside["return_token_ids"] is True
    assert inside["stream_options"] == {"include_usage": True}
    for body in (
        b'{"prompt": "x", "logprobs": 1}',
        b'{"prompt": "x", "n": 2}',
        b'{"prompt": "x", "echo": true}',
    ):
        request = parse_request(COMPLETIONS, body)
        assert request.mode == "whole"
        assert request.engine_body(None) == request.body
    assert parse_request(CHAT, b'{"messages": [], "modalities": ["text", "audio"]}').mode == "whole"


def test_the_clients_body_is_not_changed() -> None:
    """A later decision needs it as it was."""
    body = {"model": "m", "prompt": "x", "stream": True, "kv_transfer_params": {"mine": 1}, "min_tokens": 5}
    request = parse_request(COMPLETIONS, json.dumps(body).encode())
    found = how_to_resume(request, BEGUN, Target(100), PARAMS)
    assert isinstance(found, ByIds)
    assert found.body["kv_transfer_params"]["mine"] == 1
    assert request.body == body


ABLE = Target(100, exact=frozenset({"output", "seed", "grammar"}))
NEVER_EXACT = [
    ("n", {"best_of": 3}),
    ("beam_search", {"use_beam_search": True}),
    ("prompt_embeds", {"prompt_embeds": "x"}),
    ("prompt_embeds", {"suffix": "x"}),
    ("output_state", {"vllm_xargs": {"a": 1}}),
    ("output_state", {"thinking_token_budget": 5}),
    ("output_state", {"thinking_token_budget": 0}),
    ("output_state", {"repetition_detection": {"max_pattern_size": 3}}),
    ("max_tokens", {"max_tokens": "ten"}),
    ("max_tokens", {"min_tokens": 1.5}),
    ("multimodal", {"modalities": ["text", "audio"]}),
]
EXACT_ONLY = [more for reason, more in REFUSED if (reason, more) not in NEVER_EXACT]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("more", [*EXACT_ONLY, *SAME])
def test_an_engine_with_the_shim_continues_everything(path: str, more: dict[str, Any]) -> None:
    """The original body, unchanged, with the ids so far; also where continuing by ids would be wrong."""
    asked = {"seed": 3} | more
    found = plan(path, target=ABLE, **asked)
    assert isinstance(found, Exact), found
    assert found.path == path
    told = found.body["kv_transfer_params"]["segue"]
    assert told == {"seq": "s", "epoch": 2, "resume": True, "delivered": [{"ids": [4, 5]}]} | (
        {"one_by_one": True} if path == CHAT and "tools" in asked and "tool_choice" not in asked else {}
    )
    assert {key: found.body[key] for key in asked} == asked
    assert found.body["max_tokens"] == asked.get("max_tokens", 10)


@pytest.mark.parametrize(("reason", "more"), NEVER_EXACT)
def test_what_nobody_can_continue(reason: str, more: dict[str, Any]) -> None:
    """Refused with its reason although the engine has the shim."""
    assert plan(COMPLETIONS, target=ABLE, seed=1, temperature=0, **more) == Refuse(reason)


def test_several_prompts_are_not_continued() -> None:
    """Each has choices and ids of its own."""
    assert plan(COMPLETIONS, target=ABLE, prompt=["a", "b"], temperature=0) == Refuse("n")


@pytest.mark.parametrize(
    ("lacks", "more"),
    [
        ("seed", {"temperature": 1, "seed": 5}),
        ("grammar", {"temperature": 0, "response_format": {"type": "json_object"}}),
        ("output", {"temperature": 0, "stop": ["x"]}),
    ],
)
def test_an_engine_continues_what_its_own_test_says(lacks: str, more: dict[str, Any]) -> None:
    """What its shim cannot do is not asked of it."""
    assert isinstance(plan(COMPLETIONS, target=ABLE, **more), Exact)
    less = Target(100, exact=ABLE.exact - {lacks})
    assert isinstance(plan(COMPLETIONS, target=less, **more), Refuse)


def test_random_draws_without_a_seed_cannot_be_repeated() -> None:
    """Such an answer goes on by ids; with the router's own seed exactly. The seed never goes by ids, where
    the draws would begin anew."""
    assert isinstance(plan(COMPLETIONS, target=ABLE, temperature=0.5), ByIds)
    body = b'{"model": "m", "prompt": "x", "stream": true, "max_tokens": 10, "temperature": 0.5}'
    request = parse_request(COMPLETIONS, body).seeded(77)
    assert request.engine_body(None)["seed"] == 77
    found = how_to_resume(request, BEGUN, ABLE, PARAMS)
    assert isinstance(found, Exact)
    assert found.body["seed"] == 77
    by_ids = how_to_resume(request, BEGUN, ROOM, PARAMS)
    assert isinstance(by_ids, ByIds)
    assert "seed" not in by_ids.body


def test_held_ids_are_continued_exactly_and_text_may_lag() -> None:
    """Ids whose text is not finished yet belong to the output so far."""
    held = Progress(client_has=True, prompt_ids=[1], choices=(ChoiceProgress([4, 5, 6], 1),), parsed=True)
    found = plan(COMPLETIONS, held, Target(100, exact=ABLE.exact, give_back=None), temperature=0)
    assert isinstance(found, Exact)
    assert found.body["kv_transfer_params"]["segue"]["delivered"] == [{"ids": [4, 5, 6]}]


def test_a_choice_at_its_limit_is_only_said_again() -> None:
    """The finish was lost on the way: the engine must not generate beyond it."""
    found = plan(COMPLETIONS, target=ABLE, max_tokens=2, temperature=0)
    assert isinstance(found, Exact)
    told = found.body["kv_transfer_params"]["segue"]["delivered"]
    assert told == [{"ids": [4, 5], "finish_reason": "length"}]


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
def test_finished_choices_are_told_in_the_engines_own_words(finish: str) -> None:
    """What the chat API calls tool_calls is a stop to the engine."""
    choices = (ChoiceProgress([4], 1, finish, 17), ChoiceProgress([5], 1))
    progress = Progress(client_has=True, prompt_ids=[1], choices=choices)
    found = plan(CHAT, progress, ABLE, n=2, temperature=0)
    assert isinstance(found, Exact)
    told = found.body["kv_transfer_params"]["segue"]["delivered"]
    assert told == [{"ids": [4], "finish_reason": "stop", "stop_reason": 17}, {"ids": [5]}]


def test_an_unstreamed_answer_is_continued_exactly_too() -> None:
    """Nothing was handed out, but what was generated is not thrown away."""
    progress = Progress(client_has=False, prompt_ids=[1, 2, 3], choices=TWO)
    found = plan(CHAT, progress, ABLE, stream=False, stop=["x"], temperature=0)
    assert isinstance(found, Exact)
    assert found.body["stream"] is True

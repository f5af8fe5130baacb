"""Where an answer may go on: the same model, room for as long an answer, the defaults it began with."""

from __future__ import annotations

from typing import Any

import pytest

from system.router.asked import CHAT, COMPLETIONS, assert_uninterrupted, request
from system.router.fake_engine import FakeEngine, Fault
from system.router.fake_tokens import generate
from system.router.harness import Client, Stage, eventually, session_of


def card(model: str = "fake", **more: Any) -> dict[str, Any]:
    return {"id": model, "object": "model", "max_model_len": 512} | more


async def with_cards(stage: Stage, *cards: list[dict[str, Any]]) -> tuple[list[FakeEngine], Client]:
    engines = [await stage.engine() for _ in cards]
    for engine, held in zip(engines, cards, strict=True):
        engine.cards = held
    return engines, await stage.router(engines)


async def until_up(client: Client) -> None:
    engines = client.context.registry.engines
    await eventually(lambda: all(e.health.state == "up" for e in engines), "all engines are up again")


@pytest.mark.parametrize(
    "other", [card("another"), card(root="/models/another")], ids=["another id", "another root"]
)
async def test_an_answer_never_goes_on_with_another_model(stage: Stage, other: dict[str, Any]) -> None:
    """Also where the request names no model: token ids of one model are noise to another."""
    _, client = await with_cards(stage, [card(root="/models/fake")], [other])
    body = request(COMPLETIONS)
    del body["model"]
    for home in "ab":
        stage.faults.append(Fault("error_event", 5))
        answer = await client.ask(COMPLETIONS, body, x_session_id=session_of(home))
        assert set((await client.story(answer.seq)).engines) == {home}
        await until_up(client)


async def test_a_request_without_a_model_goes_on_with_the_one_it_began_on(stage: Stage) -> None:
    """The second engine serves it too, but not first: it is named."""
    cards = [card("one"), card("two")]
    engines, client = await with_cards(stage, cards, cards[::-1])
    body = request(COMPLETIONS)
    del body["model"]
    stage.faults.append(Fault("error_event", 5))
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)
    first, second = sorted(engines, key=lambda engine: engine.seen[0].finished)
    assert "model" not in first.seen[0].body
    assert second.seen[0].body["model"] == first.cards[0]["id"]


async def test_a_standby_with_less_room_does_not_cut_the_answer(stage: Stage) -> None:
    """It is not offered; the answer goes on where there is room."""
    _, client = await with_cards(stage, [card()], [card(max_model_len=20)], [card()])
    body = request(COMPLETIONS)
    for home, standby in (("a", "c"), ("c", "a")):
        stage.faults.append(Fault("error_event", 6))
        answer = await client.ask(COMPLETIONS, body, x_session_id=session_of(home, "abc"))
        assert_uninterrupted(answer, COMPLETIONS, body)
        assert (await client.story(answer.seq)).engines == (home, standby)
        await until_up(client)


async def test_a_standby_with_more_room_does_not_lengthen_the_answer(stage: Stage) -> None:
    """A chat without a limit ends where the engine on which it began would have ended it."""
    body = request(CHAT)
    del body["max_tokens"]
    prompt = len(generate(CHAT, request(CHAT))[0])
    short = prompt + 20
    engines, client = await with_cards(stage, [card(max_model_len=short)], [card(max_model_len=short)])
    stage.faults.append(Fault("error_event", 7))
    for engine in engines[1:]:
        engine.cards = [card(max_model_len=512)]
    await eventually(lambda: client.context.registry["b"].max_model_len("fake") == 512, "b has more room")
    assert client.context.registry["a"].max_model_len("fake") == short
    answer = await client.ask(CHAT, body, x_session_id=session_of("a"))
    story = await client.story(answer.seq)
    assert story.engines == ("a", "b")
    assert story.delivered_tokens == 20
    assert answer.finishes == ["length"]


async def test_an_adapter_has_the_room_of_its_base_model(stage: Stage) -> None:
    """Cards of LoRA adapters name no length."""
    cards = [card("base"), card("fake", root="/lora", parent="base", max_model_len=None)]
    _, client = await with_cards(stage, cards, cards)
    body = request(CHAT)
    del body["max_tokens"]
    stage.faults.append(Fault("error_event", 7))
    assert_uninterrupted(await client.ask(CHAT, body), CHAT, body)


async def test_an_engines_own_limit_of_tokens_holds_across_the_seam(stage: Stage) -> None:
    """`max_new_tokens` of its generation config, told by its daemon or the configuration."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines, engine={"generation_defaults": {"max_tokens": 12}})
    body = request(CHAT)
    del body["max_tokens"]
    stage.faults.append(Fault("error_event", 7))
    answer = await client.ask(CHAT, body)
    assert answer.error is None
    assert (await client.story(answer.seq)).delivered_tokens == 12


async def test_a_penalty_by_default_is_told_by_the_daemon(stage: Stage) -> None:
    """Penalties look at the output alone: refused, unless the request sets them to nothing."""
    engines = [await stage.engine(), await stage.engine()]
    daemons = [await stage.daemon(), await stage.daemon()]
    for daemon in daemons:
        daemon.say(generation_defaults={"presence_penalty": 0.5})
    client = await stage.router(engines, daemons)
    stage.faults.append(Fault("error_event", 7))
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS))
    assert answer.error is not None
    assert answer.error["code"] == "cannot_resume_penalties"
    await until_up(client)
    stage.faults.append(Fault("error_event", 7))
    body = request(COMPLETIONS, presence_penalty=0)
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)

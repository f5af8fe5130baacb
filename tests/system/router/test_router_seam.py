"""The seam: ids whose text was not delivered are generated again, or the answer is refused."""

from __future__ import annotations

import pytest

from system.router.asked import CHAT, COMPLETIONS, LENGTH, assert_uninterrupted, request
from system.router.fake_engine import FakeEngine, Fault
from system.router.fake_tokens import generate, text_of
from system.router.harness import Client, Stage, eventually


async def two(stage: Stage, **attributes: object) -> tuple[list[FakeEngine], Client]:
    engines = [await stage.engine(chunk_tokens=attributes.pop("chunk_tokens", 1)) for _ in range(2)]
    for engine in engines:
        for name, value in attributes.items():
            setattr(engine, name, value)
    return engines, await stage.router(engines)


async def all_up(client: Client) -> None:
    engines = client.context.registry.engines
    await eventually(lambda: all(e.health.state == "up" for e in engines), "all engines are up again")


@pytest.mark.parametrize("wants_ids", [True, False])
async def test_text_that_a_parser_holds_back_is_not_lost(stage: Stage, wants_ids: bool) -> None:
    """Chat parsers hold `<` back for a token: wherever the engine dies, nothing is lost or repeated."""
    _, client = await two(stage, lag="token")
    body = request(CHAT, return_token_ids=wants_ids, stream_options={"include_usage": True})
    for after in range(2, LENGTH):
        stage.faults.append(Fault("die", after))
        answer = await client.ask(CHAT, body)
        assert_uninterrupted(answer, CHAT, body)
        await all_up(client)


async def test_a_token_of_which_the_client_has_a_part_is_refused(stage: Stage) -> None:
    """Of ` <` it has the blank: no ids end where its text ends. Unstreamed, it starts again."""
    _, client = await two(stage, lag="blank")
    body = request(CHAT)
    output = generate(CHAT, body)[1]
    refused = 0
    for after in range(2, 12):
        stage.faults.append(Fault("error_event", after))
        answer = await client.ask(CHAT, body)
        if answer.error is None:
            assert_uninterrupted(answer, CHAT, body)
        else:
            refused += 1
            assert answer.error["code"] == "cannot_resume_seam_text"
            assert text_of(output).startswith(answer.text)
            assert not answer.done
        await all_up(client)
    assert refused
    body = request(CHAT, stream=False)
    stage.faults.append(Fault("error_event", 8))
    assert_uninterrupted(await client.ask(CHAT, body), CHAT, body)


async def test_an_engine_that_does_not_answer_about_the_text_is_passed_over(stage: Stage) -> None:
    """Its tokenizer is asked where the text may lag. Silence says nothing: the answer goes on elsewhere."""
    engines = [await stage.engine() for _ in range(4)]
    for engine in engines:
        engine.lag = "token"
        engine.detokenize_hangs = engine in engines[:2]
    client = await stage.router(engines)
    body = request(CHAT)
    stage.faults.append(Fault("error_event", 8))
    assert_uninterrupted(await client.ask(CHAT, body), CHAT, body)
    assert sum(engine.detokenized for engine in engines[:2]) > 0


async def test_an_engine_without_detokenize_is_believed_token_by_token_only(stage: Stage) -> None:
    """One token with text: the seam is there. Several at once: nobody can say where it is."""
    engines, client = await two(stage, detokenizes=False)
    body = request(CHAT)
    stage.faults.append(Fault("error_event", 7))
    assert_uninterrupted(await client.ask(CHAT, body), CHAT, body)
    await all_up(client)
    for engine in engines:
        engine.chunk_tokens = 3
    stage.faults.append(Fault("error_event", 7))
    answer = await client.ask(CHAT, body)
    assert answer.error is not None
    assert answer.error["code"] == "cannot_resume_seam_text"


async def test_nobody_is_asked_where_the_seam_is_plain(stage: Stage) -> None:
    """Completions, token by token: no round trip is spent."""
    engines, client = await two(stage)
    body = request(COMPLETIONS)
    stage.faults.append(Fault("error_event", 7))
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)
    assert sum(engine.detokenized for engine in engines) == 0


async def test_usage_is_not_made_up(stage: Stage) -> None:
    """An engine that names neither ids nor usage: the answer has none, instead of zeros."""
    _, client = await two(stage, names_ids=False, names_usage=False)
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, stream=False))
    assert answer.body["usage"] is None
    body = request(COMPLETIONS, stream_options={"include_usage": True})
    answer = await client.ask(COMPLETIONS, body)
    assert answer.done
    assert not any(event.get("usage") for event in answer.events)

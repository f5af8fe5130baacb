"""The turns of a conversation: where the next one goes when the engine of the last one is gone, and who is
told to ask its daemon for it. And what a client says of replication."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from segue_core.messages.status import SequenceStatus
from segue_router.choose import Candidate, rank_new
from segue_router.upstream import now_ms
from system.router.asked import CHAT, COMPLETIONS, assert_uninterrupted, request
from system.router.fake_daemon import FakeDaemon
from system.router.fake_engine import FakeEngine, Fault
from system.router.harness import Answer, Client, Stage, eventually, session_of

ENGINES = [Candidate(name) for name in "abc"]
TEXTS = (f"how tall is light {number}?" for number in count())
QUESTION = {
    "role": "user",
    "content": next(text for text in TEXTS if rank_new(ENGINES, f"prefix:user:{text}\n") == ["c", "a", "b"]),
}
"""Its home is engine c, and without that a."""


class Talk:
    """A chat with an answer after each question, over three engines."""

    def __init__(self, engines: list[FakeEngine], daemons: list[FakeDaemon], client: Client) -> None:
        self.engines, self.daemons, self.client = engines, daemons, client
        self.messages: list[dict[str, str]] = []

    async def turn(self, **headers: str) -> tuple[int, dict[str, Any]]:
        """The next turn: which engine it went to, and what its shim was told."""
        self.messages.append(QUESTION)
        for engine in self.engines:
            engine.seen.clear()
        body = request(CHAT, messages=list(self.messages))
        answer = await self.client.ask(CHAT, body, **headers)
        assert_uninterrupted(answer, CHAT, body)
        self.messages.append({"role": "assistant", "content": answer.text})
        ((index, seen),) = [(i, seen) for i, engine in enumerate(self.engines) for seen in engine.seen]
        told: dict[str, Any] = seen.body["kv_transfer_params"]["segue"]
        return index, told

    async def lose(self, index: int, *, noticed: bool = True) -> None:
        """The engine is gone, with what its cache held."""
        await self.engines[index].stop()
        health = self.client.context.registry["abc"[index]].health
        if noticed:
            await eventually(lambda: health.state == "down", "its death is noticed")

    def holds_last_turn(self, index: int, seq: str, tokens: int) -> None:
        """From now on the daemon of engine `index` has what is left of `seq`."""

        def says(asked: str) -> SequenceStatus | None:
            return SequenceStatus(seq, "cached", 1, tokens, tokens, tokens, tokens) if asked == seq else None

        self.daemons[index].says_of = says


async def talk(stage: Stage, **settings: Any) -> Talk:
    engines = [await stage.engine() for _ in range(3)]
    daemons = [await stage.daemon() for _ in range(3)]
    affinity = {"affinity": {"prefix_chars": 1024}} | settings
    return Talk(engines, daemons, await stage.router(engines, daemons, **affinity))


async def test_turns_stay_on_one_engine_and_no_daemon_is_asked(stage: Stage) -> None:
    """The usual case costs nothing: its own prefix cache has the conversation."""
    chat = await talk(stage)
    first, told = await chat.turn()
    assert "resume" not in told and "replication" not in told
    for _ in range(2):
        index, told = await chat.turn()
        assert index == first and "resume" not in told
    assert not any(daemon.asked for daemon in chat.daemons)


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "found out by asking"])
async def test_the_turn_after_a_loss_goes_where_the_last_one_is_held(stage: Stage, noticed: bool) -> None:
    """Also after that: where the conversation went on is where it is now."""
    chat = await talk(stage, timeouts={} if noticed else {"health_interval_ms": 60_000})
    first, told = await chat.turn()
    assert first == 2
    # The engine that neither affinity nor, among equals, the order of names would choose.
    holder = 1
    chat.holds_last_turn(holder, told["seq"], 40)
    await chat.lose(first, noticed=noticed)
    index, told = await chat.turn()
    assert index == holder and told["resume"] is True and told["epoch"] == (1 if noticed else 2)
    index, told = await chat.turn()
    assert index == holder and "resume" not in told


async def test_an_engine_that_was_restarted_asks_for_what_it_had(stage: Stage) -> None:
    """Same name, another life: its cache is empty, its daemon may not be."""
    chat = await talk(stage)
    first, _ = await chat.turn()
    chat.daemons[first].say(incarnation=2)
    registry = chat.client.context.registry
    await eventually(
        lambda: registry["abc"[first]].health.last_status.incarnation == 2,  # type: ignore[union-attr]
        "the new life is known",
    )
    _, told = await chat.turn()
    assert told["resume"] is True


async def test_a_restarted_router_lets_engines_ask_for_conversations_only(stage: Stage) -> None:
    """It knows of no turn before: a request that tells of one asks, a first question does not."""
    chat = await talk(stage)
    chat.messages = [QUESTION, {"role": "assistant", "content": "quite"}]
    _, told = await chat.turn()
    assert told["resume"] is True
    chat.messages = []
    _, told = await chat.turn()
    assert "resume" not in told


async def test_silent_daemons_do_not_hold_a_turn_up(stage: Stage) -> None:
    """Nobody knows who holds it: it goes somewhere, and is computed if need be."""
    chat = await talk(stage, timeouts={"probe_ms": 100})
    first, _ = await chat.turn()
    await chat.lose(first)
    for daemon in chat.daemons:
        await daemon.stop()
    index, _ = await chat.turn()
    assert index != first


async def test_a_daemon_that_is_known_to_hang_is_not_asked_at_every_turn(stage: Stage) -> None:
    """Neither by the router nor by its engine: each turn would wait for both time-outs."""
    chat = await talk(stage)
    first, _ = await chat.turn()
    await chat.lose(first)
    engines = [engine for engine in chat.client.context.registry.engines if engine.name != "abc"[first]]
    for daemon in chat.daemons:
        daemon.hangs = True
        daemon.asked.clear()
    for engine in engines:
        await eventually(lambda e=engine: e.health.daemon(now_ms()) is None, "its silence is noticed")
    index, told = await chat.turn()
    assert index != first and "resume" not in told
    assert not any(daemon.asked for daemon in chat.daemons)


@pytest.mark.parametrize("word", ["off", "low", "high"])
async def test_a_clients_word_on_replication_reaches_every_engine_it_runs_on(stage: Stage, word: str) -> None:
    """Before a failure and after it; the answer goes on all the same, and no engine sees the header."""
    chat = await talk(stage)
    stage.faults.append(Fault("error_event", 8))
    body = request(COMPLETIONS)
    answer = await chat.client.ask(COMPLETIONS, body, x_segue_replication=word)
    assert_uninterrupted(answer, COMPLETIONS, body)
    seen = [seen for engine in chat.engines for seen in engine.seen]
    assert len(seen) == 2
    for each in seen:
        assert each.body["kv_transfer_params"]["segue"]["replication"] == word
        assert "x-segue-replication" not in {name.lower() for name in each.headers}


async def test_a_word_on_replication_that_is_none_is_refused(stage: Stage) -> None:
    """A client that misspells `off` must not believe that its KV stays where it is."""
    chat = await talk(stage)
    answer: Answer = await chat.client.ask(COMPLETIONS, request(COMPLETIONS), x_segue_replication="of")
    assert answer.status == 400 and "off, low, normal, high" in answer.body["error"]["message"]
    assert not any(engine.seen for engine in chat.engines)


async def test_a_drained_answer_without_replicas_does_not_wait_for_one(stage: Stage) -> None:
    """There never will be one: it moves at once, and is computed again."""
    chat = await talk(stage, timeouts={"failover_ms": 60_000})
    for engine in chat.engines:
        engine.token_s = 0.01
    body = request(COMPLETIONS, max_tokens=60)
    headers = {"x_segue_replication": "off", "x_session_id": session_of("a", "abc")}

    async def drained() -> None:
        await eventually(lambda: chat.engines[0].seen and chat.engines[0].seen[0].sent_tokens > 3, "it runs")
        async with chat.client.session.post(f"{chat.client.url}/drain?engine=a&wait=false") as response:
            assert response.status == 200

    answer, _ = await asyncio.gather(chat.client.ask(COMPLETIONS, body, **headers), drained())
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert len((await chat.client.story(answer.seq)).moves) == 1

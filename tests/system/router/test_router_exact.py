"""Exact continuation by the router: the original body, what was delivered, and a standby that can."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from segue_core.messages.status import Exact
from segue_router.engine import Engine
from segue_router.resume import Progress
from segue_router.takeover import Takeover
from system.router.able import ALL, ELSEWHERE, PATHS, able, question
from system.router.exact_engine import ExactEngine
from system.router.fake_engine import Fault
from system.router.fake_tokens import generate, text_of
from system.router.harness import Stage, eventually, session_of

ONLY_EXACT: list[dict[str, Any]] = [
    {},
    {"stop": ["zzz"]},
    {"presence_penalty": 1.0},
    {"bad_words": ["zzz"]},
    {"seed": 5, "temperature": 1},
    {"response_format": {"type": "json_object"}},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", ONLY_EXACT)
@pytest.mark.parametrize("after", [1, 7, 19])
async def test_what_only_the_shim_can_continue(
    stage: Stage, path: str, more: dict[str, Any], after: int
) -> None:
    """One answer, the original body at both engines, nothing said twice, and usage of all of it."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=after))
    body = question(path, **more)
    answer = await router.ask(path, body)
    prompt, output, finish = generate(path, body)
    assert answer.error is None
    assert answer.done
    assert answer.text == text_of(output)
    assert answer.finishes == [finish]
    assert answer.ids == (output if more.get("return_token_ids") else [])
    first, second = (engine.seen[0].body for engine in by_time(engines))
    for sent in (first, second):
        assert {key: sent[key] for key in body} == body
        assert set(sent) == {*body, "return_token_ids", "kv_transfer_params"}
    params = second["kv_transfer_params"]["segue"]
    assert [each["ids"] for each in params["delivered"]] == [output[:after]]
    assert (params["resume"], params["epoch"]) == (True, 2)
    usages = [event["usage"] for event in answer.events if event.get("usage")]
    if "stream_options" in more:
        assert usages[-1]["completion_tokens"] == len(output)
        assert usages[-1]["prompt_tokens"] == len(prompt)
    (move,) = (await router.story(answer.seq)).moves
    assert move.how == "exact"
    assert text_of(output[: move.delivered_tokens]) == text_of(output[:after])


def by_time(engines: list[ExactEngine]) -> list[ExactEngine]:
    """The one that began first."""
    return sorted(engines, key=lambda engine: engine.seen[0].body["kv_transfer_params"]["segue"]["epoch"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("after", [3, 25, 38])
async def test_every_choice_continues_under_its_own_index(stage: Stage, path: str, after: int) -> None:
    """The fake engine says one choice after the other: the cut is in the first, in the second, or at its end.
    What is finished stays finished; each choice's own sequence is promoted and fenced."""
    engines, daemons = await able(stage, [ALL, ALL])
    for daemon in daemons:
        daemon.watermark = 5
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=after))
    body = question(path, n=2, stream_options={"include_usage": True})
    answer = await router.ask(path, body)
    _, output, finish = generate(path, body)
    assert answer.done
    for index in (0, 1):
        mine = [choice for choice in answer.choices if choice["index"] == index]
        text = "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in mine)
        assert text == text_of(output)
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [finish]
    assert answer.events[-1]["usage"]["completion_tokens"] == 2 * len(output)
    one, two = by_time(engines)
    assert one.seen[0].body["n"] == two.seen[0].body["n"] == 2
    going_on = {answer.seq + suffix for suffix, end in (("", 20), (".1", 40)) if after < end}
    standby = daemons[engines.index(two)]
    assert {seq for seq, _ in standby.promoted} == going_on
    await eventually(lambda: {seq for seq, _ in daemons[engines.index(one)].fenced} == going_on, "fenced")


async def test_samples_without_a_seed_get_one_inside(stage: Stage) -> None:
    """Both engines get the same one; those that were asked for, greedy or with their own, are left alone."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    answer = await router.ask(PATHS[0], question(PATHS[0], temperature=0.7))
    assert answer.done
    seeds = {engine.seen[0].body["seed"] for engine in engines}
    assert len(seeds) == 1
    assert isinstance(seeds.pop(), int)


@pytest.mark.parametrize(
    ("more", "headers", "seed"),
    [
        ({}, {}, None),
        ({"temperature": 0.7, "seed": 8}, {}, 8),
        ({"temperature": 0.7}, {"x_segue_failover": "off"}, None),
        ({"temperature": 0.7, "prompt": ["a"] * 2}, {}, None),
    ],
)
async def test_who_gets_no_seed(
    stage: Stage, more: dict[str, Any], headers: dict[str, str], seed: int | None
) -> None:
    """Greedy requests, those with their own, those that opted out, and what could not be continued anyway."""
    (engine,), daemons = await able(stage, [ALL])
    router = await stage.router([engine], daemons)
    stage.faults.append(Fault("status", status=400))
    await router.ask(PATHS[0], question(PATHS[0], **more), **headers)
    assert engine.seen[-1].body.get("seed") == seed


async def test_seeds_can_be_left_alone(stage: Stage) -> None:
    """Switched off, and where engines could not repeat the draws, a sampled request is what it was: it goes
    on by ids, from another draw."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE | {"seed_sampled": False})
    stage.faults.append(Fault("die", after=5))
    answer = await router.ask(PATHS[0], question(PATHS[0], temperature=0.7))
    assert answer.done
    assert all("seed" not in engine.seen[0].body for engine in engines)
    assert (await router.story(answer.seq)).moves[0].how == "by_ids"


async def test_a_standby_that_cannot_is_not_asked(stage: Stage) -> None:
    """Of two standbys only one has the shim; the answer needs it, and that one goes on."""
    engines, daemons = await able(stage, [ALL, (), ALL])
    daemons[1].watermark = 1000
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    body = question(PATHS[0], stop=["zzz"])
    answer = await router.ask(PATHS[0], body, x_session_id=session_of("a", "abc"))
    assert answer.done
    assert [len(engine.seen) for engine in engines] == [1, 0, 1]


@pytest.mark.parametrize(
    ("abilities", "reason"), [(("output",), "seed"), ((), "seed"), (("seed", "grammar"), "seed")]
)
async def test_without_the_ability_it_is_refused(
    stage: Stage, abilities: tuple[Exact, ...], reason: str
) -> None:
    """A seeded answer that nobody can continue ends in one clear error."""
    engines, daemons = await able(stage, [abilities, abilities])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    answer = await router.ask(PATHS[0], question(PATHS[0], temperature=1, seed=3))
    assert not answer.done
    assert answer.error is not None
    assert answer.error["code"] == f"cannot_resume_{reason}"


async def test_an_answer_waits_for_a_daemon_that_was_just_started_again(stage: Stage) -> None:
    """Both daemons were killed, and know of no engine yet, when the answer's engine dies: what the other one
    could do before it can do again, so the answer waits for it instead of ending in an error."""
    engines, daemons = await able(stage, [ALL, ALL])
    for engine in engines:
        engine.token_s = 0.05
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    body = question(PATHS[0], temperature=1, seed=3)
    asked = asyncio.create_task(router.ask(PATHS[0], body))
    known = router.context.registry.engines
    await eventually(lambda: any(e.seen and e.seen[0].sent_tokens > 5 for e in engines), "it has begun")
    first = next(index for index, engine in enumerate(engines) if engine.seen)
    for daemon in daemons:
        daemon.say(state="absent", exact=())
    await eventually(lambda: all(e.health.daemon_state == "absent" for e in known), "the router heard it")
    await engines[first].kill()
    await eventually(lambda: router.context.metrics.failovers_total, "the answer broke")
    daemons[1 - first].say(state="running", exact=ALL)
    answer = await asked
    _, output, _ = generate(PATHS[0], body)
    assert (answer.done, answer.text) == (True, text_of(output))


async def test_the_daemon_of_the_next_engine_may_be_started_again_just_then(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of an engine and the request to it its daemon is killed: for a moment nobody is
    known to be able to go on, and the answer waits for it."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    promote = Takeover.promote
    restarted: list[str] = []

    async def and_restart(self: Takeover, engine: Engine, progress: Progress) -> None:
        await promote(self, engine, progress)
        if restarted:
            return
        restarted.append(engine.name)
        daemon = daemons["ab".index(engine.name)]
        daemon.say(state="absent", exact=())
        await eventually(lambda: engine.health.daemon_state == "absent", "the router heard it")
        asyncio.get_running_loop().call_later(0.1, lambda: daemon.say(state="running", exact=ALL))

    monkeypatch.setattr(Takeover, "promote", and_restart)
    stage.faults.append(Fault("die", after=10))
    body = question(PATHS[0], temperature=1, seed=3)
    answer = await router.ask(PATHS[0], body)
    _, output, _ = generate(PATHS[0], body)
    assert restarted
    assert (answer.done, answer.text) == (True, text_of(output))


async def test_an_engine_that_says_something_else_is_not_believed(stage: Stage) -> None:
    """Its replay differs from what the client has: one error, and not a word of the other answer."""
    engines, daemons = await able(stage, [ALL, ALL])
    for engine in engines:
        engine.other_words = True
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    body = question(PATHS[1], stop=["zzz"])
    answer = await router.ask(PATHS[1], body)
    _, output, _ = generate(PATHS[1], body)
    assert not answer.done
    assert answer.error is not None
    assert answer.error["code"] == "cannot_resume_replay_differs"
    assert answer.text == text_of(output[:5])
    status = await router.status()
    assert status.refused == 1


@pytest.mark.parametrize("path", PATHS)
async def test_an_unstreamed_answer_goes_on_exactly(stage: Stage, path: str) -> None:
    """It is streamed inside, and what was generated is not thrown away."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    body = question(path, stop=["zzz"], stream=False)
    answer = await router.ask(path, body)
    _, output, finish = generate(path, body)
    choice = answer.body["choices"][0]
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == text_of(output)
    assert choice["finish_reason"] == finish
    assert answer.body["usage"]["completion_tokens"] == len(output)
    assert (await router.story(answer.seq)).moves[0].how == "exact"


async def test_several_failures_in_a_row(stage: Stage) -> None:
    """A, B, A again: also in the middle of a replay."""
    engines, daemons = await able(stage, [ALL, ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.extend([Fault("die", after=4), Fault("die", after=3), Fault("error_event", after=12)])
    body = question(PATHS[1], seed=4, temperature=1, return_token_ids=True)
    answer = await router.ask(PATHS[1], body)
    _, output, _ = generate(PATHS[1], body)
    assert answer.done
    assert (answer.text, answer.ids) == (text_of(output), output)
    assert [move.how for move in (await router.story(answer.seq)).moves] == ["exact"] * 3


@pytest.mark.parametrize("stream", [True, False])
async def test_the_count_of_a_finished_answer_is_an_engines_if_there_is_one(
    stage: Stage, stream: bool
) -> None:
    """The engine died between the finish and the usage: a chat's usage has details that nobody else knows."""
    engines, daemons = await able(stage, [ALL, ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die_after_finish"))
    body = question(PATHS[1], stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await router.ask(PATHS[1], body)
    _, output, finish = generate(PATHS[1], body)
    (delivered,) = by_time(engines)[1].seen[0].body["kv_transfer_params"]["segue"]["delivered"]
    assert delivered == {"ids": output, "finish_reason": finish}
    usage = answer.events[-1]["usage"] if stream else answer.body["usage"]
    assert usage["completion_tokens"] == len(output)
    if stream:
        assert answer.done
        assert answer.text == text_of(output)
        assert answer.finishes == [finish]


@pytest.mark.parametrize("headers", [{}, {"x_segue_failover": "off"}])
async def test_a_finished_answer_never_ends_in_an_error(stage: Stage, headers: dict[str, str]) -> None:
    """Nobody is left, or it may not move: the router counts by itself."""
    engines, daemons = await able(stage, [ALL])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die_after_finish"))
    body = question(PATHS[1], stream_options={"include_usage": True})
    answer = await router.ask(PATHS[1], body, **headers)
    _, output, _ = generate(PATHS[1], body)
    assert answer.done
    assert answer.error is None
    assert answer.events[-1]["usage"]["completion_tokens"] == len(output)


async def test_an_unstreamed_answer_that_differs_starts_again(stage: Stage) -> None:
    """Nobody has anything of it: it is asked for anew instead of refused."""
    engines, daemons = await able(stage, [ALL, ALL])
    for engine in engines:
        engine.other_words = True
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    body = question(PATHS[0], stop=["zzz"], stream=False)
    answer = await router.ask(PATHS[0], body)
    _, output, _ = generate(PATHS[0], body)
    assert answer.status == 200
    assert answer.body["choices"][0]["text"] == text_of(output)
    assert answer.body["usage"]["completion_tokens"] == len(output)


@pytest.mark.parametrize(("first", "second"), [(ALL, ()), ((), ALL)])
async def test_each_engine_gets_a_seed_only_if_it_can_repeat_draws(
    stage: Stage, first: tuple[Exact, ...], second: tuple[Exact, ...]
) -> None:
    """A request that starts again elsewhere: some engines do not survive a seed (docs/seam.md)."""
    engines, daemons = await able(stage, [first, second])
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=0))
    body = question(PATHS[0], temperature=0.7)
    answer = await router.ask(PATHS[0], body, x_session_id=session_of("a"))
    assert answer.done
    assert [("seed" in engine.seen[0].body) for engine in engines] == ["seed" in first, "seed" in second]


async def test_an_answer_that_is_not_streamed_gets_no_seed(stage: Stage) -> None:
    """One that comes in one piece can only start again: it stays as it was asked for."""
    (engine,), daemons = await able(stage, [ALL])
    router = await stage.router([engine], daemons)
    body = question(PATHS[0], temperature=0.7, n=2, stream=False)
    assert (await router.ask(PATHS[0], body)).status == 200
    assert "seed" not in engine.seen[0].body


async def test_an_engine_with_the_shim_is_preferred(stage: Stage) -> None:
    """The other standby holds the KV, but cannot know where text and ids end together: it would refuse."""
    engines, daemons = await able(stage, [ALL, (), ALL])
    for engine in engines:
        engine.chunk_tokens = 2
    engines[1].detokenizes = False
    daemons[1].watermark = 1000
    router = await stage.router(engines, daemons, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=6))
    body = question(PATHS[1])
    answer = await router.ask(PATHS[1], body, x_session_id=session_of("a", "abc"))
    _, output, _ = generate(PATHS[1], body)
    assert (answer.done, answer.text) == (True, text_of(output))
    assert [len(engine.seen) for engine in engines] == [1, 0, 1]


async def test_abilities_of_different_engines_do_not_add_up(stage: Stage) -> None:
    """One continues output, another one draws: nobody both, and the client hears it at once."""
    engines, daemons = await able(stage, [("output",), ("seed",)])
    router = await stage.router(engines, daemons, timeouts={"failover_ms": 60_000}, failover=ELSEWHERE)
    stage.faults.append(Fault("die", after=5))
    answer = await router.ask(PATHS[0], question(PATHS[0], temperature=1, seed=3))
    assert answer.error is not None
    assert answer.error["code"] == "cannot_resume_seed"

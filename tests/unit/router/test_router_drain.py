"""Emptying an engine: who is asked to leave, when it is over, and what a watcher hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from segue_core.messages.status import DrainProgress
from segue_router.context import Context
from segue_router.conversations import Conversations
from segue_router.drain import Drains, Roll
from segue_router.engine import Engine
from segue_router.engines import Registry
from segue_router.errors import Cause, ClientError, UpstreamFailure
from segue_router.metrics import Metrics
from segue_router.settings import RouterSettings
from segue_router.stories import Stories
from segue_router.upstream import Attempt
from support.waiting import eventually

DEADLINE_S = 5.0


class FakeRequest:
    """A request that is served by engine `home`. `answers`: what it says when asked to leave, in turn."""

    def __init__(self, context: Context, home: Engine, *answers: bool | Exception) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._context = context
        self._home = home
        self._answers = list(answers)
        self._attempt = Attempt(max_event_bytes=1)
        context.begin(self)
        home.attempts.add(self._attempt)

    def stop(self) -> None:
        self.end()

    def is_on(self, engine: Engine) -> bool:
        return self._attempt in engine.attempts

    async def move_away(self, engine: Engine) -> bool:
        self.asked += 1
        await self.gate.wait()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer:
            self.end()
        return answer

    def end(self) -> None:
        self._home.attempts.discard(self._attempt)
        self._context.end(self)


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    """A router's context with engines a and b; nothing is ever sent."""
    tree = {
        "engines": [{"name": name, "url": f"http://127.0.0.1:{port}"} for name, port in (("a", 1), ("b", 2))],
        "drain": {"at_once": 2, "retry_ms": 20, "move_ms": 100},
    }
    settings = msgspec.convert(tree, RouterSettings)
    async with aiohttp.ClientSession() as session:
        registry = Registry(settings, session)
        yield Context(settings, registry, session, session, Metrics(), Stories(1), Conversations(1))


@pytest.fixture
async def drains(context: Context) -> AsyncIterator[Drains]:
    drains = Drains(context)
    yield drains
    await drains.close()


async def watched(drains: Drains, engine: Engine, wait_ms: float = 4_000) -> list[DrainProgress]:
    async with asyncio.timeout(DEADLINE_S):
        return [progress async for progress in drains.drain(engine).follow(wait_ms)]


def roll(*, at_once: int = 2) -> Roll:
    return Roll(at_once=at_once, retry_ms=100)


def some(context: Context, count: int, *answers: bool | Exception) -> list[Any]:
    return [FakeRequest(context, context.registry["a"], *(answers or (True,))) for _ in range(count)]


async def test_no_more_are_asked_together_than_allowed_and_none_twice(context: Context) -> None:
    """A thousand streams must not all be moved in the same moment."""
    one, two, three = here = some(context, 3)
    asked = roll()
    assert asked.due(here, 0) == [one, two]
    assert asked.due(here, 10_000) == []
    asked.answered(one, 0, moves=True)
    assert asked.due(here, 0) == [three], "one is leaving, two is still being asked"
    assert (asked.moved, asked.staying(here)) == (1, 0)


async def test_who_cannot_move_is_asked_again_after_a_while(context: Context) -> None:
    """Another engine may have come up; those who left are forgotten."""
    here = some(context, 2)
    asked = roll()
    asked.due(here, 0)
    for request in here:
        asked.answered(request, 0, moves=False)
    assert asked.staying(here) == 2
    assert asked.due(here, 90) == []
    assert asked.wait_ms(90) == 10
    assert asked.due(here, 100) == here
    assert asked.wait_ms(100) is None, "nothing to do until somebody answers"
    asked.answered(here[0], 110, moves=True)
    assert (asked.moved, asked.staying(here)) == (1, 1)
    asked.due(here[:1], 5_000)
    assert asked.wait_ms(5_000) is None


async def test_an_engine_is_empty_once_everybody_moved(context: Context, drains: Drains) -> None:
    """All of them, although only two at a time, and the last word says so."""
    requests = some(context, 5)
    heard = await watched(drains, context.registry["a"])
    assert heard[0] == DrainProgress("a", active=5, moved=0, staying=0, done=False)
    assert heard[-1] == DrainProgress("a", active=0, moved=5, staying=0, done=True)
    assert [request.asked for request in requests] == [1] * 5
    assert 'segue_router_drained_total{answer="moves"} 5.0' in context.metrics.text().decode()


async def test_what_cannot_move_is_waited_for(context: Context, drains: Drains) -> None:
    """It stays where it is until it ends by itself; one that breaks while it is asked counts as staying."""
    (stays,), (broken,) = some(context, 1, False), some(context, 1, RuntimeError("a defect"))
    watching = asyncio.create_task(watched(drains, context.registry["a"]))
    await eventually(lambda: stays.asked >= 2 and broken.asked >= 2, "both were asked again")
    assert drains.drain(context.registry["a"]).progress.staying == 2
    stays.end()
    broken.end()
    heard = await watching
    assert (heard[-1].done, heard[-1].moved) == (True, 0)


async def test_a_move_that_hangs_is_given_up_and_tried_again(context: Context, drains: Drains) -> None:
    """A request whose replica does not come holds up nobody for ever."""
    (slow,) = some(context, 1)
    slow.gate.clear()
    watching = asyncio.create_task(watched(drains, context.registry["a"]))
    await eventually(lambda: drains.drain(context.registry["a"]).progress.staying == 1, "one stays")
    slow.gate.set()
    assert (await watching)[-1].moved == 1
    assert slow.asked >= 2


async def test_a_deadline_says_what_is_left_and_ends_only_the_watching(
    context: Context, drains: Drains
) -> None:
    """The drain itself goes on."""
    (stays,) = some(context, 1, False, False, True)
    last = (await watched(drains, context.registry["a"], wait_ms=1))[-1]
    assert (last.active, last.done) == (1, False)
    assert "not empty within" in last.detail
    await eventually(lambda: not context.running, "nothing runs")
    assert stays.asked == 3
    assert drains.drain(context.registry["a"]).progress.moved == 1


async def test_a_watcher_that_leaves_changes_nothing(context: Context, drains: Drains) -> None:
    """And one that comes later sees the same drain."""
    (slow,) = some(context, 1)
    slow.gate.clear()
    watching = asyncio.create_task(watched(drains, context.registry["a"]))
    await eventually(lambda: slow.asked, "it was asked")
    watching.cancel()
    await asyncio.wait([watching])
    assert context.registry["a"].draining
    slow.gate.set()
    assert (await watched(drains, context.registry["a"]))[-1] == DrainProgress("a", 0, 1, 0, done=True)


async def test_a_router_that_stops_keeps_no_watcher(context: Context, drains: Drains) -> None:
    """Its shutdown does not wait for an engine to be empty."""
    some(context, 1, False)
    watching = asyncio.create_task(watched(drains, context.registry["a"]))
    await eventually(lambda: drains.drain(context.registry["a"]).progress.staying, "one stays")
    context.stopping = True
    last = (await watching)[-1]
    assert (last.done, last.detail) == (False, "the router is shutting down")


async def test_who_comes_late_is_moved_too(context: Context, drains: Drains) -> None:
    """A request that was on its way there when the drain began."""
    await watched(drains, context.registry["a"])
    (late,) = some(context, 1)
    await eventually(lambda: not context.running, "nothing runs")
    assert late.asked == 1


async def test_undrain_lets_it_serve_again_and_tells_watchers(context: Context, drains: Drains) -> None:
    """Nobody else is asked to leave, and whoever waits for an engine hears of it."""
    engine = context.registry["a"]
    (stays,) = some(context, 1, False)
    watching = asyncio.create_task(watched(drains, engine))
    waiting = asyncio.create_task(context.registry.wait_for_change(DEADLINE_S))
    await eventually(lambda: stays.asked, "it was asked")
    await drains.undrain(engine)
    last = (await watching)[-1]
    assert (last.done, last.detail) == (False, "it was undrained")
    async with asyncio.timeout(1):
        await waiting
    assert not engine.draining
    asked = stays.asked
    (late,) = some(context, 1)
    elsewhere = FakeRequest(context, context.registry["b"], False)
    drains.drain(context.registry["b"])
    await eventually(lambda: elsewhere.asked > 2, "another one is asked again, and again")
    assert (stays.asked, late.asked) == (asked, 0)
    await drains.undrain(engine)


async def test_an_engine_that_is_drained_is_offered_to_nobody(context: Context, drains: Drains) -> None:
    """New requests and takeovers go elsewhere; when there is no elsewhere, the client reads why."""
    registry = context.registry
    for engine in registry.engines:
        engine.models = {"m": {"id": "m"}}
    registry["b"].models["only-b"] = {"id": "only-b"}
    drains.drain(registry["b"])
    assert [engine.name for engine in registry.serving("m")] == ["a"]
    registry.check_open("m")
    with pytest.raises(ClientError, match="undrain") as refused:
        registry.check_open("only-b")
    assert (refused.value.status, refused.value.code) == (503, "draining")
    registry.check_open("served by nobody")
    await drains.undrain(registry["b"])
    registry.check_open("only-b")
    assert len(registry.serving("m")) == 2


@pytest.mark.parametrize("cause", ["drained", "router_stopping"])
async def test_no_engine_is_blamed_for_what_is_done_on_purpose(context: Context, cause: Cause) -> None:
    """An answer that was moved, or cut off because the router stops, says nothing of its engine."""
    engine = context.registry["a"]
    engine.health.probe_ok(0, began_ms=0)
    context.registry.failed(engine, UpstreamFailure(cause, "on purpose"))
    assert (engine.health.state, engine.health.failures) == ("up", 0)

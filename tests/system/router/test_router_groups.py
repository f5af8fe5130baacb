"""Failover of engines of several ranks: each rank has a daemon, and only what all of them hold counts."""

from __future__ import annotations

from typing import Any

from system.router.asked import COMPLETIONS, assert_uninterrupted, request
from system.router.fake_daemon import FakeDaemon
from system.router.fake_engine import FakeEngine, Fault
from system.router.harness import Client, Stage, eventually
from system.router.test_router_daemons import begin


async def groups(
    stage: Stage, *, engines: int = 2, **settings: Any
) -> tuple[list[FakeEngine], list[list[FakeDaemon]], Client]:
    """Engines of two ranks each, whose daemons have all been heard."""
    fakes = [await stage.engine() for _ in range(engines)]
    daemons = [[await stage.daemon() for _ in range(2)] for _ in fakes]
    for group in daemons:
        for rank, daemon in enumerate(group):
            daemon.say(rank=rank, ranks=2, fingerprint=f"fp{rank}")
    keys = [{"daemons": [daemon.url for daemon in group]} for group in daemons]
    client = await stage.router(fakes, each=keys, **settings)
    for engine in client.context.registry.engines:
        await eventually(lambda e=engine: e.health.daemon_state == "running", "all ranks were heard")
    return fakes, daemons, client


async def test_an_answer_goes_on_with_what_every_rank_holds(stage: Stage) -> None:
    """All daemons of the standby are promoted, with one epoch; those of the failed engine are all fenced."""
    _, daemons, client = await groups(stage)
    stage.faults.append(Fault("error_event", 10))
    body = request(COMPLETIONS)
    for group in daemons:
        group[0].watermark, group[1].watermark = 20, 12
    answer = await client.ask(COMPLETIONS, body)
    assert_uninterrupted(answer, COMPLETIONS, body)
    (move,) = (await client.story(answer.seq)).moves
    assert move.watermark == 12
    first = "ab".index(move.from_engine)
    assert [[seq for seq, _ in daemon.promoted] for daemon in daemons[1 - first]] == [[answer.seq]] * 2
    assert {promote.epoch for daemon in daemons[1 - first] for _, promote in daemon.promoted} == {2}
    for daemon in daemons[first]:
        await eventually(lambda d=daemon: d.fenced == [(answer.seq, 2)], "every rank is fenced")


async def test_a_rank_that_is_missing_leaves_nothing_to_restore(stage: Stage) -> None:
    """The standby computes all of it; a third engine whose ranks are all there would be preferred."""
    engines, daemons, client = await groups(stage)
    stage.faults.append(Fault("silent", 5))
    body = request(COMPLETIONS)
    for group in daemons:
        for daemon in group:
            daemon.watermark = 20
    asking, first = await begin(client, engines, body)
    await daemons[1 - first][1].stop()
    other = client.context.registry.engines[1 - first]
    await eventually(lambda: other.health.daemon_state == "absent", "its silence is noticed")
    daemons[first][1].say(state="dead")
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    (move,) = (await client.story(answer.seq)).moves
    assert (move.detected_by, move.watermark) == ("daemon_dead", 0)


async def test_a_rank_promoted_by_another_router_costs_a_higher_epoch(stage: Stage) -> None:
    """One rank refuses: the next epoch goes to all ranks, so that they never have two writers."""
    engines, daemons, client = await groups(stage)
    stage.faults.append(Fault("silent", 5))
    body = request(COMPLETIONS)
    for group in daemons:
        for daemon in group:
            daemon.watermark = 20
    asking, first = await begin(client, engines, body)
    attempts = client.context.registry.engines[first].attempts
    await eventually(lambda: any(attempt.delivered for attempt in attempts), "the answer has begun")
    (seq,) = (name for attempt in attempts for name in attempt.delivered)
    daemons[1 - first][1].epochs[seq] = 7
    daemons[first][0].say(state="dead")
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    assert [daemon.promoted[-1][1].epoch for daemon in daemons[1 - first]] == [8, 8]


async def test_daemons_in_the_wrong_order_are_noticed(stage: Stage) -> None:
    """Rank 1's daemon configured as rank 0's: one clear warning, an engine without protection, no harm."""
    engine, daemons = await stage.engine(), [await stage.daemon() for _ in range(2)]
    for rank, daemon in enumerate(daemons):
        daemon.say(rank=1 - rank, ranks=2)
    keys = [{"daemons": [daemon.url for daemon in daemons]}]
    client = await stage.router([engine], each=keys)
    health = client.context.registry.engines[0].health
    await eventually(lambda: health.daemon_state == "absent", "its daemons do not speak for it")
    assert "rank 1 of 2" in health.last_status.detail  # type: ignore[union-attr]
    body = request(COMPLETIONS)
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)

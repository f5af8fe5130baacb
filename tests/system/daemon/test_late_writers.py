"""Whoever wakes up after its sequences went on elsewhere changes nothing anywhere, and says that it knows.

Three daemons; the old writer is at a, the new one at b, and c only holds replicas. Nobody writes to a, so
that it learns nothing but from the answers to what it ships.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.daemons import DaemonSet
from support.engine_process import EngineProcess
from support.light_engine import LightEngine
from support.link_proxy import LinkProxy
from support.waiting import wait_for

PROMPT = 40


@dataclass
class Stage:
    """`old` is the engine at a, in a process of its own; `new` the one at b. `ways`: from a to the others."""

    daemons: DaemonSet
    ways: dict[str, LinkProxy]
    old: EngineProcess
    new: LightEngine

    def sequence(self, name: str, seq: str) -> dict[str, object]:
        """What daemon `name` says of it."""
        body: dict[str, object] = self.daemons[name].get(f"/v1/sequences/{seq}")[1]
        return body

    def links_of_a(self) -> list[bool]:
        return [peer["connected"] for peer in self.daemons["a"].status()["peers"]]

    def sent_by_a(self) -> list[int]:
        return [peer["sent_bytes"] for peer in self.daemons["a"].status()["peers"]]

    def held_by_others(self) -> list[str]:
        """The whole replica memory of b and c, as digests."""
        return [digest_of_replicas(self.daemons[name].process.pid) for name in "bc"]  # type: ignore[union-attr]


def digest_of_replicas(pid: int) -> str:
    """Of every byte that a daemon could hand out."""
    folder = Path(f"/proc/{pid}/fd")
    (arena,) = [fd for fd in folder.iterdir() if "segue-replicas" in os.readlink(fd)][:1]
    return hashlib.blake2b(arena.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    daemons = DaemonSet("a", "b", "c", replication={"replicas": 2}, timeouts={"peer_ms": 1000})
    ways = {"b": LinkProxy(), "c": LinkProxy()}
    for peer in daemons["a"].config["peers"]:
        port = int(peer["control"].rpartition(":")[2])
        peer["control"] = f"127.0.0.1:{ways[peer['name']].way_to(port)}"
    for name in "bc":
        peers = daemons[name].config["peers"]
        peers[:] = [peer for peer in peers if peer["name"] != "a"]
    old: EngineProcess | None = None
    try:
        daemons.start()
        old = EngineProcess(daemons["a"].socket, "a", incarnation=1)
        new = LightEngine(daemons["b"].socket, "b", incarnation=2)
        wait_for(lambda: new.exporter.registered, "the engine at b is registered")
        yield Stage(daemons, ways, old, new)
        new.close()
    finally:
        if old is not None:
            old.send(signal.SIGCONT)
            old.kill()
        for way in ways.values():
            way.close()
        daemons.stop()


def stop_engine(stage: Stage) -> Callable[[], None]:
    """SIGSTOP to the old engine; returns how to undo it."""
    stage.old.send(signal.SIGSTOP)
    return lambda: stage.old.send(signal.SIGCONT)


def stop_daemon(stage: Stage) -> Callable[[], None]:
    """SIGSTOP to the old daemon, whose engine decodes on."""
    stage.daemons["a"].send(signal.SIGSTOP)
    stage.old.step(3)
    return lambda: stage.daemons["a"].send(signal.SIGCONT)


def stop_both(stage: Stage) -> Callable[[], None]:
    """SIGSTOP to both, with tokens between them that the daemon has not seen."""
    undo = stop_daemon(stage), stop_engine(stage)
    return lambda: [each() for each in undo] and None


def cut_off(stage: Stage) -> Callable[[], None]:
    """Nobody is stopped: the network from a to the others is gone, and a's engine decodes on."""
    for way in stage.ways.values():
        way.cut()
    stage.old.step(3)
    wait_for(lambda: stage.links_of_a() == [False, False], "a is alone")
    return lambda: [way.heal() for way in stage.ways.values()] and None


def stop_daemon_and_forget(stage: Stage) -> Callable[[], None]:
    """As `stop_daemon`; the daemon of the new writer is restarted before the old one wakes up, and is the
    only one that it reaches then: the fence and every replica there are forgotten."""
    undo = stop_daemon(stage)
    stage.ways["c"].cut()
    return undo


@pytest.mark.parametrize("fail", [stop_engine, stop_daemon, stop_both, cut_off, stop_daemon_and_forget])
def test_a_writer_that_wakes_up_late_changes_nothing_and_knows(
    stage: Stage, fail: Callable[[Stage], Callable[[], None]]
) -> None:
    """Every byte at the new writer's daemon and at a third one stays; the old daemon stops shipping and
    reports the sequence as fenced, although its engine computes on."""
    daemons, old, new = stage.daemons, stage.old, stage.new
    seq, probe = f"s-{fail.__name__}", f"probe-{fail.__name__}"
    wait_for(lambda: all(stage.links_of_a()), "a is connected")
    old.start(seq, PROMPT)
    old.start(probe, 8, "off")  # stays at a: it tells how far a has read its engine's journal
    for name in "bc":
        wait_for(lambda n=name: daemons[n].watermark(seq) == PROMPT, f"replicated to {name}")
    wake = fail(stage)
    try:
        assert daemons["b"].get(f"/v1/sequences/{seq}/promote", {"epoch": 2})[0] == 200
        assert new.resume(seq, [*range(PROMPT), 77, 78], 2) == PROMPT
        new.step()
        if fail is stop_daemon_and_forget:
            daemons["b"].stop(signal.SIGKILL)
            daemons["b"].start()
            wait_for(lambda: new.exporter.registered, "registered again")
            new.live[seq].ids.append(79)
            new.step()
        have = new.live[seq].computed
        wait_for(lambda: stage.sequence("b", seq).get("computed") == have, "b follows the new writer")
        wait_for(lambda: stage.sequence("c", seq).get("epoch") == 2, "c has the new writer's replica")
        wait_for(lambda: daemons["c"].watermark(seq) == have, "all of it")
        before = stage.held_by_others()
    finally:
        wake()
    old.step(5)
    computed = int(str(stage.sequence("a", probe)["computed"]))
    wait_for(lambda: daemons["a"].status()["engine"]["fenced"] == 1, "a knows")
    sent = stage.sent_by_a()
    old.step(5)
    wait_for(lambda: int(str(stage.sequence("a", probe)["computed"])) >= computed + 5, "a reads on")
    said = stage.sequence("a", seq)
    assert (said["role"], said["epoch"]) == ("fenced", 2), said
    assert stage.sent_by_a() == sent and stage.held_by_others() == before
    assert stage.sequence("b", seq)["epoch"] == 2 and daemons["c"].watermark(seq) == have
    assert new.wrong_tokens(seq) == []
    for name in (seq, probe):
        old.finish(name)
    new.finish(seq)
    new.step()
    for way in stage.ways.values():
        way.heal()
    wait_for(lambda: daemons["a"].status()["engine"]["sequences"] == 0, "over")


def test_a_third_daemon_refuses_the_old_writer_too(stage: Stage) -> None:
    """It holds only the old replica, and was never promoted: it heard from the daemon that was."""
    daemons, old, seq = stage.daemons, stage.old, "s-third"
    wait_for(lambda: all(stage.links_of_a()), "a is connected")
    old.start(seq, PROMPT)
    for name in "bc":
        wait_for(lambda n=name: daemons[n].watermark(seq) == PROMPT, f"replicated to {name}")
    assert daemons["b"].get(f"/v1/sequences/{seq}/promote", {"epoch": 2})[0] == 200
    wait_for(lambda: stage.sequence("c", seq)["epoch"] == 2, "c has heard")
    before = stage.held_by_others()
    stage.ways["b"].cut()  # what a learns it learns from c
    try:
        old.step(3)
        wait_for(lambda: daemons["a"].status()["engine"]["fenced"] == 1, "a knows")
    finally:
        stage.ways["b"].heal()
    assert stage.held_by_others() == before and daemons["c"].watermark(seq) == PROMPT
    old.finish(seq)
    wait_for(lambda: daemons["a"].status()["engine"]["sequences"] == 0, "over")

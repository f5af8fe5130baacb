"""Two real daemons, engines with real shared memory: what one engine computes, the other can load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from segue_shim.plan import pack_u32
from support.daemons import DaemonSet
from support.light_engine import LightEngine
from support.waiting import wait_for


@pytest.fixture
def pair() -> Iterator[DaemonSet]:
    daemons = DaemonSet("a", "b")
    try:
        yield daemons.start()
    finally:
        daemons.stop()


def engine(daemons: DaemonSet, name: str, incarnation: int = 1, **options: object) -> LightEngine:
    found = LightEngine(daemons[name].socket, name, incarnation=incarnation, **options)  # type: ignore[arg-type]
    wait_for(lambda: found.exporter.registered, "engine registered")
    return found


@pytest.mark.parametrize("slots", [False, True], ids=["opaque", "slots"])
def test_every_token_arrives_and_can_be_loaded(pair: DaemonSet, slots: bool) -> None:
    """Prefill and decode reach the peer to the last token; another engine goes on from there."""
    a = engine(pair, "a", slots=slots)
    b = engine(pair, "b", slots=slots)
    ids = [7 * i % 251 for i in range(37)]
    live = a.start("s", ids)
    a.step(chunk=16)
    for token in range(30):
        a.step(chunk=16)
        if live.computed == len(live.ids):
            live.ids.append(token)
    a.step()
    have = live.computed
    wait_for(lambda: pair["b"].watermark("s") == have, f"all {have} tokens at b")
    wait_for(lambda: pair["a"].watermark("s") == have, "acked")
    status, promoted = pair["b"].get("/v1/sequences/s/promote", {"epoch": 2, "want_tokens": have})
    assert (status, promoted["watermark"]) == (200, have)
    assert b.resume("s", [*live.ids, 99], 2) == have
    b.step()
    assert b.live["s"].computed == have + 1
    assert b.wrong_tokens("s") == []
    a.close()
    b.close()


def test_blocks_reused_by_somebody_else_are_never_taken_for_the_old_ones(pair: DaemonSet) -> None:
    """An engine with few blocks hands them from one sequence to the next: each replica stays right."""
    a = engine(pair, "a", num_blocks=9)
    b = engine(pair, "b")
    for number in range(12):
        live = a.start(f"s{number}", [(number * 50 + i) % 997 for i in range(40)])
        a.step(chunk=13)
        for _ in range(20):
            if live.computed == len(live.ids):
                live.ids.append(len(live.ids))
            a.step(chunk=13)
        wait_for(lambda s=f"s{number}", n=live.computed: pair["b"].watermark(s) == n, "watermark")
        assert b.resume(f"s{number}", [*live.ids, 1], 2) == live.computed
        b.step()
        assert b.wrong_tokens(f"s{number}") == []
        b.finish(f"s{number}")
        a.finish(f"s{number}")
    a.step()
    b.step()
    wait_for(lambda: pair["b"].status()["store"]["replicas"] == 0, "replicas freed")
    a.close()
    b.close()


def test_a_fenced_writer_changes_nothing(pair: DaemonSet) -> None:
    """After a promotion the old engine may decode on: the replica does not move, and it is told so."""
    a = engine(pair, "a")
    live = a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    assert pair["b"].get("/v1/sequences/s/promote", {"epoch": 5})[1]["watermark"] == 20
    for token in range(10):
        live.ids.append(token)
        a.step()
    wait_for(lambda: pair["a"].get("/v1/sequences/s")[1]["role"] == "fenced", "the old daemon says so")
    assert pair["b"].watermark("s") == 20
    assert pair["a"].get("/v1/sequences/s")[1]["epoch"] == 5
    status, body = pair["b"].get("/v1/sequences/s/promote", {"epoch": 5})
    assert status == 409 and "epoch 5" in body["error"]
    a.close()


def test_a_writer_that_holds_the_new_writers_replica_knows_that_it_is_fenced(pair: DaemonSet) -> None:
    """Nobody needs to tell it: what arrives for the sequence has a higher epoch than its own engine's."""
    a, b = engine(pair, "a"), engine(pair, "b")
    a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    assert b.resume("s", list(range(21)), 2) == 20
    b.step()
    wait_for(lambda: pair["a"].status()["engine"]["fenced"] == 1, "fenced")
    body = pair["a"].get("/v1/sequences/s")[1]
    assert (body["role"], body["epoch"], body["watermark"]) == ("replica", 2, 21)
    a.close()
    b.close()


def test_a_writer_whose_sequence_was_promoted_elsewhere_hears_of_it(pair: DaemonSet) -> None:
    """Also if it ships nothing that could be refused: the daemon that was promoted tells its peers."""
    a = engine(pair, "a")
    a.start("s", list(range(20)), replication="off")
    a.step()
    wait_for(lambda: pair["a"].get("/v1/sequences/s")[0] == 200, "known")
    assert pair["b"].get("/v1/sequences/s/promote", {"epoch": 2})[0] == 200
    wait_for(lambda: pair["a"].status()["engine"]["fenced"] == 1, "fenced")
    a.close()


def test_the_epoch_of_a_new_writer_replaces_the_old_replica(pair: DaemonSet) -> None:
    """A sequence that came back with a higher epoch is replicated again."""
    a = engine(pair, "a")
    a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    a.finish("s")
    a.start("s", list(range(33)), epoch=3)
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 33, "replicated under the new epoch")
    assert pair["b"].get("/v1/sequences/s")[1]["epoch"] == 3
    a.close()


def test_shared_prefixes_cross_the_wire_once(pair: DaemonSet) -> None:
    """A system prompt that many requests share is not sent again for each of them."""
    a = engine(pair, "a", num_blocks=200)
    prefix = list(range(320))
    a.start("first", prefix)
    a.step()
    wait_for(lambda: pair["b"].watermark("first") == 320, "first replicated")
    sent = pair["a"].status()["peers"][0]["sent_bytes"]
    a.start("second", [*prefix, 1, 2, 3])
    a.step()
    wait_for(lambda: pair["b"].watermark("second") == 323, "second replicated")
    again = pair["a"].status()["peers"][0]["sent_bytes"] - sent
    assert again < sent / 8, f"{again} bytes for a prefix of {sent}"
    a.close()


ENGINE_PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from support.light_engine import LightEngine
from support.waiting import wait_for
engine = LightEngine({socket!r}, "a", incarnation=int(sys.argv[1]), num_blocks=64)
wait_for(lambda: engine.exporter.registered, "registered")
live = engine.start("s", list(range(100)))
engine.step()
for token in range(int(sys.argv[2])):
    live.ids.append(token); engine.step()
print("ready", live.computed, flush=True)
for line in sys.stdin:
    live.ids.append(1); engine.step()
"""


def start_engine(pair: DaemonSet, incarnation: int, decode: int = 20) -> subprocess.Popen[str]:
    tests = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    program = ENGINE_PROGRAM.format(tests=tests, socket=pair["a"].socket)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(incarnation), str(decode)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    return process


def step(process: subprocess.Popen[str], count: int) -> None:
    """Let the engine decode so many tokens."""
    assert process.stdin is not None
    process.stdin.write("step\n" * count)
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_a_killed_engine_is_salvaged_and_its_memory_let_go(pair: DaemonSet) -> None:
    """What was not acked when the engine died is shipped from the mapping; then the memory is released,
    and a restarted engine is protected again."""
    process = start_engine(pair, 1, decode=0)
    wait_for(lambda: pair["b"].watermark("s") == 100, "the prompt at b")
    pair["b"].send(signal.SIGSTOP)
    step(process, 20)
    wait_for(lambda: pair["a"].get("/v1/sequences/s")[1]["computed"] == 120, "twenty tokens more")
    pair["b"].send(signal.SIGCONT)
    end(process)
    wait_for(lambda: pair["a"].status()["engine"]["state"] == "dead", "death noticed")
    wait_for(lambda: pair["b"].watermark("s") == 119 + 1, "salvaged to the last token")
    wait_for(lambda: not mapped_pages(pair, "a"), "engine memory unmapped")
    again = start_engine(pair, 2, decode=5)
    wait_for(lambda: pair["a"].status()["engine"]["incarnation"] == 2, "the restarted engine registers")
    end(again)


def test_salvage_ships_tokens_that_were_not_due_yet() -> None:
    """Where tails are sent every 64 tokens, the last ones still reach the peer when the engine is killed."""
    daemons = DaemonSet("a", "b", replication={"sync_every_tokens": 64})
    try:
        process = start_engine(daemons.start(), 1, decode=0)
        wait_for(lambda: daemons["b"].watermark("s") == 100, "the prompt at b")
        step(process, 3)
        wait_for(lambda: daemons["a"].get("/v1/sequences/s")[1]["computed"] == 103, "three tokens more")
        assert daemons["b"].watermark("s") == 100, "not due yet"
        end(process)
        wait_for(lambda: daemons["b"].watermark("s") == 103, "salvaged to the last token")
    finally:
        daemons.stop()


def mapped_pages(daemons: DaemonSet, name: str) -> list[str]:
    """Mappings of torch's shared memory (the engine's pages) in the daemon."""
    process = daemons[name].process
    assert process is not None
    with open(f"/proc/{process.pid}/maps") as maps:
        return [line for line in maps if "torch_" in line]


def test_a_killed_daemon_leaves_the_engine_unharmed_and_takes_over_again(pair: DaemonSet) -> None:
    """The engine serves on without its daemon; the restarted one knows every live sequence."""
    a = engine(pair, "a")
    live = a.start("s", list(range(50)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 50, "replicated")
    pair["a"].stop(signal.SIGKILL)
    for token in range(10):
        live.ids.append(token)
        a.step()
    pair["a"].start()
    wait_for(lambda: a.exporter.registered, "registered again")

    def goes_on() -> bool:
        live.ids.append(1)
        a.step()
        return pair["b"].watermark("s") > 60

    wait_for(goes_on, "protected again")
    have = live.computed
    wait_for(lambda: pair["b"].watermark("s") == have, "caught up")
    b = engine(pair, "b")
    assert b.resume("s", [*live.ids, 1], 2) == have
    b.step()
    assert b.wrong_tokens("s") == []
    a.close()
    b.close()


def test_a_restarted_peer_is_another_peer(pair: DaemonSet) -> None:
    """A peer that lost its memory is filled again from the start."""
    a = engine(pair, "a")
    live = a.start("s", list(range(50)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 50, "replicated")
    pair["b"].stop(signal.SIGKILL)
    pair["b"].start()
    live.ids.append(7)
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 51, "replicated again")
    a.close()


def test_no_descriptor_leaks_over_many_engines(pair: DaemonSet) -> None:
    """Engines come and go; the daemon's descriptors do not add up."""
    for incarnation in range(1, 4):
        a = engine(pair, "a", incarnation)
        a.start("s", list(range(30)))
        a.step()
        a.close()
        wait_for(lambda: pair["a"].status()["engine"]["state"] == "absent", "gone")
        wait_for(lambda: not mapped_pages(pair, "a"), "unmapped")
        if incarnation == 1:
            before = pair.open_files("a")
    wait_for(lambda: pair.open_files("a") <= before, "descriptors closed")


def test_a_living_engine_that_hangs_up_is_not_salvaged(pair: DaemonSet) -> None:
    """Its pages go on changing and nobody says how: what was not acked by then is worth nothing."""
    a = engine(pair, "a", num_blocks=2000)
    pair["b"].send(signal.SIGSTOP)
    a.start("s", list(range(12_000)))
    a.step(chunk=12_000)
    wait_for(lambda: pair["a"].get("/v1/sequences/s")[1]["computed"] == 12_000, "computed")
    a.exporter.close()
    wait_for(lambda: pair["a"].status()["engine"]["state"] == "absent", "gone, but not dead")
    assert not mapped_pages(pair, "a")
    a.pages.fill_(0x5555)
    pair["b"].send(signal.SIGCONT)
    b = engine(pair, "b", num_blocks=2000)
    loaded = b.resume("s", [*range(12_000), 1], 2)
    b.step()
    assert b.wrong_tokens("s") == [], f"{loaded} tokens loaded"
    b.close()


def test_a_lease_outlives_the_connection_that_asked_for_it(pair: DaemonSet) -> None:
    """A load that is under way keeps its blocks until the deadline, whatever became of the connection."""
    a = engine(pair, "a")
    b = engine(pair, "b")
    a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    ids = pack_u32(range(21))
    assert b.client.match(seq="s", epoch=2, salt=b"", token_ids=ids, computed=0, limit=20)
    b.client.close()
    pair["b"].get("/livez")
    assert pair["b"].status()["store"]["leases"] == 1
    a.close()
    b.close()


def test_a_window_smaller_than_a_delta_still_lets_everything_through() -> None:
    """The writer cuts its deltas to what the peer lets it have under way."""
    daemons = DaemonSet("a", "b", replication={"window_bytes": 1 << 20, "delta_bytes": 1 << 25})
    try:
        a = engine(daemons.start(), "a", num_blocks=3000)
        a.start("s", list(range(20_000)))
        a.step(chunk=20_000)
        wait_for(lambda: daemons["b"].watermark("s") == 20_000, "all of it")
        assert daemons["a"].status()["peers"][0]["sent_bytes"] < 6 << 20, "sent once"
        a.close()
    finally:
        daemons.stop()


def test_a_fenced_sequence_leaves_nothing_behind(pair: DaemonSet) -> None:
    """Failovers come and go; the old owner's daemon does not collect what it lost."""
    a = engine(pair, "a")
    for number in range(5):
        name = f"s{number}"
        a.start(name, list(range(20)))
        a.step()
        wait_for(lambda n=name: pair["b"].watermark(n) == 20, "replicated")
        assert pair["a"].get(f"/v1/sequences/{name}/fence", {"epoch": 2})[0] == 200
        wait_for(lambda n=name: a.exporter._fenced or n in a.live, "the engine is told")
        a.step()
        a.finish(name)
        a.step()
    wait_for(lambda: pair["a"].status()["engine"]["sequences"] == 0, "forgotten at a")
    wait_for(lambda: pair["b"].status()["store"]["replicas"] == 0, "freed at b")
    a.close()


def test_what_its_client_keeps_back_never_leaves_the_engine(pair: DaemonSet) -> None:
    """`off`: the daemon follows it, and can be asked how far it is, but no peer gets any of it, also not when
    the engine dies; whoever goes on with it computes everything."""
    a, b = engine(pair, "a"), engine(pair, "b")
    kept = a.start("kept", list(range(100)), replication="off")
    a.start("copied", list(range(1000, 1100)))
    a.step()
    kept.ids.append(7)
    a.step()
    wait_for(lambda: pair["b"].watermark("copied") == 100, "the other one arrives")
    wait_for(lambda: pair["a"].get("/v1/sequences/kept")[1]["computed"] == 101, "it is followed")
    assert pair["a"].get("/v1/sequences/kept")[1]["watermark"] == 0
    copies = pair["a"].status()["copies"]
    assert (copies["wanted"], copies["placed"], copies["achieved"]) == (1, 1, 1)
    assert b.resume("kept", [*kept.ids, 1], 2) == 0
    assert pair["b"].get("/v1/sequences/kept")[0] == 404
    a.close()
    b.close()

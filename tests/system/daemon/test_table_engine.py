"""Real daemons and an engine that only publishes its tables: what it computed goes on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.daemons import DaemonSet
from support.table_engine import TableEngine
from support.waiting import wait_for

BUSY = ("long", "short", "fits")
ENGINE_PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from support.table_engine import TableEngine
from support.waiting import wait_for
engine = TableEngine({socket!r}, "a", incarnation=1, num_blocks=40)
wait_for(lambda: engine.exporter.registered, "registered", timeout_s=60)
for seq, tokens in {prompts!r}.items():
    engine.start(seq, list(range(tokens)))
for number in range(40):
    engine.step(chunk=16)
    for seq in {prompts!r}:
        live = engine.live[seq]
        if live.computed == len(live.ids):
            live.ids.append(len(live.ids))
    if number % 5 == 4:
        others = [seq for seq in engine.live if seq.startswith("other")]
        for seq in others:
            engine.finish(seq)
        engine.start(f"other{{number}}", list(range(1000 + number, 1030 + number)))
    if number == 20:
        engine.preempt("short")
        engine.step(but="short")
print("ready", *(engine.live[seq].computed for seq in {prompts!r}), flush=True)
while True:
    engine.publish()
    if sys.stdin.readline().startswith("go"):
        break
while True:
    engine.step()
    for seq in {prompts!r}:
        if len(engine.live[seq].ids) < 78:
            engine.live[seq].ids.append(len(engine.live[seq].ids))
    for seq in [seq for seq in engine.live if seq.startswith("other")]:
        engine.finish(seq)
    engine.start(f"other{{engine.steps}}", list(range(1000 + engine.steps, 1030 + engine.steps)))
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[DaemonSet]:
    daemons = DaemonSet("a", "b")
    try:
        yield daemons.start()
    finally:
        daemons.stop()


def test_a_killed_engine_that_only_publishes_tables_goes_on_elsewhere(pair: DaemonSet) -> None:
    """Blocks go from hand to hand without notice, one sequence is preempted, and the engine is killed in the
    middle: every token that the peer counts can be loaded, and is what the engine had."""
    tests = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    prompts = dict(zip(BUSY, (41, 9, 16), strict=True))
    program = ENGINE_PROGRAM.format(tests=tests, socket=pair["a"].socket, prompts=prompts)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        ready, *computed = process.stdout.readline().split()
        assert ready == "ready"
        said = dict(zip(BUSY, map(int, computed), strict=True))

        def confirmed() -> bool:
            process.stdin.write("publish\n")
            process.stdin.flush()
            return {seq: pair["b"].watermark(seq) for seq in BUSY} == said

        wait_for(confirmed, "the last tokens are confirmed by saying the same again", timeout_s=60)
        process.stdin.write("go\n")
        process.stdin.flush()
        wait_for(
            lambda: all(pair["b"].watermark(seq) > said[seq] for seq in BUSY), "all decode on", timeout_s=60
        )
    finally:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
    wait_for(lambda: pair["a"].status()["engine"]["state"] == "dead", "death noticed", timeout_s=60)
    b = TableEngine(pair["b"].socket, "b", incarnation=2)
    wait_for(lambda: b.exporter.registered, "engine registered", timeout_s=60)
    b.publish()
    for seq in BUSY:
        status, promoted = pair["b"].get(f"/v1/sequences/{seq}/promote", {"epoch": 2})
        assert status == 200 and promoted["watermark"] > said[seq]
        ids = [*range(promoted["watermark"]), 99]
        assert b.resume(seq, ids, 2) == promoted["watermark"]
    b.step()
    assert {seq: b.wrong_tokens(seq) for seq in BUSY} == {seq: [] for seq in BUSY}
    b.close()


def test_its_tables_are_announced_anew_to_a_restarted_daemon(pair: DaemonSet) -> None:
    """The engine publishes on without its daemon; the next one knows every live sequence, and the peer
    catches up."""
    a = TableEngine(pair["a"].socket, "a", incarnation=3)
    live = a.start("s", list(range(50)))

    def publish_until(tokens: int) -> None:
        def there() -> bool:
            a.publish()
            return pair["b"].watermark("s") == tokens

        wait_for(there, f"{tokens} tokens at b", timeout_s=60)

    wait_for(lambda: a.exporter.registered, "engine registered", timeout_s=60)
    a.step()
    publish_until(50)
    pair["a"].stop(signal.SIGKILL)
    for _ in range(10):
        live.ids.append(7)
        a.step()
    pair["a"].start()
    wait_for(lambda: a.exporter.registered, "registered again", timeout_s=60)
    publish_until(60)
    a.close()

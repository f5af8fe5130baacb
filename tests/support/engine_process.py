"""A light engine in a process of its own, that can be killed and stopped; driven line by line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from support.light_engine import LightEngine
from support.waiting import wait_for
engine = LightEngine({socket!r}, {name!r}, incarnation={incarnation}, num_blocks=400)
wait_for(lambda: engine.exporter.registered, "registered")
print("ready", flush=True)
for line in sys.stdin:
    verb, *values = line.split()
    if verb == "start":
        engine.start(values[0], list(range(int(values[1]))), replication=values[2])
        engine.step()
    elif verb == "finish":
        engine.finish(values[0])
        engine.step()
    else:
        for _ in range(int(values[0])):
            for live in engine.live.values():
                live.ids.append(1)
            engine.step()
    print("done", flush=True)
"""


class EngineProcess:
    """The engine `name` beside the daemon at `socket`; returns once it is registered there. Sequences begin
    with the ids 0, 1, 2 and so on; every decoded token is a 1."""

    def __init__(self, socket: str, name: str, incarnation: int) -> None:
        tests = str(Path(__file__).parent.parent)
        program = PROGRAM.format(tests=tests, socket=socket, name=name, incarnation=incarnation)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._expect("ready")

    def start(self, seq: str, tokens: int, replication: str = "normal") -> None:
        """A sequence whose prompt of so many tokens is computed at once."""
        self.say(f"start {seq} {tokens} {replication}")
        self._expect("done")

    def step(self, count: int = 1) -> None:
        """Every sequence decodes `count` tokens."""
        self.say(f"step {count}")
        self._expect("done")

    def finish(self, seq: str) -> None:
        self.say(f"finish {seq}")
        self._expect("done")

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == word + "\n"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; safe to call twice."""
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

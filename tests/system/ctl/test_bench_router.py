"""`seguectl bench router` with real proxies and a tiny load: what it prints and what it leaves behind.

How fast anything is, is not judged here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from segue_ctl.commands import console_script
from support.waiting import wait_for

DEADLINE_S = 60.0
TINY = ("--streams", "3", "--tokens", "6", "--rate", "2000", "--rounds", "2")


def command(*arguments: str) -> list[str]:
    return [console_script("seguectl"), "bench", "router", *arguments]


def test_the_document_has_every_way_and_every_token() -> None:
    """JSON alone on standard output, progress on standard error; each measured token was counted once a
    round, which the run itself refuses to end without."""
    done = subprocess.run(
        command(*TINY, "--json", "-"), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    for way in ("direct", "passthrough", "segue"):
        figures = document[way]
        assert figures["events"] == figures["paced_events"] == 2 * 3 * (6 - 2)
        assert figures["tokens_per_s"] > 0 and figures["ttft_ms_p50"] > 0
        assert {"added_itl_ms_p50", "added_itl_ms_p99", "cpu_us_per_event"} <= figures.keys()
    assert document["direct"]["added_itl_ms_p50"] == 0
    assert document["direct"]["tokens_per_cpu_s"] is None
    assert "round 2 of 2" in done.stderr


def test_interrupted_it_ends_what_it_started() -> None:
    """Ctrl-C in the middle: the shell's status for it, no table, and neither proxy lives on."""
    endless = command("--streams", "2", "--tokens", "50", "--rounds", "1000000")
    bench = subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert bench.stderr is not None
        assert "round 1 of" in bench.stderr.readline()
        started = children(bench.pid)
        assert len(started) >= 2, started
        bench.send_signal(signal.SIGINT)
        out, _ = bench.communicate(timeout=DEADLINE_S)
    finally:
        bench.kill()
        bench.communicate()
    assert bench.returncode == 130
    assert not out
    wait_for(lambda: not any(map(alive, started)), f"{started} have ended", timeout_s=DEADLINE_S)


def children(pid: int) -> list[int]:
    """Pids of the processes that `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_is_found_in_the_help() -> None:
    """What each figure means is a question away."""
    done = subprocess.run(command("--help"), capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert "added_itl_ms_p99" in done.stdout and "45,000" in done.stdout
    assert sys.executable not in done.stdout

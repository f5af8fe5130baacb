"""`tests/gpu/run.sh` on the driver's double: it runs, its table is whole, and it notices what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.busy import no_torch
from gpu.ends import Bench
from gpu.rows import Row, equal, failed, is_well, measured, not_run, table
from gpu.shapes import large
from gpu.stages import STAGES, share
from support import cuda_double

SCRIPT = Path(__file__).with_name("run.sh")
RUN_S = 100


@pytest.fixture(scope="module")
def library() -> Path:
    """Where the built double lies."""
    return cuda_double.required()


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, with this Python."""
    environment = os.environ | {"PYTHON": sys.executable} | variables
    command = [str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )


def test_the_script_tries_everything(library: Path, tmp_path: Path) -> None:
    """On a machine with a GPU one command shows all of it. Here it finds the double where it looks for the
    driver."""
    if not no_torch():
        pytest.skip("the double does not do for a torch with CUDA")
    file = tmp_path / "gpu.json"
    small = ("--mib", "16", "--seconds", "0.05", "--json", str(file))
    done = run(*small, LD_LIBRARY_PATH=str(library))
    assert done.returncode == 0, done.stdout + done.stderr
    written: dict[str, Any] = json.loads(file.read_text())
    assert written["well"] and not written["double"]
    rows = {(row["part"], row["what"]): row for row in written["rows"]}
    outcomes = {part: {row["outcome"] for (of, _), row in rows.items() if of == part} for part in STAGES}
    assert outcomes == {
        "conformance": {"equal"},
        "share": {"equal"},
        "speed": {"measured"},
        "tier": {"equal", "measured"},
        "beside": {"measured", "NOT RUN"},
        "torch": {"NOT RUN"},
        "killed": {"equal"},
    }
    assert sum(part == "share" for part, _ in rows) == 8  # blocks, tails, loads, release by both kinds
    speeds = [row["figures"] for (part, _), row in rows.items() if part == "speed"]
    assert len(speeds) == 9 and all(min(found.values()) > 0 for found in speeds)
    assert "Test double" in done.stdout and "!! NOT RUN (3)" in done.stdout


def test_the_double_is_named_in_the_table(library: Path) -> None:
    """Nobody takes its figures for a GPU's."""
    done = run("--double", "torch")
    assert done.returncode == 0 and "figures mean nothing" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Silence is never taken for success."""
    done = run("share", LD_LIBRARY_PATH="")
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2 and "no NVIDIA GPU" in done.stderr
    assert run(PYTHON=str(tmp_path / "none")).returncode == 2


def test_other_bytes_are_noticed(library: Path) -> None:
    """A comparison that cannot fail would show nothing."""
    shape = large(8)
    size = (shape.slots, shape.slot_bytes, shape.blocks)
    with Bench(library, True, 8, 0.01).pair() as (engine, daemon):
        share(engine, daemon, "cuda_ipc", shape)
        assert daemon.call("compare", *size) and daemon.call("compare_tails", *size)
        assert engine.call("load")["equal"]  # other content, in the same place
        assert not daemon.call("compare", *size) and not daemon.call("compare_tails", *size)


GOOD = (equal("share", "a", True), measured("speed", "b", "1 GB/s"), not_run("torch", "c", "no torch"))


@pytest.mark.parametrize(
    "bad",
    [
        equal("share", "x", False),
        failed("share", "x", "it broke"),
        not_run("share", "x", "no way", required=True),
    ],
)
def test_what_is_not_well_shows_in_the_exit_status_and_the_table(bad: Row) -> None:
    """One bad row is enough; what may be left out is named all the same."""
    assert is_well(GOOD) and not is_well([*GOOD, bad]) and not is_well([])
    said = table([*GOOD, bad])
    assert bad.outcome in said and "torch: c" in said.splitlines()[-1]

"""The scheduler half of the shim inside vLLM's own scheduler and prefix cache: see schedule_fuzz.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

HERE = Path(__file__).parent


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "schedule_fuzz.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.usefixtures("model")
def test_no_token_is_claimed_whose_kv_is_not_there() -> None:
    """Whatever arrives, ends, is preempted, taken over, fails to load or is drafted in vain, in every mode:
    what may be shipped is what the model computed, and nothing is left in the end."""
    done = fuzz("--seeds", "3")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("loads that failed") == 5, "a mode in which nothing went wrong"


@pytest.mark.usefixtures("model")
def test_planted_bugs_are_noticed() -> None:
    """Each of schedule_bugs.py, within its stated seeds."""
    done = fuzz("--planted-bugs")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "all noticed" in done.stdout

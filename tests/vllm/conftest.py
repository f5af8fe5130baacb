"""Runs each scenario in a process of its own: vLLM takes one engine a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import tiny_model

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPT_S = 140


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny model's folder."""
    return tiny_model(ROOT / ".cache" / "models")


def run_script(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run it to its end; what it reports, with its log."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE.parent),
        # Threads that wait for each other on a busy machine cost more than they bring here.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / f"{name}.py"), str(model), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=SCRIPT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # workers outlive an engine that was killed
            os.killpg(process.pid, signal.SIGKILL)
    report = folder / "report.json"
    assert report.exists(), f"{name} ended with {process.returncode}:\n{log}"[-8000:]
    told: dict[str, Any] = json.loads(report.read_text())
    return told | {"log": log}


def _report(name: str) -> Any:
    @pytest.fixture(name=name, scope="session")
    def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return run_script(name, model, tmp_path_factory.mktemp(name))

    return report


SCENARIOS = {path.stem: _report(path.stem) for path in sorted(HERE.glob("*_run.py"))}
"""The report of each script with an engine in it is a fixture of its name; it runs when it is first asked
for: other tests have real time-outs, and need the processors meanwhile."""
globals().update(SCENARIOS)

"""Runs each scenario in a process of its own: vLLM takes one engine a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import tiny_model

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny model's folder."""
    return tiny_model(ROOT / ".cache" / "models")


@pytest.fixture(scope="session")
def scenario(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Runs a script of this folder with an engine in it, once, and returns its report."""
    reports: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in reports:
            folder = tmp_path_factory.mktemp(name)
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
            done = subprocess.run(
                [sys.executable, str(HERE / f"{name}.py"), str(model), str(folder)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=140,
            )
            report = folder / "report.json"
            assert report.exists(), f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"[
                -8000:
            ]
            reports[name] = json.loads(report.read_text()) | {"log": done.stdout + done.stderr}
        return reports[name]

    return run

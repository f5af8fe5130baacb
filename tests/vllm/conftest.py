"""Runs each scenario in a process of its own: vLLM takes one engine a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import tiny_model

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
AT_ONCE = 2


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny model's folder."""
    return tiny_model(ROOT / ".cache" / "models")


@pytest.fixture(scope="session")
def scenario(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The report of a script of this folder with an engine in it, which runs once. Those that the tests of
    this session name begin before they are asked for: one engine leaves half of the processors idle."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reports: dict[str, Future[dict[str, Any]]] = {}

        def begin(name: str) -> Future[dict[str, Any]]:
            if name not in reports:
                reports[name] = pool.submit(run_script, name, model, tmp_path_factory.mktemp(name))
            return reports[name]

        for item in request.session.items:
            for name in SCENARIOS:
                if name in getattr(item, "fixturenames", ()):
                    begin(name)
        yield lambda name: begin(name).result()
        pool.shutdown(cancel_futures=True)


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
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), str(model), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=140,
    )
    report = folder / "report.json"
    assert report.exists(), f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"[-8000:]
    told: dict[str, Any] = json.loads(report.read_text())
    return told | {"log": done.stdout + done.stderr}


def _report(name: str) -> Any:
    @pytest.fixture(name=name)
    def report(scenario: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        return scenario(name)

    return report


SCENARIOS = {path.stem: _report(path.stem) for path in sorted(HERE.glob("*_run.py"))}
"""The report of each script is a fixture of its name."""
globals().update(SCENARIOS)

"""Processes with the CUDA double in place of the driver, for the tests in this folder.

The folder shares its name with the bindings' package `cuda`, and has no `__init__.py` so as not to hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import cuda_double
from support.cuda_double import Settings
from support.cuda_driven import Driven, StartProcess
from support.cuda_process import CudaProcess, Start
from support.daemons import DaemonSet

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library_folder() -> Path:
    """Where the built double lies."""
    return cuda_double.required()


@pytest.fixture
def start_process(library_folder: Path) -> Iterator[StartProcess]:
    """Starts processes with the double, by their settings; all are killed in the end."""
    started: list[Driven] = []

    def start(**settings: Any) -> Driven:
        started.append(Driven(library_folder, Settings(**settings)))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def lasting(library_folder: Path) -> Iterator[Driven]:
    """One initialised process for the tests that leave it as it was."""
    process = Driven(library_folder).begin()
    yield process
    process.kill()


@pytest.fixture
def process(lasting: Driven) -> Iterator[Driven]:
    """The lasting process; the test must have given back whatever it took."""
    before = lasting.held()
    yield lasting
    assert lasting.held() == before


@pytest.fixture
def start(library_folder: Path) -> Iterator[Start]:
    """Starts an engine or a daemon with the double's settings; all are killed in the end."""
    started: list[CudaProcess] = []

    def begin(program: str, **settings: Any) -> CudaProcess:
        process = CudaProcess(library_folder, HERE / f"gpu_{program}.py", Settings(**settings))
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def engine(library_folder: Path) -> Iterator[CudaProcess]:
    """For tests that leave it as it was."""
    process = CudaProcess(library_folder, HERE / "gpu_engine.py")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def lasting_daemon(library_folder: Path) -> Iterator[CudaProcess]:
    process = CudaProcess(library_folder, HERE / "gpu_daemon.py")
    yield process
    process.kill()


@pytest.fixture
def daemon(lasting_daemon: CudaProcess) -> Iterator[CudaProcess]:
    """A daemon of which each test must leave nothing behind."""
    yield lasting_daemon
    lasting_daemon.call("fail", "")
    assert lasting_daemon.call("settled", {}) == {}


@pytest.fixture
def daemons(library_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonSet]:
    """Two daemons that find the double where the driver would be."""
    for name, value in Settings().environment(library_folder).items():
        monkeypatch.setenv(name, value)
    made = DaemonSet("a", "b")
    yield made
    made.stop()

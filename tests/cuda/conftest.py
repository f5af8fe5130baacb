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


@pytest.fixture(scope="session")
def library_folder() -> Path:
    """Where the built double lies."""
    folder = cuda_double.folder()
    if folder is None:
        pytest.skip(f"the CUDA double is built with {cuda_double.COMPILER}, which is not installed")
    return folder


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

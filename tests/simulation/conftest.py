"""Seeds run beside all other tests: begun when it is known which tests run, asked for at the very end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.beside import Beside

HERE = Path(__file__).parent
BESIDE = pytest.StashKey[Beside]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs beside comes last."""
    items.sort(key=lambda item: "beside" in getattr(item, "fixturenames", ()))


def pytest_runtestloop(session: pytest.Session) -> None:
    """Begin what the tests that were chosen are going to ask for."""
    chosen = [mark for item in session.items for mark in item.iter_markers("beside")]
    if chosen and not session.config.option.collectonly:
        alone = all(item.path.parent == HERE for item in session.items)
        beside = session.config.stash[BESIDE] = Beside(alone=alone)
        for mark in chosen:
            beside.start(*mark.args)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Whatever came of it, leave no process."""
    beside = session.config.stash.get(BESIDE, None)
    if beside is not None:
        beside.close()


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Iterator[Beside]:
    """Where the runs are that a test's mark `beside` names."""
    yield request.config.stash[BESIDE]

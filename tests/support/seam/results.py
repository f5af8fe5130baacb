"""Results of a run of the grid, and the table of `docs/seam.md` made from them.

    PYTHONPATH=tests python -m support.seam.results     # writes the table of the latest run

A run of the whole grid writes its results to a file; the table between the marks of the page is made from it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from support.seam.cases import OWN_TESTS, ROWS, Column

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "seam.md"
LATEST = ROOT / ".cache" / "seam.json"
BEGIN, END = "<!-- the table: made by tests/support/seam/results.py -->", "<!-- end of the table -->"
COLUMNS: dict[Column, str] = {"exact": "exact", "by_ids": "by ids"}


class Cell(msgspec.Struct, frozen=True):
    """One request and what became of it. result: equal, restarted or refused; else it is a failure."""

    row: str
    column: str
    api: str
    point: str
    result: str
    reason: str = ""


class Record(Protocol):
    """Takes down what became of a cell. asked: the API, and whether the answer was streamed."""

    def __call__(
        self, row: str, column: Column, asked: str, point: str, result: str, reason: str = ""
    ) -> None: ...


class Run(msgspec.Struct, frozen=True):
    """Which engine, and every cell."""

    engine: str
    cells: list[Cell]


def write(run: Run, path: Path = LATEST) -> None:
    """Keep a run, if it is one of the whole grid."""
    if not {(cell.row, cell.column) for cell in run.cells} >= {(row, "exact") for row in row_names()}:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))


def read(path: Path = LATEST) -> Run:
    """The kept run."""
    return msgspec.json.decode(path.read_bytes(), type=Run)


def row_names() -> list[str]:
    """Every row of the table."""
    return [*(row.name for row in ROWS), *OWN_TESTS]


def table(run: Run) -> str:
    """The table, as Markdown. Raises ValueError if a row was not run."""
    lines = [
        f"{run.engine}; {len(run.cells)} requests cut.",
        "",
        "| request feature | asked as | exact | by ids | refused by ids | killed |",
        "|---|---|---|---|---|---|",
    ]
    for name in row_names():
        cells = [cell for cell in run.cells if cell.row == name]
        if not cells:
            raise ValueError(f"the run has no cell of {name!r}")
        lines.append(f"| {' | '.join([_code(name), _kinds(cells), *_verdicts(cells), _points(cells)])} |")
    return "\n".join(lines)


def _verdicts(cells: Sequence[Cell]) -> list[str]:
    exact = [cell for cell in cells if cell.column == "exact"]
    by_ids = [cell for cell in cells if cell.column == "by_ids"]
    refused = Counter(cell.reason for cell in by_ids if cell.result == "refused")
    return [_equal(exact), _equal(by_ids), ", ".join(f"{n} {reason}" for reason, n in refused.items())]


def _equal(cells: Sequence[Cell]) -> str:
    """`equal of total`, how many of the equal ones had started again, and why others were refused."""
    if not cells:
        return ""
    if all(cell.result == "sample" for cell in cells):
        return f"{len(cells)} of {len(cells)} a valid sample"
    again = sum(cell.result == "restarted" for cell in cells)
    good = sum(cell.result == "equal" for cell in cells) + again
    refused = sorted({cell.reason for cell in cells if cell.result == "refused"})
    notes = [f"{again} restarted"] if again else []
    if refused and cells[0].column == "exact":
        notes.append(f"else refused: {', '.join(refused)}")
    return f"{good} of {len(cells)}" + (f" ({'; '.join(notes)})" if notes else "")


def _kinds(cells: Sequence[Cell]) -> str:
    pairs = [cell.api.split(", ") for cell in cells]
    return "; ".join(", ".join(dict.fromkeys(part)) for part in zip(*pairs, strict=True))


def _points(cells: Sequence[Cell]) -> str:
    """Named points, then counts of tokens."""
    points = dict.fromkeys(part for cell in cells for part in cell.point.split(", "))
    counts = [point for point in points if point.isdigit()]
    left = [point[1:] for point in points if point.startswith("-")]
    named = [point for point in points if point not in counts and point[1:] not in left]
    if counts:
        named.append(f"after {', '.join(counts)} tokens")
    if left:
        named.append(f"{', '.join(left)} tokens before the end")
    return ", ".join(named)


def _code(name: str) -> str:
    return name.replace("|", "\\|")


def page_with(text: str, new: str) -> str:
    """The page with another table. Raises ValueError if its marks are gone."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no place for the table")
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def main() -> int:
    """Write the latest run's table into the page."""
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table(read())), encoding="utf-8")
    print(f"{PAGE}: {len(row_names())} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())

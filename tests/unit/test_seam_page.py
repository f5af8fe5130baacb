"""The page on the seam holds what was tried, all of it and nothing else."""

from __future__ import annotations

import pytest

from support.seam.cases import ROWS
from support.seam.results import BEGIN, END, PAGE, Cell, Run, page_with, row_names, table


def rows_of(page: str) -> list[list[str]]:
    """The table's cells, without its head."""
    inside = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in inside.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_feature_has_its_row_and_none_was_left_untried() -> None:
    """A row that is added or renamed is run, or the page is wrong."""
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert [row[0] for row in rows] == row_names()
    for row in rows:
        assert row[2] or row[3], f"{row[0]}: not tried"
        for counted in row[2:4]:
            good, _, total = counted.partition(" of ")
            assert not counted or 0 <= int(good) <= int(total.split()[0]), row


def test_what_is_continued_exactly_was_equal_every_time() -> None:
    """Where the grid expects no refusal, the page shows none."""
    rows = {row[0]: row[2] for row in rows_of(PAGE.read_text(encoding="utf-8"))}
    for case in ROWS:
        good, _, total = rows[case.name].partition(" of ")
        assert case.exact or good == total.split()[0], (case.name, rows[case.name])


def test_a_run_that_left_a_row_out_makes_no_table() -> None:
    """Part of the grid is no proof."""
    cells = [Cell(name, "exact", "chat, streamed", "at half", "equal") for name in row_names()]
    page = page_with(f"a\n{BEGIN}\nold\n{END}\nb", table(Run("engine", cells)))
    assert [row[0] for row in rows_of(page)] == row_names()
    assert page.startswith("a\n") and page.endswith("\nb") and "old" not in page
    with pytest.raises(ValueError, match="no cell of"):
        table(Run("engine", cells[1:]))

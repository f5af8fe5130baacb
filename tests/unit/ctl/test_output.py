"""What the tool prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from segue_core.errors import ConfigError, SegueError
from segue_ctl.output import Style, check_writable, table, write_json


def test_columns_line_up_and_end_without_blanks() -> None:
    """People can read a column from top to bottom, and a copied line has no trailing blanks."""
    text = table([["a", "10", ""], ["longer", "7", "x"]], header=("NAME", "N", ""), right=(1,))
    assert text.splitlines() == ["NAME     N", "a       10", "longer   7  x"]


def test_rows_may_be_shorter_than_the_header() -> None:
    """A row without its last cells is not an error."""
    assert table([["a"], ["b", "c"]]).splitlines() == ["a", "b  c"]
    assert table([]) == ""


def test_colour_codes_do_not_shift_columns() -> None:
    """A coloured cell takes the room of what is seen of it."""
    lines = table([["\x1b[32mok\x1b[0m", "x"], ["long", "y"]]).splitlines()
    assert lines == ["\x1b[32mok\x1b[0m    x", "long  y"]


def test_no_colours_when_the_output_is_not_a_terminal() -> None:
    """Logs and pipes get plain text."""
    assert Style(io.StringIO()).bad("x") == "x"


def test_json_replaces_the_file_whole(tmp_path: Path) -> None:
    """A reader never finds half a result."""
    target = tmp_path / "result.json"
    target.write_text("old")
    write_json({"a": [1]}, str(target))
    assert json.loads(target.read_text()) == {"a": [1]}
    assert list(tmp_path.iterdir()) == [target]


def test_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """`-` is standard output, so that a program can be piped into."""
    write_json({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_a_result_that_cannot_be_written_is_said_before_anything_is_started(tmp_path: Path) -> None:
    """Nobody waits minutes for a demo whose result has no place."""
    for file in (str(tmp_path), str(tmp_path / "missing" / "result.json")):
        with pytest.raises(ConfigError, match="--json"):
            check_writable(file, "--json")
        with pytest.raises(SegueError, match="cannot write"):
            write_json({}, file)
    check_writable("-", "--json")
    check_writable(str(tmp_path / "result.json"), "--json")

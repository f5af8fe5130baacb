"""What the tool prints: tables and colours for people, one JSON document for programs.

Data goes to standard output, everything else to standard error. Colours only on a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from segue_core.errors import ConfigError, SegueError

OK, FAILED, USAGE, UNHEALTHY = 0, 1, 2, 3
"""Exit statuses of every verb."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """`rows` in columns two spaces apart; the columns in `right` are aligned right. No trailing blanks."""
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    if not lines:
        return ""
    columns = range(max(map(len, lines)))
    widths = [max(_width(line[i]) for line in lines if i < len(line)) for i in columns]
    return "\n".join(
        "  ".join(_pad(cell, widths[i], to_right=i in right) for i, cell in enumerate(line)).rstrip()
        for line in lines
    )


def _width(cell: str) -> int:
    return len(_ESCAPE.sub("", cell))


def _pad(cell: str, width: int, *, to_right: bool) -> str:
    blanks = " " * (width - _width(cell))
    return blanks + cell if to_right else cell + blanks


def to_json(body: Any) -> str:
    """`body` (structs, dicts, lists) as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def write_json(body: Any, file: str) -> None:
    """Write JSON to `file`, whole or not at all; `-` is standard output. Raises SegueError if it cannot."""
    if file == "-":
        print(to_json(body))
        return
    target = Path(file)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(to_json(body) + "\n", encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise SegueError(f"cannot write {file}: {error.strerror or error}") from error


def check_writable(file: str, option: str) -> None:
    """Raise ConfigError, in the name of `option`, if `write_json` could not write `file`."""
    target = Path(file)
    if file == "-":
        return
    if target.is_dir():
        raise ConfigError(f"{option}: {file} is a folder")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: cannot write into the folder {target.parent}")


def complain(message: str) -> None:
    """One message of the tool to standard error."""
    print(f"seguectl: {message}", file=sys.stderr)


def has_colours(stream: TextIO) -> bool:
    """Whether colours help there: a terminal, and nobody asked for none."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Style:
    """Colours of one stream; plain text where it is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._on = has_colours(stream)

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        return self._wrap("32", text)

    def bad(self, text: str) -> str:
        return self._wrap("1;31", text)

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on else text

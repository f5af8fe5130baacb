"""The table: one row for each thing that was tried, and what all of them come to. Pure.

Invariant: what was not run is never counted among what was well, and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Outcome = Literal["equal", "DIFFERENT", "measured", "FAILED", "NOT RUN"]


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """`part`: the stage; `what` was tried; `result` in words; `figures` for programs, units in their names.
    `required`: without it the machine has not shown that it works."""

    part: str
    what: str
    outcome: Outcome
    result: str = ""
    figures: dict[str, float] = {}
    required: bool = False


def equal(part: str, what: str, is_equal: bool, result: str = "", **figures: float) -> Row:
    """Bytes that had to be equal."""
    return Row(part, what, "equal" if is_equal else "DIFFERENT", result, figures, required=True)


def measured(part: str, what: str, result: str, **figures: float) -> Row:
    """A speed: there is no right or wrong of it."""
    return Row(part, what, "measured", result, figures)


def not_run(part: str, what: str, reason: str, *, required: bool = False) -> Row:
    """Why it was not tried."""
    return Row(part, what, "NOT RUN", reason, required=required)


def failed(part: str, what: str, reason: str) -> Row:
    """It broke; the last line of why."""
    return Row(part, what, "FAILED", reason, required=True)


def is_well(rows: Sequence[Row]) -> bool:
    """Whether everything that had to be equal was tried and was."""
    wrong = [row for row in rows if row.outcome in ("DIFFERENT", "FAILED")]
    missing = [row for row in rows if row.outcome == "NOT RUN" and row.required]
    return bool(rows) and not wrong and not missing


def table(rows: Sequence[Row]) -> str:
    """For people."""
    cells = [("PART", "WHAT", "OUTCOME", ""), *((r.part, r.what, r.outcome, r.result) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in cells]
    left_out = [f"{row.part}: {row.what}" for row in rows if row.outcome == "NOT RUN"]
    if left_out:
        lines += ["", f"!! NOT RUN ({len(left_out)}): {'; '.join(left_out)}"]
    return "\n".join(lines)

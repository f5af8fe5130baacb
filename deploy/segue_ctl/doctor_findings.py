"""What `seguectl doctor` has to say: findings, how they look, and what they come to.

Pure. Invariant: whatever is not ok says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from segue_ctl.output import OK, UNHEALTHY, Style

Verdict = Literal["ok", "warning", "problem"]
_VERDICT_CHARS, _CHECK_CHARS = 7, 22


class Finding(msgspec.Struct, frozen=True):
    """One line. `check` says what was looked at, `found` what is there, `todo` what helps (empty: nothing to
    do)."""

    check: str
    verdict: Verdict
    found: str
    todo: str = ""


class Report(msgspec.Struct, frozen=True):
    """Everything, as --json prints it. `sections`: headings in order, with their findings."""

    version: str
    warnings: int
    problems: int
    sections: dict[str, list[Finding]]


def ok(check: str, found: str) -> Finding:
    """As it should be."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, todo: str) -> Finding:
    """Segue works, with less than it could, or not in some case."""
    return Finding(check, "warning", found, todo)


def problem(check: str, found: str, todo: str) -> Finding:
    """Segue does not work here until that is mended."""
    return Finding(check, "problem", found, todo)


def report(version: str, sections: dict[str, list[Finding]]) -> Report:
    """All sections, counted."""
    verdicts = [finding.verdict for findings in sections.values() for finding in findings]
    return Report(version, verdicts.count("warning"), verdicts.count("problem"), sections)


def exit_status(made: Report) -> int:
    """Not ok only if something does not work."""
    return UNHEALTHY if made.problems else OK


def render(heading: str, findings: Iterable[Finding], style: Style) -> str:
    """One section for people."""
    lines = [style.bold(heading)]
    for finding in findings:
        word = finding.verdict.ljust(_VERDICT_CHARS)
        if finding.verdict == "problem":
            word = style.bad(word)
        elif finding.verdict == "ok":
            word = style.good(word)
        lines.append(f"  {word}  {finding.check.ljust(_CHECK_CHARS)}  {finding.found}".rstrip())
        if finding.todo:
            lines.append(f"  {'':{_VERDICT_CHARS}}  {'':{_CHECK_CHARS}}  -> {finding.todo}")
    return "\n".join(lines)


def summary(made: Report) -> str:
    """The last line."""
    if not made.warnings and not made.problems:
        return "all well"
    parts = [(made.problems, "problem"), (made.warnings, "warning")]
    return ", ".join(f"{count} {word}{'s' if count != 1 else ''}" for count, word in parts if count)


def size(nbytes: int) -> str:
    """Bytes for people."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} bytes"

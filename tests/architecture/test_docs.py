"""The pages tell the truth where a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_failure_table_names_exists() -> None:
    """A row without its test is a promise that nobody keeps."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failures.md").read_text()))
    defined: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))
    assert len(named) > 20
    assert named <= defined, named - defined


def test_the_architecture_page_stays_a_page() -> None:
    """A newcomer reads it in one sitting."""
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 100


def test_files_that_the_pages_point_to_exist() -> None:
    """Links and file names in the documentation lead somewhere."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for target in re.findall(r"`((?:daemon|engine_shim|router|deploy|tests|docs)/[\w/.]+)`", text):
            assert (ROOT / target).exists(), f"{page.name}: {target}"

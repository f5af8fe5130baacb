"""Every configuration that we show somebody is accepted by the process that it is for."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from segue_ctl.check_config import check

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "config").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?P<indent> *)```yaml\n(?P<text> *# (?:router|daemon)[^\n]*\.yaml[^\n]*\n.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block whose first line is a comment that names the file, such as `# router.yaml`."""
BLOCKS = [
    pytest.param(textwrap.dedent(block["text"]), id=f"{page.name}-{number}")
    for page in PAGES
    if page.is_file()
    for number, block in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")), 1)
]


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_example_files_are_valid(file: Path) -> None:
    """Copied to a host, an example works as it stands."""
    assert check(file).startswith("ok (")


@pytest.mark.parametrize("block", BLOCKS)
def test_configurations_in_the_documentation_are_valid(block: str, tmp_path: Path) -> None:
    """What the pages show can be pasted."""
    file = tmp_path / "config.yaml"
    file.write_text(block, encoding="utf-8")
    assert check(file).startswith("ok (")


def test_there_is_an_example_of_each_kind() -> None:
    """These tests cannot pass by looking at nothing."""
    assert {"daemon.yaml", "router.yaml"} <= {file.name for file in FILES}

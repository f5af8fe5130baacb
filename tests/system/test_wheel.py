"""The wheel, as somebody else installs it: into an empty environment, without an engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("segue-daemon", "segue-router", "seguectl")
pytestmark = pytest.mark.timeout(600)


def _run(arguments: Sequence[str], cwd: Path) -> str:
    """Run a command away from the checkout; returns its output or fails with it."""
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    out = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(ROOT)], out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel and its declared dependencies, no more."""
    folder = tmp_path_factory.mktemp("venv")
    _run([sys.executable, "-m", "venv", str(folder)], folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
    pins = ROOT / "deploy" / "requirements" / "base.txt"
    _run([*pip, "--constraint", str(pins), str(wheel)], folder)
    return folder / "bin"


def test_every_command_works_without_an_engine(environment: Path, tmp_path: Path) -> None:
    """The sidecar, the router and the tool need neither torch nor vLLM."""
    for command in COMMANDS:
        assert command in _run([str(environment / command), "--help"], tmp_path)
    absent = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"
    assert _run([str(environment / "python"), "-c", absent], tmp_path).strip() == "[]"


def test_the_installed_files_are_used_not_the_checkout(environment: Path, tmp_path: Path) -> None:
    """What is tested here is what a user gets."""
    for package in ("segue_core", "segue_daemon", "segue_router", "segue_shim", "segue_ctl"):
        where = _run(
            [str(environment / "python"), "-c", f"import {package}; print({package}.__file__)"], tmp_path
        )
        assert where.strip().startswith(str(environment.parent))


def test_a_configuration_is_checked_by_the_installed_commands(environment: Path, tmp_path: Path) -> None:
    """The tool finds the other commands beside itself."""
    examples = ROOT / "deploy" / "config"
    files = [str(examples / "daemon.yaml"), str(examples / "router.yaml")]
    assert _run([str(environment / "seguectl"), "check-config", *files], tmp_path).count(": ok (") == 2

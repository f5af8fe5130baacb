"""The rules that hold the parts apart: who may import whom, and what may never be written at all."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "segue_core": ROOT / "daemon" / "segue_core",
    "segue_daemon": ROOT / "daemon" / "segue_daemon",
    "segue_shim": ROOT / "engine_shim" / "segue_shim",
    "segue_router": ROOT / "router" / "segue_router",
    "segue_ctl": ROOT / "deploy" / "segue_ctl",
}
FILES = [(package, file) for package, folder in PACKAGES.items() for file in sorted(folder.rglob("*.py"))]
MAX_LINES = 400
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system")}
each_file = pytest.mark.parametrize(
    ("package", "file"), FILES, ids=[str(file.relative_to(ROOT)) for _, file in FILES]
)


def tree_of(file: Path) -> ast.Module:
    """The file, parsed."""
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imported(file: Path) -> set[str]:
    """Every module that a file imports, at whatever depth, as written; typing-only imports included."""
    found: set[str] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the whole name"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def top_levels(file: Path) -> set[str]:
    """The top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imported(file)}


def third_party(file: Path) -> set[str]:
    """What a file needs beside the standard library and our own packages."""
    return {name for name in top_levels(file) if name not in sys.stdlib_module_names and name not in PACKAGES}


def core_closure(files: list[Path]) -> set[Path]:
    """The files of segue_core that `files` pull in, directly or through each other."""
    core = PACKAGES["segue_core"]
    todo, seen = list(files), set[Path]()
    while todo:
        for name in imported(todo.pop()):
            parts = name.split(".")
            if parts[0] != "segue_core":
                continue
            for depth in range(1, len(parts) + 1):
                stem = core.joinpath(*parts[1:depth])
                for file in (stem / "__init__.py", stem.with_suffix(".py")):
                    if file.is_file() and file not in seen:
                        seen.add(file)
                        todo.append(file)
    return seen


@each_file
def test_processes_import_only_core_among_ours(package: str, file: Path) -> None:
    """Imports run one way: shim, daemon, router and ctl know core and not each other; core knows none."""
    allowed = {package} if package == "segue_core" else {package, "segue_core"}
    assert top_levels(file) & PACKAGES.keys() <= allowed


def test_the_shim_needs_nothing_that_an_engine_lacks() -> None:
    """It runs in somebody else's environment: standard library, msgspec, torch, and vLLM in vllm_*.py."""
    shim = sorted(PACKAGES["segue_shim"].rglob("*.py"))
    for file in [*shim, *sorted(core_closure(shim))]:
        allowed = {"msgspec"}
        if file in shim:
            allowed |= {"torch"} | ({"vllm", "numpy"} if file.name.startswith("vllm_") else set())
        assert third_party(file) <= allowed, file


@each_file
def test_only_the_shim_and_the_model_converter_know_torch(package: str, file: Path) -> None:
    """Daemon, router and core run without the gigabytes of an engine."""
    if package == "segue_shim" or file.name == "model.py":
        return
    assert not third_party(file) & {"torch", "vllm", "transformers"}


@each_file
def test_nothing_is_unpickled_and_no_shell_is_started(package: str, file: Path) -> None:
    """What arrives from a socket or a file never runs as code."""
    assert not top_levels(file) & FORBIDDEN_MODULES
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            assert (function.value.id, function.attr) not in FORBIDDEN_CALLS, f"line {node.lineno}"
        if isinstance(function, ast.Name):
            assert function.id not in {"eval", "exec"}, f"line {node.lineno}"
        for keyword in node.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert not (keyword.arg == "shell" and is_true), f"line {node.lineno}"


@each_file
def test_every_module_says_what_it_owns(package: str, file: Path) -> None:
    """A newcomer can read the first lines of each file and know where to look."""
    assert (ast.get_docstring(tree_of(file)) or "").strip()


@each_file
def test_files_stay_short(package: str, file: Path) -> None:
    """Past this length a file is two things."""
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_all_packages_were_found() -> None:
    """These tests cannot pass by looking at nothing."""
    assert {package for package, _ in FILES} == set(PACKAGES)
    assert len(FILES) > 40

"""Whatever call of the driver fails or hangs, and when: one engine loses its protection and hears why, and
nothing else happens. A grid of calls and errors, each in a process of its own, on the driver's double."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue_daemon.cuda import driver as daemon_driver
from segue_shim.cuda_driver import CudaDriver
from support.cuda_double import Settings
from support.cuda_process import CudaProcess

HERE = Path(__file__).parent
ORDINARY = (1, 2, 801)
"""INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED."""
FAULT, SHUT_DOWN = 700, 4
"""ILLEGAL_ADDRESS ends the context, DEINITIALIZED the driver."""
KINDS = ("cuda_ipc", "cuda_vmm")
USED_BY_DAEMON = sorted(set(re.findall(r'"(cu[A-Z]\w+)"', inspect.getsource(daemon_driver))))
# cuGetErrorName only names what failed: each trial asks it. cuDeviceGet is for `seguectl doctor`.
USED_BY_SHIM = sorted(set(CudaDriver.entry_points) - {"cuGetErrorName", "cuDeviceGet"})
TARGETS = [4, 9]
"""The blocks that the shim's trials load."""
ADVICE = r"start the engine|start it without|docs/gpu\.md"


@pytest.fixture(scope="module")
def engines(library_folder: Path) -> Iterator[dict[str, CudaProcess]]:
    """An engine of each kind, and one on another GPU."""
    made = {kind: CudaProcess(library_folder, HERE / "gpu_engine.py", Settings(devices=2)) for kind in KINDS}
    elsewhere = Settings(devices=2, visible="1")
    made["other"] = CudaProcess(library_folder, HERE / "gpu_engine.py", elsewhere)
    yield made
    for process in made.values():
        process.kill()


def start_daemon(library_folder: Path, engines: dict[str, CudaProcess], **settings: Any) -> CudaProcess:
    """A process from which each trial of the daemon's side is forked."""
    process = CudaProcess(library_folder, HERE / "grid_daemon.py", Settings(devices=2, **settings))
    for name, engine in engines.items():
        exported, fds = engine.call_for_descriptors("export", "cuda_ipc" if name == "other" else name)
        process.call("keep", name, exported, descriptors=fds)
    return process


@pytest.fixture(scope="module")
def daemon(library_folder: Path, engines: dict[str, CudaProcess]) -> Iterator[CudaProcess]:
    process = start_daemon(library_folder, engines)
    yield process
    process.kill()


def trials(entry: str, count: int, index: int, *, hangs: bool) -> Iterator[tuple[int, list[str]]]:
    """(code or 0, failures that one process can live through) for one entry point, at its first and its last
    call. What ends a context or the driver needs a process of its own."""
    calls = list(dict.fromkeys((1, count)))
    codes = ORDINARY[index % len(ORDINARY) :] + ORDINARY
    yield 1, [f"{entry}:{nth}:{code}" for nth, code in zip(calls, codes, strict=False)]
    if hangs:
        yield 0, [f"{entry}:{nth}:hang" for nth in calls]
        if entry.endswith("Async"):
            yield FAULT, [f"{entry}:1:{FAULT}:late"]
    for nth in calls:
        yield FAULT, [f"{entry}:{nth}:{FAULT}"]
    yield SHUT_DOWN, [f"{entry}:{count}:{SHUT_DOWN}"]


def check(code: int, failing: str, found: dict[str, Any]) -> None:
    """One of the documented outcomes: it works all the same, or this engine is let go with advice."""
    error, told = found["error"], f"{failing}: {found}"
    if error:
        assert error.startswith(("ProtocolError", "PagesError", "CudaError")), told
        assert re.search(r" \([a-z].{20,}\)", error), f"no word of what to do: {told}"
        if code == 0:
            assert "has not returned" in error, told
        elif code in (FAULT, SHUT_DOWN):
            assert "restart segue-daemon" in error, told
        else:
            assert failing.split(":")[0] in error, told
    else:
        assert found["right"], told
    assert code == SHUT_DOWN or (found["other"] and not found["left"]), told


def check_next(code: int, failing: list[str], found: dict[str, Any]) -> None:
    """The next engine is protected, or told why it cannot be."""
    told = f"after {failing}: {found}"
    lost = "restart segue-daemon" in found["error"] and code in (FAULT, SHUT_DOWN)
    assert lost or (found["right"] and code != SHUT_DOWN), told
    assert code == SHUT_DOWN or (found["other"] and not found["left"]), told


def run_grid(process: CudaProcess, kind: str, counts: dict[str, int]) -> None:
    """Every failure of each entry point that is called at all."""
    for index, (entry, count) in enumerate(counts.items()):
        beside = None if entry == "cuInit" else "other"
        for code, failing in trials(entry, count, index, hangs=True) if count else ():
            *results, last = process.call("trial", kind, failing, beside)
            for each, found in zip(failing, results, strict=True):
                check(code, each, found)
            check_next(code, failing, last)


def test_every_call_of_the_daemon_may_fail_or_hang(
    daemon: CudaProcess, engines: dict[str, CudaProcess], library_folder: Path
) -> None:
    """The engine is let go with one line that says what to do; the daemon, its engine on another GPU and the
    next engine go on, and nothing is left behind. No call that the daemon can make is left out."""
    missing = USED_BY_DAEMON
    older = start_daemon(library_folder, engines, driver_version=12080)
    try:
        for process, kind in ((daemon, "cuda_ipc"), (daemon, "cuda_vmm"), (older, "cuda_ipc")):
            counts = process.call("calls", kind, missing)
            run_grid(process, kind, counts)
            missing = [entry for entry in missing if not counts[entry]]
    finally:
        older.kill()
    assert missing == []


def check_shim(code: int, failing: str, found: dict[str, Any]) -> None:
    """The engine computes on; what it lost was said in one line, with what to do."""
    told = f"{failing}: {found}"
    assert found["computes"] and not found["left"], told
    said = [line for line, traceback in found["lines"] if not traceback]
    assert len(said) == len(found["lines"]), f"something unforeseen: {told}"
    if found["refused"]:
        assert re.search(ADVICE, found["refused"]), told
    elif found["broken"]:
        unprotected = [line for line in said if line.startswith("segue: the engine runs unprotected:")]
        assert len(unprotected) == 1 and re.search(ADVICE, unprotected[0]), told
    if not found["refused"]:
        assert all(blocks == TARGETS for blocks in found["failed"]), told
    assert code in (FAULT, SHUT_DOWN) or found["right"], told


def test_every_call_of_the_shim_may_fail(library_folder: Path) -> None:
    """The engine computes on, unprotected, and says why in one line; a replica counts as loaded only if it is
    there; nothing is left behind. No call that the shim can make is left out."""
    missing = USED_BY_SHIM
    programs = [
        (CudaProcess(library_folder, HERE / "grid_shim.py", Settings(driver_version=version)), kind)
        for version, kind in ((13000, "cuda_vmm"), (13000, "cuda_ipc"), (12080, "cuda_ipc"))
    ]
    try:
        for process, kind in programs:
            counts = process.call("calls", kind, missing)
            for index, (entry, count) in enumerate(counts.items()):
                for code, failing in trials(entry, count, index, hangs=False) if count else ():
                    for each, found in zip(failing, process.call("trial", kind, failing), strict=True):
                        check_shim(code, each, found)
            missing = [entry for entry in missing if not counts[entry]]
    finally:
        for process, _ in programs:
            process.kill()
    assert missing == []

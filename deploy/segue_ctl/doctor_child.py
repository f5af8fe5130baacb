"""Runs the probes of `seguectl doctor` in processes of their own, each with a deadline.

Nothing that hangs or dies in there reaches the doctor. Invariants: every child has ended, or was killed, when
`run_probes` returns; one that cannot even be killed is left behind after `KILLED_S` and named.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from segue_core.messages.probe import Doing, Line

KILLED_S = 2.0
HANGS = "did not return"
MAX_OUTPUT_BYTES = 1 << 20
MAX_ERROR_CHARS = 300
_DECODER = msgspec.json.Decoder(Line)


@dataclass
class Outcome:
    """What became of one probe. `found` is its answer, if it gave one; `doing` the last step that it began;
    `error` how it ended otherwise."""

    found: Line | None = None
    doing: str = ""
    error: str = ""
    status: int | None = None


@dataclass
class Probe:
    """One child: a module of this installation with its arguments; `fds` are its own, and closed here."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    fds: Sequence[int] = ()
    outcome: Outcome = field(default_factory=Outcome)


def run_probes(probes: Sequence[Probe], timeout_s: float) -> list[Outcome]:
    """Run all of `probes` at the same time, as long as `timeout_s` at most."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        children = [_start(probe, stack) for probe in probes]
        output = _read_all(children, deadline)
        for probe, child in zip(probes, children, strict=True):
            said, complaints = output[child.pid]
            _conclude(probe.outcome, child, said, complaints, timeout_s, deadline)
    return [probe.outcome for probe in probes]


def _start(probe: Probe, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", probe.module, *probe.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(probe.environment),
            pass_fds=tuple(probe.fds),
            start_new_session=True,
        )
    finally:
        for fd in probe.fds:
            os.close(fd)
    stack.callback(_end, child)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill it if it still runs; do not wait for what the kernel holds."""
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILLED_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _read_all(
    children: Sequence[subprocess.Popen[bytes]], deadline: float
) -> dict[int, tuple[bytearray, bytearray]]:
    """(standard output, standard error) of each, until all have closed theirs or time is up."""
    output = {child.pid: (bytearray(), bytearray()) for child in children}
    with selectors.DefaultSelector() as selector:
        for child in children:
            for number, pipe in enumerate((child.stdout, child.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, output[child.pid][number])
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                chunk = key.fileobj.read1(1 << 16)  # type: ignore[union-attr]
                if not chunk or len(key.data) > MAX_OUTPUT_BYTES:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
    return output


def _conclude(
    outcome: Outcome,
    child: subprocess.Popen[bytes],
    said: bytearray,
    complaints: bytearray,
    timeout_s: float,
    deadline: float,
) -> None:
    for text in said.splitlines():
        try:
            line = _DECODER.decode(text)
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
        if isinstance(line, Doing):
            outcome.doing = line.step
        else:
            outcome.found = line
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, deadline - time.monotonic()))
    outcome.status = child.returncode
    if outcome.found is not None:
        return
    if outcome.status is None:
        outcome.error = f"{HANGS} within {timeout_s:g} s"
    elif outcome.status < 0:
        outcome.error = f"died of {_signal_name(-outcome.status)}"
    else:
        lines = complaints.decode(errors="replace").strip().splitlines()
        outcome.error = (lines[-1] if lines else f"ended with status {outcome.status}")[:MAX_ERROR_CHARS]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

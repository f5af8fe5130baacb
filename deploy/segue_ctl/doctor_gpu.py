"""Looks at the NVIDIA driver and its GPUs, and tries both ways of sharing memory.

Through probes (`doctor_child`), in two processes as in life: the engine's end is the shim's code
(`segue_shim.cuda_probe`), the daemon's end the daemon's (`segue_daemon.cuda.probe`). They are started as
modules and not imported, so that each keeps to its own packages. No judgement here, and no driver is loaded
into this process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from segue_core.messages.probe import WAITING, Gpu, GpusFound, ShareFound, ShareKind
from segue_ctl.doctor_child import Outcome, Probe, run_probes

ENGINE_END, DAEMON_END = "segue_shim.cuda_probe", "segue_daemon.cuda.probe"
HIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
OLDEST_CUDA = 12_000
"""Of which Segue asks for entry points."""
DEVICE_FILE = Path("/dev/nvidiactl")
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
MPS_FOLDER = Path("/tmp/nvidia-mps")  # noqa: S108 - where NVIDIA's daemon puts it


@dataclass(frozen=True)
class Trial:
    """One GPU, one way of sharing: what each end said. The daemon's end has the answer."""

    kind: ShareKind
    engine: Outcome
    daemon: Outcome


@dataclass(frozen=True)
class GpuFacts:
    """What was found. `every`: with all GPUs shown; `visible`: in the environment as it is. `trials`: by the
    UUID of the GPU."""

    every: Outcome
    visible: Outcome
    trials: dict[str, list[Trial]]
    bindings: str
    """Version of cuda-bindings; empty: the daemon has none."""
    hidden_by: str
    """What CUDA_VISIBLE_DEVICES says; empty: it is not set."""
    device_file: bool
    """Whether the driver's device is here, whatever its library is."""
    kernel_module: str
    """The first line that the driver's kernel module says of itself."""
    mps: bool
    """Whether a control daemon of MPS seems to run, or is configured."""


def look(
    *, timeout_s: float, bindings: str, environ: Mapping[str, str] | None = None, tell: Callable[[str], None]
) -> GpuFacts:
    """Look, and try. `tell` hears what is done now."""
    environ = dict(os.environ if environ is None else environ)
    shown = {name: value for name, value in environ.items() if name not in HIDING}
    every, visible = run_probes(
        [Probe(ENGINE_END, ["list"], shown), Probe(ENGINE_END, ["list"], environ)], timeout_s
    )
    found = every.found
    trials: dict[str, list[Trial]] = {}
    if isinstance(found, GpusFound) and found.version >= OLDEST_CUDA and bindings:
        for gpu in found.gpus:
            tell(f"sharing memory of {gpu.uuid} between two processes")
            trials[gpu.uuid] = [_share(kind, gpu, shown, timeout_s) for kind in get_args(ShareKind)]
    return GpuFacts(
        every=every,
        visible=visible,
        trials=trials,
        bindings=bindings,
        hidden_by=environ.get("CUDA_VISIBLE_DEVICES", ""),
        device_file=DEVICE_FILE.exists(),
        kernel_module=_first_line(KERNEL_MODULE),
        mps="CUDA_MPS_PIPE_DIRECTORY" in environ or MPS_FOLDER.exists(),
    )


def _share(kind: ShareKind, gpu: Gpu, environ: Mapping[str, str], timeout_s: float) -> Trial:
    """Both ends, joined by a socket that only they have."""
    one, other = socket.socketpair()
    engine_fd, daemon_fd = one.detach(), other.detach()
    engine, daemon = run_probes(
        [
            Probe(
                ENGINE_END,
                ["share", kind, str(engine_fd)],
                {**environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
                [engine_fd],
            ),
            Probe(DAEMON_END, ["map", str(daemon_fd)], environ, [daemon_fd]),
        ],
        timeout_s,
    )
    return Trial(kind, engine, daemon)


def has_pinned(facts: GpuFacts) -> bool:
    """Whether a driver has page-locked memory in some trial."""
    found = [trial.daemon.found for trials in facts.trials.values() for trial in trials]
    return any(isinstance(one, ShareFound) and one.pinned_bytes > 0 for one in found)


def first_error(trial: Trial) -> tuple[str, str, str]:
    """(which end, what went wrong, what to do) of a trial; empty if nothing did.

    An end that still waits for the other one when time is up is not to blame.
    """
    ends = (("the engine's end", trial.engine), ("the daemon's end", trial.daemon))
    for end, outcome in ends:
        if isinstance(outcome.found, ShareFound) and outcome.found.error:
            return end, outcome.found.error, outcome.found.hint
        elif outcome.found is None and outcome.error and outcome.doing != WAITING and outcome.status != 0:
            return end, f"{outcome.error}, while {outcome.doing or 'starting'}", ""
    if not isinstance(trial.daemon.found, ShareFound):
        return "the daemon's end", trial.daemon.error or "said nothing", ""
    return "", "", ""


def _first_line(file: Path) -> str:
    try:
        return file.read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""

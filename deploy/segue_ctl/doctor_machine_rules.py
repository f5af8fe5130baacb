"""What the machine's facts mean for Segue. Pure: facts in, findings out.

The numbers it compares with are named here, each with its reason.
"""

from __future__ import annotations

from segue_ctl.doctor_findings import Finding, ok, problem, size, warning
from segue_ctl.doctor_machine import LOCKED_TRIAL_BYTES, SHM, UNLIMITED, Machine

NEEDED_PYTHON = (3, 11)
ENOUGH_CPUS = 2
"""One for the daemon beside those of the engine."""
FEW_FILES, ENOUGH_FILES = 256, 8192
"""A daemon needs some dozen; GPU memory in many physical allocations one each, up to 2048, and at the daemon
twice that."""
SMALL_SHM_BYTES = 64 << 20
"""What containers get by default."""
ENGINES = ("python", "python3", "vllm", "segue-daemon")


def machine_findings(machine: Machine, version: str, *, gpu: bool, pinned: bool = False) -> list[Finding]:
    """Everything about the machine, in the order of reading. `gpu`: whether it has a driver for NVIDIA's;
    `pinned`: whether that has page-locked memory here."""
    return [
        _python(machine, version),
        _packages(machine),
        _cpus(machine),
        _memory(machine),
        _sealing(machine),
        _lifeline(machine),
        _files(machine, gpu),
        _locked(machine, gpu, pinned),
        _shm(machine),
        _pids(machine, gpu),
    ]


def _python(machine: Machine, version: str) -> Finding:
    number = ".".join(map(str, machine.python))
    found = f"Segue {version}, Python {number}, {machine.system} {machine.release}"
    if machine.system != "Linux":
        return problem("software", found, "Segue needs Linux: memfd, futexes, descriptors over unix sockets")
    if machine.python[:2] < NEEDED_PYTHON:
        return problem("software", found, "use Python 3.11 or later")
    return ok("software", found)


def _packages(machine: Machine) -> Finding:
    names = [f"{name} {number}" for name, number in machine.packages.items()]
    return ok("optional packages", ", ".join(names) or "none")


def _cpus(machine: Machine) -> Finding:
    usable = min(machine.usable_cpus, machine.cpu_quota or machine.usable_cpus)
    found = f"{usable:g} of {machine.cpus} CPUs may be used here"
    if usable < ENOUGH_CPUS:
        return warning("CPUs", found, "give engine and daemon a core each: the daemon must answer at once")
    return ok("CPUs", found)


def _memory(machine: Machine) -> Finding:
    if machine.memory_bytes is None or machine.available_bytes is None:
        return warning("memory", "not known", "mount /proc")
    found = f"{size(machine.available_bytes)} available of {size(machine.memory_bytes)}"
    if machine.memory_limit is not None:
        found += f"; limited to {size(machine.memory_limit)} (control group)"
    return ok("memory", found)


def _sealing(machine: Machine) -> Finding:
    if machine.memfd_error:
        todo = "allow memfd_create and its seals (seccomp profile), and mount /proc"
        return problem("shared memory", f"cannot be sealed: {machine.memfd_error}", todo)
    return ok("shared memory", "memfd: made, sealed, opened read only")


def _lifeline(machine: Machine) -> Finding:
    if machine.lifeline_ms is None:
        return warning(
            "lifeline",
            f"no robust futexes across processes ({machine.libc or 'no glibc'})",
            "a killed engine is noticed by its socket, up to 0.3 s later; a glibc image has them",
        )
    return ok("lifeline", f"a killed process was noticed after {machine.lifeline_ms:.1f} ms")


def _files(machine: Machine, gpu: bool) -> Finding:
    soft, hard = machine.open_files
    found = f"{_limit(soft)} open files (hard limit {_limit(hard)})"
    if soft != UNLIMITED and soft < FEW_FILES:
        return problem("ulimit -n", found, f"raise it: ulimit -n {ENOUGH_FILES}, or LimitNOFILE= in the unit")
    if gpu and soft != UNLIMITED and soft < ENOUGH_FILES:
        todo = f"enough, but for GPU memory in expandable segments: ulimit -n {ENOUGH_FILES} on both sides"
        return warning("ulimit -n", found, todo)
    return ok("ulimit -n", found)


def _locked(machine: Machine, gpu: bool, pinned: bool) -> Finding:
    soft, _ = machine.locked_memory
    found = _limit(soft, bytes_=True)
    if not gpu:
        return ok("ulimit -l", f"{found} (of page-locked memory; only GPUs need it)")
    if machine.lock_error and pinned:
        return ok("ulimit -l", f"{found}; the NVIDIA driver locks memory all the same")
    if machine.lock_error:
        found += f"; {size(LOCKED_TRIAL_BYTES)} could not be locked: {machine.lock_error}"
        return warning("ulimit -l", found, "ulimit -l unlimited, or LimitMEMLOCK= in the unit")
    return ok("ulimit -l", f"{found}; {size(LOCKED_TRIAL_BYTES)} were locked")


def _shm(machine: Machine) -> Finding:
    if machine.shm_bytes is None or machine.shm_free_bytes is None:
        return warning(str(SHM), "not there", "Segue does not use it; an engine of several ranks does")
    found = f"{size(machine.shm_free_bytes)} free of {size(machine.shm_bytes)} (not used by Segue)"
    if machine.shm_bytes <= SMALL_SHM_BYTES:
        return warning(str(SHM), found, "engines of several ranks need more: --shm-size, or --ipc=host")
    return ok(str(SHM), found)


def _pids(machine: Machine, gpu: bool) -> Finding:
    first = machine.first_process
    if not first:
        return warning("PID namespace", "process 1 cannot be seen", "mount /proc")
    if gpu and first in ENGINES:
        return warning(
            "PID namespace",
            f"process 1 is {first}: a container without an init",
            "on GPUs, engine and daemon must not both be process 1: start one below an init (--init), or"
            " share the PID namespace",
        )
    return ok("PID namespace", f"process 1 is {first}")


def _limit(value: int, *, bytes_: bool = False) -> str:
    if value == UNLIMITED:
        return "unlimited"
    return size(value) if bytes_ else str(value)

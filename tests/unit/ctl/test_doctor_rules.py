"""What `seguectl doctor` makes of what it found: what is fine, what is not, and what to do then."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from segue_core.messages.probe import Doing, Gpu, GpusFound, PeerFound, PeersFound, ShareFound
from segue_core.messages.status import DaemonStatus, EngineStatus, StoreStatus
from segue_ctl.doctor_child import Outcome
from segue_ctl.doctor_findings import Finding, exit_status, ok, problem, render, report, warning
from segue_ctl.doctor_gpu import GpuFacts, Trial
from segue_ctl.doctor_gpu_rules import gpu_findings
from segue_ctl.doctor_machine import UNLIMITED, Machine, meminfo
from segue_ctl.doctor_machine_rules import machine_findings
from segue_ctl.doctor_service import Folder, Port, ServiceFacts
from segue_ctl.doctor_service_rules import service_findings
from segue_ctl.output import Style
from segue_ctl.status import Seen

GIB = 1 << 30
MACHINE = Machine(
    python=(3, 12, 1),
    system="Linux",
    release="6.8",
    libc="glibc 2.39",
    packages={"cuda": "13.4"},
    cpus=16,
    usable_cpus=16,
    cpu_quota=None,
    memory_bytes=64 * GIB,
    available_bytes=48 * GIB,
    memory_limit=None,
    memory_charged=None,
    shm_bytes=32 * GIB,
    shm_free_bytes=31 * GIB,
    memfd_error="",
    lifeline_ms=0.2,
    open_files=(65536, 65536),
    locked_memory=(UNLIMITED, UNLIMITED),
    lock_error="",
    first_process="systemd",
    host_name="host",
)


def worst(findings: list[Finding]) -> dict[str, str]:
    """What is not ok: the verdict of each check."""
    for finding in findings:
        assert finding.verdict == "ok" or finding.todo, f"{finding}: not ok, and nothing to do about it"
    return {finding.check.strip(): finding.verdict for finding in findings if finding.verdict != "ok"}


@pytest.mark.parametrize("gpu", [False, True])
def test_a_good_machine_is_all_well(gpu: bool) -> None:
    """Nobody is sent looking for what is not wrong."""
    assert worst(machine_findings(MACHINE, "0.1.0", gpu=gpu)) == {}


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({"python": (3, 10, 1)}, "software", "problem"),
        ({"system": "Darwin"}, "software", "problem"),
        ({"memfd_error": "Operation not permitted"}, "shared memory", "problem"),
        ({"open_files": (64, 64)}, "ulimit -n", "problem"),
        ({"open_files": (1024, UNLIMITED)}, "ulimit -n", "warning"),
        ({"lifeline_ms": None, "libc": ""}, "lifeline", "warning"),
        ({"usable_cpus": 1}, "CPUs", "warning"),
        ({"cpu_quota": 0.5}, "CPUs", "warning"),
        ({"lock_error": "Cannot allocate memory"}, "ulimit -l", "warning"),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "warning"),
        ({"first_process": "python3"}, "PID namespace", "warning"),
    ],
)
def test_what_a_machine_lacks_is_named(changes: dict[str, Any], check: str, verdict: str) -> None:
    """One thing is wrong, one line says so."""
    assert worst(machine_findings(replace(MACHINE, **changes), "0.1.0", gpu=True)) == {check: verdict}


def test_limits_that_only_gpus_reach_worry_nobody_else() -> None:
    """A laptop with the usual limits is fit for KV in host memory."""
    usual = replace(
        MACHINE,
        open_files=(1024, 4096),
        locked_memory=(8 << 20, 8 << 20),
        lock_error="",
        first_process="python",
    )
    assert worst(machine_findings(usual, "0.1.0", gpu=False)) == {}


def test_a_limit_that_the_driver_does_not_heed_is_no_warning() -> None:
    """What counts is whether memory could be page-locked for the GPU."""
    limited = replace(MACHINE, locked_memory=(8 << 20, 8 << 20), lock_error="Cannot allocate memory")
    assert worst(machine_findings(limited, "0.1.0", gpu=True, pinned=True)) == {}


def test_memory_is_read_in_bytes() -> None:
    """A budget is compared with what there is, not with a thousandth of it."""
    assert meminfo("MemTotal:  2048 kB\nHugePages_Total: 3\nbroken\n") == {"MemTotal": 2 << 20}


GPU = Gpu("GPU-5e6f8091-a2b3-c4d5-e6f7-08192a3b4c5d", "A GPU", 80 * GIB)
SHARED = ShareFound(equal=True, nbytes=4 << 20, open_ms=3, step_seen=True, pinned_bytes=64 << 20, pinned_ms=9)


def gpus(*found: Gpu, **changes: Any) -> GpusFound:
    """A driver that shows these."""
    return GpusFound(**({"library": True, "version": 13000, "gpus": found or (GPU,)} | changes))


def trial(kind: Any, found: ShareFound | None = SHARED, **daemon: Any) -> Trial:
    """One way of sharing, of which the daemon's end says this."""
    return Trial(kind, Outcome(status=0), Outcome(found, **daemon))


def facts(found: GpusFound | None = None, **changes: Any) -> GpuFacts:
    """A machine with one GPU on which all works, with changes."""
    every = Outcome(found or gpus())
    return replace(
        GpuFacts(
            every=every,
            visible=every,
            trials={GPU.uuid: [trial("cuda_ipc"), trial("cuda_vmm")]},
            bindings="13.4.0",
            hidden_by="",
            device_file=True,
            kernel_module="NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun",
            mps=False,
        ),
        **changes,
    )


def test_a_good_gpu_is_all_well() -> None:
    """The driver's number is there for a bug report."""
    findings = gpu_findings(facts())
    assert worst(findings) == {}
    assert "580.65.06" in findings[0].found


REFUSED = trial("cuda_ipc", ShareFound(error="cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE", hint="so"))
HUNG = trial(
    "cuda_vmm", None, doing="mapping the memory of another process", error="did not return within 30 s"
)
WRONG = trial("cuda_ipc", ShareFound(equal=False, nbytes=4096, step_seen=True))
UNSEEN = trial("cuda_ipc", ShareFound(equal=True, nbytes=4096, step_seen=False))
UNLOCKED = trial("cuda_ipc", ShareFound(equal=True, nbytes=4096, step_seen=True, pinned_error="MEMORY"))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (facts(gpus(version=11040)), {"driver": "problem"}),
        (facts(GpusFound(True, error="libcuda.so.1: no driver for CUDA 12")), {"driver": "problem"}),
        (facts(gpus(gpus=(), error="cuInit: CUDA_ERROR_NO_DEVICE")), {"driver": "warning"}),
        (facts(gpus(gpus=(), error="cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")), {"driver": "problem"}),
        (facts(GpusFound(False)), {"driver": "warning"}),
        (facts(bindings="", trials={}), {"cuda extra": "problem"}),
        (facts(visible=Outcome(gpus(gpus=()))), {"an engine sees": "warning"}),
        (facts(mps=True), {"MPS": "warning"}),
        (facts(gpus(Gpu(GPU.uuid, "A GPU", compute_mode=2))), {"GPU 0": "problem"}),
        (facts(gpus(Gpu(GPU.uuid, "A GPU", compute_mode=3))), {"GPU 0": "problem"}),
        (facts(gpus(Gpu(GPU.uuid, "A GPU", write_value_64=False))), {"GPU 0": "problem"}),
        (facts(gpus(Gpu(GPU.uuid, "A GPU", mig=True))), {"GPU 0": "warning"}),
        (facts(trials={GPU.uuid: [REFUSED]}), {"by IPC handle": "problem"}),
        (facts(trials={GPU.uuid: [HUNG]}), {"by descriptor": "problem"}),
        (facts(trials={GPU.uuid: [WRONG]}), {"by IPC handle": "problem"}),
        (facts(trials={GPU.uuid: [UNSEEN]}), {"by IPC handle": "problem"}),
        (facts(trials={GPU.uuid: [UNLOCKED]}), {"page-locked memory": "warning"}),
    ],
)
def test_what_is_wrong_with_a_gpu_is_named(changed: GpuFacts, expected: dict[str, str]) -> None:
    """Each kind of trouble has its line, and its way out."""
    assert worst(gpu_findings(changed)) == expected


def test_without_a_driver_host_pages_are_protected() -> None:
    """No GPU is no problem."""
    (finding,) = gpu_findings(facts(GpusFound(False), device_file=False, kernel_module=""))
    assert finding == ok("driver", "no NVIDIA driver: host pages only")


def test_a_driver_that_hangs_is_told_with_the_step() -> None:
    """The call in which it hangs is what a bug report needs."""
    stuck = Outcome(doing="cuInit", error="did not return within 30 s")
    (finding,) = gpu_findings(facts(every=stuck, visible=stuck))
    assert finding.verdict == "problem" and "cuInit" in finding.found and "dmesg" in finding.todo


def test_the_end_that_waits_is_not_blamed_for_the_one_that_hangs() -> None:
    """The line names the process that has to be looked at."""
    waits = Outcome(doing="waiting for the other process", error="did not return within 30 s")
    hangs = Outcome(doing="allocating memory to share", error="did not return within 30 s")
    both = [Trial("cuda_ipc", hangs, waits), Trial("cuda_vmm", waits, replace(hangs, doing="copying"))]
    engine, daemon = gpu_findings(facts(trials={GPU.uuid: both}))[-2:]
    assert "the engine's end" in engine.found and "allocating" in engine.found
    assert "the daemon's end" in daemon.found and "copying" in daemon.found


SETTINGS: dict[str, Any] = {
    "name": "a",
    "socket": "/run/segue/a.sock",
    "peers": [{"name": "b"}],
    "store": {"budget_bytes": GIB},
    "security": {"dir": "", "insecure": False},
}
STATUS = DaemonStatus("a", "0.1.0", 7, True, EngineStatus("a", "running"), (), StoreStatus(1, 0, 0, 0, 0, 0))
FOLDER = Folder("/run/segue", there=True, parent=True, mode=0o700)
PEER = PeerFound("b", "127.0.0.1:7202", control_ms=0.4, bulk=True)
HTTP = Port("http.port", "127.0.0.1", 7101)


def service(settings: dict[str, Any] | None = None, **changes: Any) -> ServiceFacts:
    """A daemon that could be started here, with changes."""
    whole = None if settings == {} else SETTINGS | (settings or {})
    given: dict[str, Any] = {
        "ports": (HTTP,),
        "folder": FOLDER,
        "peers": Outcome(PeersFound((PEER,))),
    }
    return ServiceFacts("a.yaml", "daemon", whole, **(given | changes))


TAKEN = Port("http.port", "127.0.0.1", 7101, taken=True, error="Address already in use")
OTHER = DaemonStatus("z", "0.1.0", 7, True, EngineStatus("z", "running"), (), StoreStatus(1, 0, 0, 0, 0, 0))
KEYS = {"security": {"dir": "/etc/segue/keys", "insecure": False}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (service(), {}),
        (service({}, error="a.yaml: unknown key `prot`"), {"configuration": "problem"}),
        (service(KEYS, error="security.dir: others can get at it", peers=None), {"configuration": "problem"}),
        (service(ports=(TAKEN,)), {"http.port": "problem"}),
        (service(ports=(TAKEN,), seen=Seen("daemon", True, OTHER)), {"http.port": "problem"}),
        (service(ports=(TAKEN,), seen=Seen("daemon", True, STATUS), listener_pid=7), {}),
        (service(ports=(Port("http.port", "9.9.9.9", 1, error="not here"),)), {"http.port": "problem"}),
        (service(listener_pid=7), {"socket": "problem"}),
        (service(folder=Folder("/run/segue", False, False)), {"socket": "problem"}),
        (service(folder=Folder("/run/segue", False, True)), {}),
        (service(folder=replace(FOLDER, mode=0o755)), {"socket": "problem"}),
        (service(folder=replace(FOLDER, owner=4242)), {"socket": "problem"}),
        (service(folder=replace(FOLDER, is_folder=False)), {"socket": "problem"}),
        (service({"store": {"budget_bytes": 60 * GIB}}), {"store": "problem"}),
        (service({"store": {"budget_bytes": 45 * GIB}}), {"store": "warning"}),
        (service({"security": {"dir": "", "insecure": True}}), {"keys": "warning"}),
        (service(KEYS, peers=Outcome(PeersFound((PEER,), certificate_days=900))), {}),
        (service(KEYS, peers=Outcome(PeersFound((PEER,), certificate_days=3))), {"keys": "warning"}),
        (service(KEYS, peers=Outcome(error="died of SIGKILL")), {"keys": "problem"}),
        (
            service(peers=Outcome(PeersFound((PeerFound("b", "h:1", error="no answer"),)))),
            {"peer b": "problem"},
        ),
    ],
)
def test_what_a_configuration_lacks_is_named(changed: ServiceFacts, expected: dict[str, str]) -> None:
    """Before a daemon is started it is known that it will start, and reach its peers."""
    assert worst(service_findings(changed, MACHINE)) == expected


def test_a_containers_limit_counts_and_a_running_daemon_has_its_memory_already() -> None:
    """The budget is taken whole at start: beyond the limit the kernel would kill it."""
    small = replace(MACHINE, memory_limit=8 * GIB, memory_charged=2 * GIB)
    large = {"store": {"budget_bytes": 7 * GIB}}
    assert worst(service_findings(service(large), small)) == {"store": "problem"}
    running = service(large, ports=(TAKEN,), seen=Seen("daemon", True, STATUS), listener_pid=7)
    assert worst(service_findings(running, small)) == {"store": "warning"}


def test_the_exit_status_is_that_of_problems_alone() -> None:
    """A warning does not stop a start-up script."""
    assert exit_status(report("1", {"x": [ok("a", "b"), warning("a", "b", "c")]})) == 0
    assert exit_status(report("1", {"x": [problem("a", "b", "c")]})) == 3


def test_a_line_says_what_was_found_and_then_what_to_do() -> None:
    """Readable without a manual."""
    text = render("here", [ok("a", "fine"), problem("b", "broken", "mend it")], Style(sys.stdout))
    assert [line.split() for line in text.splitlines()] == [
        ["here"],
        ["ok", "a", "fine"],
        ["problem", "b", "broken"],
        ["->", "mend", "it"],
    ]


def test_a_step_that_was_begun_is_no_answer() -> None:
    """A probe that died after its first line has found nothing."""
    died = Outcome(Doing("cuInit"), doing="cuInit", error="died of SIGSEGV")
    (finding,) = gpu_findings(facts(every=died))
    assert finding.verdict == "problem" and "SIGSEGV" in finding.found

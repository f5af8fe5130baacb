"""What was found of the NVIDIA driver, and what it means for Segue. Pure: facts in, findings out.

Without a driver nothing is wrong: KV in host memory is protected all the same.
"""

from __future__ import annotations

from segue_core.messages.probe import Gpu, GpusFound, ShareFound, ShareKind
from segue_ctl.doctor_child import HANGS, Outcome
from segue_ctl.doctor_findings import Finding, ok, problem, size, warning
from segue_ctl.doctor_gpu import OLDEST_CUDA, GpuFacts, Trial, first_error

BATCHES_CUDA = 13_000
"""Copies of many pieces in one call."""
PROHIBITED, EXCLUSIVE = 2, 3
WAYS: dict[ShareKind, tuple[str, str]] = {
    "cuda_ipc": ("IPC handle", "PyTorch's default allocator"),
    "cuda_vmm": ("descriptor", "expandable segments"),
}
KERNEL_REMEDY = "look into the kernel's log (dmesg: Xid, NVRM); reload the NVIDIA kernel modules, or reboot"
CONTAINER_REMEDY = "see docs/gpu.md: what a container must have in common with the engine's"


def gpu_findings(facts: GpuFacts) -> list[Finding]:
    """Everything about GPUs, in the order of reading."""
    found = facts.every.found
    if not isinstance(found, GpusFound):
        return [_lost(facts.every)]
    if not found.library:
        return [_no_driver(facts)]
    driver = _driver(found, facts)
    if driver.verdict == "problem" or not found.gpus:
        return [driver]
    findings = [driver, _bindings(facts), _visible(found, facts), *_mps(found, facts)]
    for number, gpu in enumerate(found.gpus):
        findings.append(_gpu(f"GPU {number}", gpu))
        findings += [_trial(gpu, trial) for trial in facts.trials.get(gpu.uuid, [])]
        findings += _pinned(facts.trials.get(gpu.uuid, []))
    return findings


def _lost(outcome: Outcome) -> Finding:
    return problem(
        "driver",
        f"a process that asks it {outcome.error}, while {outcome.doing or 'starting'}",
        KERNEL_REMEDY,
    )


def _no_driver(facts: GpuFacts) -> Finding:
    if facts.device_file or facts.kernel_module:
        return warning(
            "driver",
            "the host has an NVIDIA driver, but there is no libcuda.so.1 here: host pages only",
            "start the container with the NVIDIA runtime (--gpus; capabilities compute,utility)",
        )
    return ok("driver", "no NVIDIA driver: host pages only")


def _driver(found: GpusFound, facts: GpuFacts) -> Finding:
    number = f"{found.version // 1000}.{found.version % 1000 // 10}"
    if found.version and found.version < OLDEST_CUDA:
        return problem("driver", f"for CUDA {number}", "update the NVIDIA driver to one for CUDA 12 or later")
    if found.error:
        todo = {
            "CUDA_ERROR_NO_DEVICE": "give this process a GPU (containers: --gpus)",
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "reload the NVIDIA kernel modules, or reboot",
        }.get(found.error.rpartition(" ")[2], "update the NVIDIA driver; nvidia-smi may tell more")
        kind = warning if "NO_DEVICE" in found.error else problem
        return kind("driver", found.error, todo)
    if not found.gpus:
        return warning("driver", "no GPU", "give this process a GPU (containers: --gpus)")
    module = facts.kernel_module.partition("Kernel Module")[2].split()
    text = f"for CUDA {number}" + (f", kernel module {module[0]}" if module else "")
    if found.version < BATCHES_CUDA:
        return ok("driver", f"{text}; a block is copied piece by piece (one call from CUDA 13 on)")
    return ok("driver", text)


def _bindings(facts: GpuFacts) -> Finding:
    if not facts.bindings:
        return problem("cuda extra", "cuda-bindings is not installed", "pip install 'segue-ha[cuda]'")
    return ok("cuda extra", f"cuda-bindings {facts.bindings}")


def _visible(found: GpusFound, facts: GpuFacts) -> Finding:
    seen = facts.visible.found
    if not isinstance(seen, GpusFound):
        return _lost(facts.visible)
    here, total = {gpu.uuid for gpu in seen.gpus}, len(found.gpus)
    text = f"{len(here)} of {total} GPUs"
    if facts.hidden_by:
        text += f" with CUDA_VISIBLE_DEVICES={facts.hidden_by}"
    if not here:
        return warning(
            "an engine sees",
            text,
            "an engine that is started from here has no GPU; a daemon finds its own by UUID all the same",
        )
    return ok("an engine sees", text)


def _mps(found: GpusFound, facts: GpuFacts) -> list[Finding]:
    if not facts.mps and not any(gpu.mps for gpu in found.gpus):
        return []
    todo = "a fatal fault of one client ends all clients of that GPU, the daemon among them: better without"
    return [warning("MPS", "in use, or configured", todo)]


def _gpu(check: str, gpu: Gpu) -> Finding:
    text = f"{gpu.uuid}, {gpu.name}, {size(gpu.total_bytes)}"
    if gpu.compute_mode == PROHIBITED:
        return problem(check, f"{text}, compute mode: prohibited", "nvidia-smi -c DEFAULT")
    if gpu.compute_mode == EXCLUSIVE:
        todo = "engine and daemon both need it: nvidia-smi -c DEFAULT"
        return problem(check, f"{text}, compute mode: one process only", todo)
    if not gpu.write_value_64:
        todo = "it cannot say which step is complete: engines there run unprotected"
        return problem(check, f"{text}, no 64-bit stream memory operations", todo)
    if gpu.mig:
        todo = "IPC handles are not expected to work between processes there: rely on what the trial says"
        return warning(check, f"{text}, an instance (MIG)", todo)
    return ok(check, text)


def _trial(gpu: Gpu, trial: Trial) -> Finding:
    way, whose = WAYS[trial.kind]
    check = f"  by {way}"
    end, error, hint = first_error(trial)
    other = WAYS["cuda_vmm" if trial.kind == "cuda_ipc" else "cuda_ipc"][1]
    if error:
        remedy = KERNEL_REMEDY if HANGS in error else hint or CONTAINER_REMEDY
        if trial.kind == "cuda_ipc" and (gpu.mig or not gpu.ipc):
            remedy = f"this GPU does not offer it: start engines with {other}"
        # Without descriptors only some allocators cannot be protected; without handles it is the usual one.
        kind = problem if trial.kind == "cuda_ipc" or HANGS in error else warning
        return kind(check, f"not shared ({whose}): {end}: {error}", remedy)
    found = trial.daemon.found
    assert isinstance(found, ShareFound)
    if not found.equal:
        text = f"{size(found.nbytes)} were read, with other bytes than were written"
        return problem(check, text, CONTAINER_REMEDY)
    if not found.step_seen:
        return problem(
            check,
            "the number that the GPU writes behind each step did not arrive",
            "engines would not be protected: update the NVIDIA driver",
        )
    return ok(
        check, f"{size(found.nbytes)} shared and read, every byte right; opened in {found.open_ms:.0f} ms"
    )


def _pinned(trials: list[Trial]) -> list[Finding]:
    """Page-locking, once for each GPU."""
    for trial in trials:
        found = trial.daemon.found
        if not isinstance(found, ShareFound) or found.error:
            continue
        if found.pinned_error:
            todo = "ulimit -l unlimited, or more memory for the container; copies take a step more now"
            return [warning("  page-locked memory", found.pinned_error, todo)]
        taken = f"{size(found.pinned_bytes)} locked in {found.pinned_ms:.0f} ms"
        return [ok("  page-locked memory", taken)]
    return []

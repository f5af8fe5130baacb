"""What can go wrong at the CUDA driver, and what an operator can do about each of it. Pure: makes no call.

Invariant: every error says what to do.
"""

from __future__ import annotations

from segue_core.errors import SegueError

HINTS = {
    "NOT_INSTALLED": "install the extra: pip install 'segue-ha[cuda]'",
    "NO_DRIVER": "no libcuda.so.1 here: run the daemon where the GPU's driver is",
    "NOT_IN_THIS_DRIVER": "update the NVIDIA driver to one for CUDA 12 or later",
    "CUDA_ERROR_NO_DEVICE": "the daemon sees no GPU: give its container or service the engine's GPU",
    "CUDA_ERROR_INVALID_DEVICE": "give the daemon the engine's GPU",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU has no room for the daemon's context: leave it 1 GiB",
    "CUDA_ERROR_MAP_FAILED": "see docs/gpu.md: what a container must share with the engine's",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "reboot, or reload the NVIDIA kernel modules",
}
CALL_HINTS = {
    "cuIpcOpenMemHandle": "the engine must live, and have another process id than the daemon (docs/gpu.md)",
    "cuMemImportFromShareableHandle": "engine and daemon must use the same driver and GPU (docs/gpu.md)",
    "cuMemHostRegister": "the host has no memory left to page-lock, or a limit on it (ulimit -l)",
}
OTHER_HINT = "this engine is not protected meanwhile; if it stays so, see docs/gpu.md"
RESTART_HINT = "restart segue-daemon: its context on this GPU cannot be used any more"
LOST_HINT = (
    "restart segue-daemon: the driver lets no process use a GPU again after that; until then no engine on"
    " that GPU is protected here"
)
STUCK_HINT = "look at the GPU with nvidia-smi; if the driver does not come back, restart segue-daemon"

ENDS_CONTEXT = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "CONTAINED",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "MPS_CLIENT_TERMINATED",
        "EXTERNAL_DEVICE",
        "UNKNOWN",
    )
)
"""After these a process must start again to use that GPU, by NVIDIA's documentation: neither giving the
context back nor resetting it heals it."""


class CudaError(SegueError):
    """A driver call failed, or cannot be made. `name` is the driver's name for it."""

    def __init__(self, call: str, name: str, *, hint: str = "") -> None:
        if name in ENDS_CONTEXT:
            hint = RESTART_HINT
        super().__init__(
            f"{call}: {name}", hint=hint or HINTS.get(name) or CALL_HINTS.get(call) or OTHER_HINT
        )
        self.call = call
        self.name = name


class LostGpuError(CudaError):
    """An earlier fault has cost this process the GPU."""

    def __init__(self, gpu: str, fault: str) -> None:
        super().__init__(f"this daemon's context on {gpu}", f"lost by {fault}", hint=LOST_HINT)

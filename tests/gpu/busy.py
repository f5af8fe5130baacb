"""Work for a GPU, and how much of it gets done: a matrix product, a kernel of our own, or plain copies.

The first kind that this machine can run is taken. Nothing here knows of Segue: it is what an engine would do.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

QUEUED = 8
"""Rounds that are queued before the oldest is waited for: a GPU that is never idle."""
COPY_BYTES = 16 << 20
MATRIX = 4096
KERNEL_BLOCKS, KERNEL_THREADS, KERNEL_LOOPS = 1024, 256, 20_000
SOURCE = b"""
extern "C" __global__ void churn(float *out, int loops)
{
    float a = threadIdx.x * 0.001f, b = blockIdx.x * 0.002f;
    for (int i = 0; i < loops; i++)
        a = a * 1.0001f + b;
    out[blockIdx.x * blockDim.x + threadIdx.x] = a;
}
"""


@dataclass(frozen=True)
class Work:
    """`queue()` queues one round, `wait()` waits for everything queued."""

    name: str
    queue: Callable[[], None]
    wait: Callable[[], None]


class NotHere(Exception):
    """This kind of work cannot be done here; the text says why."""


def choose(kinds: list[str], stream: int) -> tuple[Work, str]:
    """The first of `kinds` that works, and why those before it do not."""
    reasons = []
    for kind in kinds:
        try:
            return KINDS[kind](stream), "; ".join(reasons)
        except NotHere as error:
            reasons.append(f"{kind}: {error}")
    raise NotHere("; ".join(reasons))


def rounds_per_s(work: Work, seconds: float) -> float:
    """Keep `QUEUED` rounds in the queue for a while."""
    work.queue()
    work.wait()
    done, begun_ns = 0, time.monotonic_ns()
    while time.monotonic_ns() - begun_ns < seconds * 1e9 or not done:
        for _ in range(QUEUED):
            work.queue()
        work.wait()
        done += QUEUED
    return done / ((time.monotonic_ns() - begun_ns) / 1e9)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] != 0:
        raise NotHere(str(getattr(result[0], "name", result[0])))
    return result[1] if len(result) > 1 else None


def no_torch() -> str:
    """Why there is no torch with CUDA; empty: there seems to be one. Does not import it, which takes
    seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "no torch"
    return f"no torch with CUDA (torch {version})" if "+cpu" in version else ""


def matrix_products(stream: int) -> Work:
    """bf16 matrix products in torch, of the size of a layer's."""
    del stream  # torch has its own
    if reason := no_torch():
        raise NotHere(reason)
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise NotHere("torch sees no GPU")
    left = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    return Work(
        f"matrix product {MATRIX} x {MATRIX}, bf16",
        lambda: torch.mm(left, left, out=out),
        torch.cuda.synchronize,
    )


def own_kernel(stream: int) -> Work:
    """A kernel that keeps every multiprocessor at work, compiled for this GPU."""
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        binary = _compile(nvrtc)
    except (ImportError, RuntimeError) as error:
        raise NotHere(f"no NVRTC ({type(error).__name__})") from error
    try:
        module = _checked(driver.cuModuleLoadData(binary))
        function = _checked(driver.cuModuleGetFunction(module, b"churn"))
        out = _checked(driver.cuMemAlloc(4 * KERNEL_BLOCKS * KERNEL_THREADS))
    except RuntimeError as error:
        raise NotHere(f"the driver cannot load it ({error})") from error
    arguments = ((int(out), KERNEL_LOOPS), (ctypes.c_void_p, ctypes.c_int))

    def queue() -> None:
        _checked(
            driver.cuLaunchKernel(
                function, KERNEL_BLOCKS, 1, 1, KERNEL_THREADS, 1, 1, 0, stream, arguments, 0
            )
        )

    return Work("a kernel of multiply-adds", queue, lambda: _checked(driver.cuStreamSynchronize(stream)))


def _compile(nvrtc: Any) -> bytes:
    """Machine code for this GPU. Not PTX: a driver refuses what is newer than itself."""
    attribute = driver.CUdevice_attribute
    major = _checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0))
    minor = _checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0))
    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE, b"churn.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def copies(stream: int) -> Work:
    """Copies within the GPU: no arithmetic, but the memory is at work."""
    one, other = (_checked(driver.cuMemAlloc(COPY_BYTES)) for _ in range(2))
    return Work(
        "copies within the GPU",
        lambda: _checked(driver.cuMemcpyDtoDAsync(one, other, COPY_BYTES, stream)),
        lambda: _checked(driver.cuStreamSynchronize(stream)),
    )


KINDS: dict[str, Callable[[int], Work]] = {
    "torch": matrix_products,
    "kernel": own_kernel,
    "copies": copies,
}

"""The engine's end of `seguectl doctor`: what a process sees of the driver, and memory that it shares.

    python -m segue_shim.cuda_probe list             the GPUs that this environment shows
    python -m segue_shim.cuda_probe share KIND FD    share memory of the first one over the socket FD

Run as a process of its own: a driver that is out of order may hang or end it. Shares with the code that an
engine shares its KV cache with (`cuda_side`), and touches no memory of others.
"""

from __future__ import annotations

import socket
import sys
from ctypes import byref, c_int, c_size_t, create_string_buffer
from typing import get_args

from segue_core.errors import SegueError
from segue_core.framing import send_with_fds
from segue_core.memory_handle import uuid_text
from segue_core.messages.probe import WAITING, Doing, Gpu, GpusFound, ShareFound, ShareKind, say
from segue_core.trial import (
    BLOCKS,
    MARKED_STEP,
    REGION_AXES,
    SLOTS,
    TRIAL_BYTES,
    Offer,
    content,
    tensor_shape,
)
from segue_shim.cuda_driver import LIBRARY, MISSING, CudaCallError
from segue_shim.cuda_export import DeviceTensor
from segue_shim.cuda_probe_memory import OFFSET, ProbeDriver
from segue_shim.cuda_side import CudaSide
from segue_shim.cuda_table import CAN_WRITE_VALUE_64

COMPUTE_MODE, HAS_VMM_FD, HAS_IPC, HAS_MPS = 20, 103, 125, 133
"""Numbers of cuda.h (CUdevice_attribute)."""
NAME_BYTES = 256


def list_gpus() -> GpusFound:
    """All GPUs that the environment lets this process see."""
    say(Doing(f"loading {LIBRARY}"))
    try:
        driver = ProbeDriver()
    except CudaCallError as error:
        return GpusFound(library=not isinstance(error.__cause__, OSError), error=error.args[0])
    version = 0
    try:
        version = driver.version()
        say(Doing("cuInit"))
        driver.call("cuInit", 0)
        return GpusFound(True, version, tuple(describe(driver, number) for number in range(driver.count())))
    except CudaCallError as error:
        return GpusFound(True, version, error=error.args[0])


def describe(driver: ProbeDriver, number: int) -> Gpu:
    """What the driver says of one GPU. Needs no context there."""
    device, nbytes = c_int(), c_size_t()
    name = create_string_buffer(NAME_BYTES)
    driver.call("cuDeviceGet", byref(device), number)
    driver.call("cuDeviceGetName", name, NAME_BYTES, device.value)
    driver.call("cuDeviceTotalMem", byref(nbytes), device.value)
    text = name.value.decode(errors="replace")
    is_instance = " MIG " in f"{text} "
    uuid = uuid_text(driver.uuid(device.value))

    def asked(attribute: int, unknown: int) -> int:
        try:
            return driver.attribute(attribute, device.value)
        except CudaCallError:  # an older driver than the attribute
            return unknown

    return Gpu(
        uuid=uuid.replace("GPU-", "MIG-") if is_instance else uuid,
        name=text,
        total_bytes=nbytes.value,
        compute_mode=asked(COMPUTE_MODE, 0),
        mig=is_instance,
        mps=bool(asked(HAS_MPS, 0)),
        write_value_64=bool(asked(CAN_WRITE_VALUE_64, 1)),
        ipc=bool(asked(HAS_IPC, 1)),
        vmm_fd=bool(asked(HAS_VMM_FD, 1)),
    )


def share(kind: ShareKind, connection: socket.socket) -> None:
    """Make memory as engines have it, share it, and wait until the other side has gone. Raises SegueError."""
    say(Doing("making a context on the GPU"))
    driver = ProbeDriver()
    driver.call("cuInit", 0)
    driver.enter(driver.primary_context(0))
    stream = driver.create_stream()
    say(Doing("allocating memory to share"))
    start = driver.shareable(kind, OFFSET + TRIAL_BYTES) + OFFSET
    driver.write(start, content())
    shape, strides = tensor_shape()
    say(Doing("exporting it"))
    side = CudaSide(
        [DeviceTensor("trial", start, shape, strides, 1)],
        device=0,
        stream=lambda: stream,
        num_blocks=BLOCKS,
        block_size=SLOTS,
        axes=REGION_AXES,
    )
    side.mark(MARKED_STEP)
    send_with_fds(connection, Offer(side.geometry), [side.timeline_fd, *side.memory_fds])
    say(Doing(WAITING))
    connection.recv(1)


def main(arguments: list[str]) -> int:
    """Entry point."""
    if arguments == ["list"]:
        say(list_gpus())
        return 0
    if len(arguments) == 3 and arguments[0] == "share" and arguments[1] in get_args(ShareKind):
        kind: ShareKind = "cuda_ipc" if arguments[1] == "cuda_ipc" else "cuda_vmm"
        with socket.socket(fileno=int(arguments[2])) as connection:
            try:
                share(kind, connection)
            except SegueError as error:
                # A call's own advice is for an engine that runs, not for a trial.
                hint = "" if isinstance(error, CudaCallError) else error.hint
                hint = "update the NVIDIA driver" if MISSING in error.args[0] else hint
                say(ShareFound(error=error.args[0], hint=hint))
        return 0
    sys.stderr.write("seguectl doctor runs this\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

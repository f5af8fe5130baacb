"""The CUDA double within one process keeps its promises, seen through the real Python bindings."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import cuda_double
from support.cuda_double import device_uuid
from support.cuda_driven import OK, Driven, StartProcess

KIB = 1 << 10
MIB = 1 << 20
STICKY = "CUDA_ERROR_ILLEGAL_ADDRESS"
INVALID = "CUDA_ERROR_INVALID_VALUE"
NOT_READY = "CUDA_ERROR_NOT_READY"
BUFFER = 96 * KIB
ORDER_ANY = 3
DEINITIALIZED = 4


def test_memory_allocated_copied_and_freed_is_all_given_back(process: Driven) -> None:
    """Bytes go to the device and back unchanged, and the double tells what is still held."""
    memory, host, back = process.cu("cuMemAlloc", BUFFER), process.pinned(BUFFER), process.pinned(BUFFER)
    process.call("write", host, bytes(range(256)))
    process.cu("cuMemcpyHtoDAsync", memory, host, BUFFER, process.stream)
    process.cu("cuMemcpyDtoDAsync", memory + 256, memory, 256, process.stream)
    process.cu("cuMemcpyDtoHAsync", back, memory, BUFFER, process.stream)
    process.cu("cuStreamSynchronize", process.stream)
    assert process.call("read", back, 512) == bytes(range(256)) * 2
    held = process.call("counts")
    assert (held["allocations"], held["device_bytes"], held["pinned_bytes"]) == (1, BUFFER, 2 * BUFFER)
    process.cu("cuMemFree", memory)
    assert process.error("cuMemFree", memory) == INVALID
    assert process.error("cuMemcpyDtoHAsync", back, memory, 1, process.stream) == INVALID
    for address in (host, back):
        process.cu("cuMemFreeHost", address)


def test_device_memory_cannot_be_read_on_the_host(start_process: StartProcess) -> None:
    """Code that takes a device pointer for a host pointer dies here as it would beside a GPU."""
    process = start_process().begin()
    process.start("read", process.cu("cuMemAlloc", BUFFER), 1)
    assert process.process.wait(30) < 0


def test_the_allocation_behind_a_pointer_is_found(process: Driven) -> None:
    """An exporter learns base, size and kind of what a tensor's pointer lies in, and of nothing else."""
    memory, host = process.cu("cuMemAlloc", BUFFER), process.pinned(BUFFER)
    assert process.cu("cuMemGetAddressRange", memory + 5000) == [memory, BUFFER]
    names = ["MEMORY_TYPE", "RANGE_START_ADDR", "RANGE_SIZE", "DEVICE_ORDINAL", "IS_LEGACY_CUDA_IPC_CAPABLE"]
    assert process.call("attributes", memory + 5000, names) == [2, memory, BUFFER, 0, 1]
    assert process.call("attributes", host + 5000, names[:3]) == [1, host, BUFFER]
    for beyond in (memory + BUFFER, host):
        assert process.error("cuMemGetAddressRange", beyond) == "CUDA_ERROR_NOT_FOUND"
    process.cu("cuMemFree", memory)
    process.cu("cuMemFreeHost", host)


def test_every_thread_needs_the_context_made_current(process: Driven) -> None:
    """A thread that forgot it is refused, whatever other threads did; after a fork nothing works."""
    assert process.call("in_thread", "cuMemAlloc", BUFFER) == ["CUDA_ERROR_INVALID_CONTEXT"]
    assert process.call("in_thread", "cuDeviceGetCount") == [OK, 1]
    assert process.call("in_fork", "cuDeviceGetCount") == ["CUDA_ERROR_NOT_INITIALIZED"]


def test_a_batch_copies_every_fragment_or_is_refused_as_a_whole(process: Driven) -> None:
    """Gathering by one call moves each piece to its place; with one bad piece nothing is queued."""
    memory, host = process.filled(7, BUFFER), process.pinned(BUFFER)
    pieces = [[host + at, memory + BUFFER - KIB - at, KIB] for at in range(0, 64 * KIB, KIB)]
    assert process.call("batch", pieces, process.stream) == [OK]
    process.cu("cuStreamSynchronize", process.stream)
    assert process.call("read", host, 65 * KIB) == b"\7" * (64 * KIB) + bytes(KIB)
    neighbours = [process.cu("cuMemAlloc", BUFFER) for _ in range(2)]
    for bad in ([host, neighbours[1] + BUFFER - 1, 2], [host, memory, 0], [host + BUFFER, memory, 1]):
        assert process.call("batch", [[host + 64 * KIB, memory, KIB], bad], process.stream) == [INVALID]
    assert process.call("batch", pieces, 0) == [INVALID], "the null stream"
    assert process.call("batch", pieces, process.stream, 0) == [INVALID], "no order of reading"
    assert process.call("batch", pieces, process.stream, 1, 1) == [INVALID], "nothing for the first piece"
    process.cu("cuStreamSynchronize", process.stream)
    assert process.call("read", host + 64 * KIB, KIB) == bytes(KIB)
    for address in (memory, *neighbours):
        process.cu("cuMemFree", address)
    process.cu("cuMemFreeHost", host)


@pytest.mark.parametrize(("order", "seen"), [(1, 2), (ORDER_ANY, 1)])
def test_a_source_read_out_of_stream_order_is_read_too_early(process: Driven, order: int, seen: int) -> None:
    """Only the order of the stream waits for earlier work; any other order may read before it, and does."""
    memory, host = process.filled(1, BUFFER), process.pinned(BUFFER)
    process.call("hold")
    process.cu("cuMemsetD8Async", memory, 2, BUFFER, process.stream)
    assert process.call("batch", [[host, memory, BUFFER]], process.stream, order) == [OK]
    process.call("let_go")
    process.cu("cuStreamSynchronize", process.stream)
    assert process.call("read", host, 4) == bytes([seen]) * 4
    process.cu("cuMemFree", memory)
    process.cu("cuMemFreeHost", host)


def test_an_older_driver_has_no_batches(start_process: StartProcess) -> None:
    """The bindings raise instead of returning an error, and single copies still work."""
    process = start_process(driver_version=12080).begin()
    memory, host = process.filled(7, BUFFER), process.pinned(BUFFER)
    assert process.call("batch", [[host, memory, KIB]], process.stream) == ["missing"]
    process.cu("cuMemcpyDtoHAsync", host, memory, KIB, process.stream)
    process.cu("cuStreamSynchronize", process.stream)
    assert process.call("read", host, KIB) == b"\7" * KIB


def test_a_held_stream_stands_still_in_the_middle_of_a_copy(process: Driven) -> None:
    """Work is done later than it is asked for, from the back to the front, and waiting gives up the GIL."""
    memory, host = process.filled(7, BUFFER), process.pinned(BUFFER)
    event = process.cu("cuEventCreate", 2)
    process.call("hold", 3 * KIB)
    process.cu("cuMemcpyDtoHAsync", host, memory, BUFFER, process.stream)
    process.cu("cuEventRecord", event, process.stream)
    assert process.error("cuStreamQuery", process.stream) == NOT_READY
    assert process.error("cuEventQuery", event) == NOT_READY
    assert process.call("read", host, BUFFER - 3 * KIB) == bytes(BUFFER - 3 * KIB)
    assert process.call("let_go_during", "cuStreamSynchronize", process.stream) == [OK]
    assert process.error("cuEventQuery", event) == OK
    assert process.call("read", host, BUFFER) == b"\7" * BUFFER
    process.cu("cuEventDestroy", event)
    process.cu("cuMemFree", memory)
    process.cu("cuMemFreeHost", host)


def test_a_stream_waits_for_what_was_recorded_before(process: Driven) -> None:
    """An event orders two streams if it was recorded first; a wait before the record is no wait."""
    memory, host = process.filled(0, BUFFER), process.pinned(BUFFER)
    event, other = process.cu("cuEventCreate", 2), process.cu("cuStreamCreate", 1)
    process.cu("cuStreamWaitEvent", other, event, 0)
    process.cu("cuStreamSynchronize", other)
    process.cu("cuStreamWaitValue32", process.stream, memory, 1, 0)
    process.cu("cuMemsetD8Async", memory, 2, BUFFER, process.stream)
    process.cu("cuEventRecord", event, process.stream)
    process.cu("cuStreamWaitEvent", other, event, 0)
    process.cu("cuMemcpyDtoHAsync", host, memory, BUFFER, other)
    assert [process.error("cuStreamQuery", other) for _ in range(20)] == [NOT_READY] * 20
    process.cu("cuStreamWriteValue32", 0, memory, 1, 0)
    process.cu("cuStreamSynchronize", other)
    assert process.call("read", host, BUFFER) == b"\2" * BUFFER
    process.cu("cuStreamDestroy", other)
    process.cu("cuEventDestroy", event)
    assert process.error("cuEventQuery", event) == "CUDA_ERROR_INVALID_HANDLE"
    process.cu("cuMemFree", memory)
    process.cu("cuMemFreeHost", host)


def test_copies_from_memory_that_is_not_pinned_are_refused(process: Driven) -> None:
    """Forgetting to pin makes copies slow and synchronous on a GPU; here it is an error."""
    memory, host = process.cu("cuMemAlloc", BUFFER), process.call("host_memory", BUFFER)
    assert process.error("cuMemcpyHtoDAsync", memory, host, BUFFER, process.stream) == INVALID
    process.cu("cuMemHostRegister", host, BUFFER // 2, 0)
    assert process.error("cuMemcpyHtoDAsync", memory, host, BUFFER, process.stream) == INVALID
    process.cu("cuMemcpyHtoDAsync", memory, host, BUFFER // 2, process.stream)
    assert process.error("cuMemHostRegister", host, BUFFER, 0) == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    process.cu("cuStreamSynchronize", process.stream)
    process.cu("cuMemHostUnregister", host)
    assert process.error("cuMemHostUnregister", host) == "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
    process.cu("cuMemFree", memory)


def test_memory_mapped_read_only_is_pinned_only_as_such(process: Driven) -> None:
    """An arena that a process may only read needs the flag for it, and is never written by a copy."""
    memory, host = process.cu("cuMemAlloc", BUFFER), process.call("host_memory", BUFFER, False)
    assert process.error("cuMemHostRegister", host, BUFFER, 0) == INVALID
    process.cu("cuMemHostRegister", host, BUFFER, 8)
    process.cu("cuMemcpyHtoDAsync", memory, host, BUFFER, process.stream)
    assert process.error("cuMemcpyDtoHAsync", host, memory, BUFFER, process.stream) == INVALID
    process.cu("cuStreamSynchronize", process.stream)
    process.cu("cuMemHostUnregister", host)
    process.cu("cuMemFree", memory)


def test_limits_and_lacks_are_those_asked_for(start_process: StartProcess) -> None:
    """A small GPU runs out of memory, a low limit out of pinned memory; a machine without sharing says so."""
    lacks = ("ipc", "vmm_fd", "read_only_register")
    process = start_process(memory_mb=4, pinned_mb=2, lacks=lacks).begin()
    memory = process.cu("cuMemAlloc", 3 * MIB)
    assert process.cu("cuMemGetInfo") == [MIB, 4 * MIB]
    assert process.error("cuMemAlloc", 2 * MIB) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert process.error("cuMemHostAlloc", 3 * MIB, 0) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert process.error("cuIpcGetMemHandle", memory) == "CUDA_ERROR_NOT_SUPPORTED"
    assert process.error("cuEventCreate", 6) == "CUDA_ERROR_NOT_SUPPORTED"
    assert process.call("create", 2 * MIB) == ["CUDA_ERROR_NOT_SUPPORTED"]
    assert [process.cu("cuDeviceGetAttribute", lacking, 0) for lacking in (103, 113, 125)] == [0, 0, 0]


def test_devices_are_found_by_uuid_whatever_is_visible(start_process: StartProcess) -> None:
    """The same GPU has the same UUID in every process, and another number where others are hidden."""
    both = start_process(devices=2).begin()
    second = start_process(devices=2, visible=f"GPU-{str(device_uuid(1))[:13]}").begin()
    assert [both.cu("cuDeviceGetUuid", at) for at in (0, 1)] == [device_uuid(0).bytes, device_uuid(1).bytes]
    assert second.cu("cuDeviceGetCount") == 1
    assert second.cu("cuDeviceGetUuid", 0) == device_uuid(1).bytes
    assert second.error("cuDeviceGetUuid", 1) == "CUDA_ERROR_INVALID_DEVICE"
    assert start_process(visible="7").call("cu", "cuInit", 0) == ["CUDA_ERROR_NO_DEVICE"]


def test_memory_of_another_device_is_the_wrong_context(start_process: StartProcess) -> None:
    """A thread that works for one GPU in the context of another is caught."""
    process = start_process(devices=2).begin()
    memory, host = process.cu("cuMemAlloc", BUFFER), process.pinned(BUFFER)
    process.begin(1)
    wrong = process.error("cuMemcpyDtoHAsync", host, memory, BUFFER, process.stream)
    assert wrong == "CUDA_ERROR_INVALID_CONTEXT"


def test_an_injected_error_comes_at_the_call_asked_for(process: Driven) -> None:
    """Any call may be made to fail once, the nth time or always, and is counted."""
    before = process.call("calls", "cuMemGetInfo")
    process.call("fail", "cuMemGetInfo:2:2,cuEventCreate:0:801")
    answers = [process.error("cuMemGetInfo") for _ in range(3)]
    assert answers == [OK, "CUDA_ERROR_OUT_OF_MEMORY", OK]
    assert [process.error("cuEventCreate", 2) for _ in range(2)] == ["CUDA_ERROR_NOT_SUPPORTED"] * 2
    assert process.call("calls", "cuMemGetInfo") == before + 3
    process.call("fail", "*:3:2")
    calls = ["cuMemGetInfo", "cuCtxGetCurrent"] * 2
    assert [process.error(call) for call in calls] == [OK, OK, "CUDA_ERROR_OUT_OF_MEMORY", OK]
    process.call("fail", "")


def test_a_late_error_shows_when_the_stream_gets_there_and_stays(start_process: StartProcess) -> None:
    """Asynchronous work fails after its call succeeded; then the context is lost, its queued work dropped."""
    process = start_process(failures="cuMemcpyDtoHAsync:1:719:late").begin()
    memory, host = process.filled(7, BUFFER), process.pinned(BUFFER)
    process.call("hold")
    process.cu("cuMemcpyDtoHAsync", host, memory, BUFFER, process.stream)
    process.cu("cuMemcpyDtoHAsync", host, memory, BUFFER, process.stream)
    process.call("let_go")
    assert process.error("cuStreamSynchronize", process.stream) == "CUDA_ERROR_LAUNCH_FAILED"
    assert process.error("cuMemFree", memory) == "CUDA_ERROR_LAUNCH_FAILED"
    assert process.error("cuMemAlloc", 1) == "CUDA_ERROR_LAUNCH_FAILED"
    assert process.call("read", host, BUFFER) == bytes(BUFFER)


@pytest.mark.parametrize("strict", [True, False])
def test_memory_taken_away_under_a_copy_is_a_fault(start_process: StartProcess, strict: bool) -> None:
    """Freeing what a queued copy uses poisons the context in strict mode; otherwise the driver waits."""
    process = start_process(strict=strict).begin()
    memory, host = process.filled(7, BUFFER), process.pinned(BUFFER)
    process.call("hold")
    process.cu("cuMemcpyDtoHAsync", host, memory, BUFFER, process.stream)
    if strict:
        assert process.error("cuMemFree", memory) == STICKY
        assert process.error("cuStreamSynchronize", process.stream) == STICKY
    else:
        assert process.call("let_go_during", "cuMemFree", memory) == [OK]
        assert process.call("read", host, BUFFER) == b"\7" * BUFFER


def test_settings_that_cannot_be_read_are_refused(start_process: StartProcess) -> None:
    """A misspelt setting stops the test instead of changing nothing."""
    for settings in ({"failures": "cuInit"}, {"lacks": ("everything",)}):
        process = start_process(**settings)
        assert process.call("cu", "cuInit", 0) == [INVALID], settings


def test_the_double_has_no_memory_errors_or_races_of_its_own(library_folder: Path, tmp_path: Path) -> None:
    """Threads that allocate, share events, copy and free at random run clean under the address sanitizer."""
    program = tmp_path / "stress"
    flags = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    files = [*cuda_double.sources(), cuda_double.SOURCES / "stress.c"]
    if subprocess.run(
        ["gcc", *flags, "-xc", "-", "-o", str(tmp_path / "no")], input=b"int main(){}"
    ).returncode:
        pytest.skip("this compiler has no sanitizers")
    cuda_double.compile_with(flags, files, program)
    done: Any = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr


def test_a_call_may_hang_and_a_driver_shut_down(start_process: StartProcess) -> None:
    """What code has to survive at a lost GPU: a call that does not return, a driver that ends for good."""
    process = start_process().begin()
    process.call("fail", f"cuMemAlloc:1:{DEINITIALIZED}")
    for call, *arguments in (("cuMemAlloc", BUFFER), ("cuMemAlloc", BUFFER), ("cuDeviceGetCount",)):
        assert process.error(call, *arguments) == "CUDA_ERROR_DEINITIALIZED"
    process.call("fail", "cuMemAlloc:1:hang")
    process.start("cu", "cuMemAlloc", BUFFER)
    process.expect_no_answer()

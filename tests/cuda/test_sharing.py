"""The CUDA double between two real processes: memory and events of an engine, used by its daemon."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.cuda_driven import OK, Driven, StartProcess
from support.waiting import wait_for

KIB = 1 << 10
MIB = 1 << 20
SIZE = 2 * MIB
PIECE = KIB
PIECES = 64
NOT_READY = "CUDA_ERROR_NOT_READY"
INVALID = "CUDA_ERROR_INVALID_VALUE"
FAULT = "CUDA_ERROR_ILLEGAL_ADDRESS"
each_kind = pytest.mark.parametrize("kind", ["ipc", "vmm"])


@dataclass
class Shared:
    """An engine's memory as both processes see it, and the event that says when it is written."""

    engine: Driven
    daemon: Driven
    kind: str
    theirs: int
    ours: int
    handle: bytes
    their_event: int
    our_event: int
    host: int

    def write(self, byte: int) -> None:
        """The engine begins to fill its memory, and records the event behind it."""
        self.engine.cu("cuMemsetD8Async", self.theirs, byte, SIZE, self.engine.stream)
        self.engine.cu("cuEventRecord", self.their_event, self.engine.stream)

    def wait(self) -> None:
        """The daemon polls the event on the host."""
        wait_for(lambda: self.daemon.error("cuEventQuery", self.our_event) == OK, "event reached")

    def gather(self) -> bytes:
        """What the daemon finds in pieces from all over the memory."""
        step = SIZE // PIECES
        pieces = [[self.host + at * PIECE, self.ours + at * step, PIECE] for at in range(PIECES)]
        assert self.daemon.call("batch", pieces, self.daemon.stream) == [OK]
        self.daemon.cu("cuStreamSynchronize", self.daemon.stream)
        return bytes(self.daemon.call("read", self.host, PIECE * PIECES))

    def close(self) -> None:
        """The daemon gives back all that it has of the engine."""
        self.daemon.cu("cuEventDestroy", self.our_event)
        if self.kind == "ipc":
            self.daemon.cu("cuIpcCloseMemHandle", self.ours)
        else:
            self.daemon.ok("unmap_whole", self.ours, SIZE)


def share(engine: Driven, daemon: Driven, kind: str, access: int = 3) -> Shared:
    """Memory of the engine, exported as one kind of handle and mapped by the daemon."""
    handle = b""
    if kind == "ipc":
        theirs = engine.cu("cuMemAlloc", SIZE)
        handle = engine.cu("cuIpcGetMemHandle", theirs)
        ours = daemon.cu("cuIpcOpenMemHandle", handle, 1)
    else:
        physical = engine.ok("create", SIZE)
        theirs = engine.call("map_whole", physical, SIZE)
        error, descriptors = engine.call_for_descriptors("export_descriptor", physical)
        assert error == OK
        imported = daemon.ok("import_descriptor", descriptors=descriptors)
        ours = daemon.call("map_whole", imported, SIZE, access)
        daemon.cu("cuMemRelease", imported)
        engine.cu("cuMemRelease", physical)
    their_event = engine.cu("cuEventCreate", 6)
    our_event = daemon.cu("cuIpcOpenEventHandle", engine.cu("cuIpcGetEventHandle", their_event))
    host = daemon.pinned(PIECE * PIECES)
    return Shared(engine, daemon, kind, theirs, ours, handle, their_event, our_event, host)


@each_kind
def test_what_is_taken_after_the_event_is_whole_and_before_it_torn(
    start_process: StartProcess, kind: str
) -> None:
    """A daemon that waits for the commit gets the engine's bytes, one that does not gets torn ones."""
    shared = share(start_process().begin(), start_process().begin(), kind)
    before = shared.daemon.held()
    shared.write(1)
    shared.wait()
    assert shared.gather() == b"\1" * PIECE * PIECES
    shared.engine.call("hold", SIZE // 2)
    shared.write(2)
    wait_for(lambda: shared.gather() == half_and_half(), "half is written, from the back")
    assert shared.daemon.error("cuEventQuery", shared.our_event) == NOT_READY
    shared.engine.call("let_go")
    shared.wait()
    assert shared.gather() == b"\2" * PIECE * PIECES
    assert shared.daemon.held() == before


def half_and_half() -> bytes:
    """What a daemon that does not wait finds of a write that stands still in the middle."""
    return b"\1" * (PIECE * PIECES // 2) + b"\2" * (PIECE * PIECES // 2)


@each_kind
def test_memory_of_a_killed_engine_stays_readable_until_it_is_closed(
    start_process: StartProcess, kind: str
) -> None:
    """What was mapped before SIGKILL can be salvaged; nothing opens after it, and all is given back."""
    daemon = start_process().begin()
    before = daemon.held()
    shared = share(start_process().begin(), daemon, kind)
    shared.write(5)
    shared.wait()
    shared.engine.kill()
    assert shared.gather() == b"\5" * PIECE * PIECES
    shared.close()
    daemon.cu("cuMemFreeHost", shared.host)
    assert daemon.held() == before
    if kind == "ipc":
        assert daemon.error("cuIpcOpenMemHandle", shared.handle, 1) == INVALID


def test_memory_of_a_killed_engine_may_be_lost(start_process: StartProcess) -> None:
    """Legacy handles promise nothing after a death: a daemon must survive that reading faults."""
    shared = share(start_process().begin(), start_process(orphan_memory="lose").begin(), "ipc")
    shared.engine.kill()
    with pytest.raises(AssertionError, match=FAULT):
        shared.gather()
    assert shared.daemon.error("cuIpcCloseMemHandle", shared.ours) == FAULT


@pytest.mark.parametrize(
    ("becomes", "answer"), [("hang", NOT_READY), ("done", OK), ("fail", "CUDA_ERROR_LAUNCH_FAILED")]
)
def test_the_pending_event_of_a_killed_engine(start_process: StartProcess, becomes: str, answer: str) -> None:
    """Nobody records it any more: it is pending for ever, or passes although the data is torn, or fails."""
    shared = share(start_process().begin(), start_process(orphan_event=becomes).begin(), "vmm")
    shared.engine.call("hold")
    shared.write(6)
    assert shared.daemon.error("cuEventQuery", shared.our_event) == NOT_READY
    shared.engine.kill()
    assert shared.daemon.error("cuEventQuery", shared.our_event) == answer
    if becomes == "hang":  # a wait in the stream hangs with it, and nothing calls it off
        shared.daemon.cu("cuStreamWaitEvent", shared.daemon.stream, shared.our_event, 0)
        shared.daemon.start("cu", "cuStreamSynchronize", shared.daemon.stream)
        shared.daemon.expect_no_answer()


def test_a_handle_opened_twice_is_one_mapping_with_two_closes(start_process: StartProcess) -> None:
    """The second open gives the same address and is counted: only a second close gives the memory back."""
    shared = share(start_process().begin(), start_process().begin(), "ipc")
    assert shared.daemon.cu("cuIpcOpenMemHandle", shared.handle, 1) == shared.ours
    counts = shared.daemon.call("counts")
    assert (counts["imports"], counts["import_opens"], counts["double_opens"]) == (1, 2, 1)
    for _ in range(2):
        shared.daemon.cu("cuIpcCloseMemHandle", shared.ours)
    assert shared.daemon.error("cuIpcCloseMemHandle", shared.ours) == INVALID
    assert shared.engine.error("cuIpcOpenMemHandle", shared.handle, 1) == "CUDA_ERROR_INVALID_CONTEXT"


def test_memory_that_the_engine_frees_reads_as_garbage(start_process: StartProcess) -> None:
    """Freeing what an importer maps is undefined: it reads a pattern, and the handle opens nothing else."""
    shared = share(start_process().begin(), start_process().begin(), "ipc")
    shared.engine.cu("cuMemFree", shared.theirs)
    assert shared.gather() == b"\xdd" * PIECE * PIECES
    shared.engine.cu("cuMemAlloc", SIZE)
    shared.daemon.cu("cuIpcCloseMemHandle", shared.ours)
    for handle in (shared.handle, bytes(64)):
        assert shared.daemon.error("cuIpcOpenMemHandle", handle, 1) == INVALID


def test_only_what_was_made_for_it_is_exported(process: Driven) -> None:
    """A bare pointer tells whether its memory can be shared, and as what; what cannot is refused."""
    (private, shareable), size = (
        (process.ok("create", SIZE, exportable) for exportable in (False, True)),
        SIZE,
    )
    addresses = [process.call("map_whole", handle, size) for handle in (private, shareable)]
    assert [process.call("handle_types", address) for address in addresses] == [[OK, 0, 0], [OK, 1, 1]]
    assert process.call("export_descriptor", private) == INVALID
    assert process.error("cuIpcGetMemHandle", addresses[1]) == INVALID, "no legacy handle of virtual memory"
    memory = process.cu("cuMemAlloc", SIZE)
    assert process.error("cuMemRetainAllocationHandle", memory) == INVALID
    assert process.error("cuIpcGetMemHandle", memory + 1) == INVALID, "the base is asked for"
    process.cu("cuMemFree", memory)
    for address in addresses:
        assert process.error("cuMemUnmap", address, SIZE // 2) == INVALID
        process.ok("unmap_whole", address, SIZE)
    for handle in (private, shareable):
        process.cu("cuMemRelease", handle)
        assert process.error("cuMemRelease", handle) == INVALID


def test_memory_mapped_without_access_faults(start_process: StartProcess) -> None:
    """A mapping is of use only once access was given, and a daemon that asked to read cannot write."""
    engine, daemon = start_process().begin(), start_process().begin()
    shared = share(engine, daemon, "vmm", access=1)
    shared.write(3)
    shared.wait()
    assert shared.gather() == b"\3" * PIECE * PIECES
    daemon.cu("cuMemsetD8Async", shared.ours, 4, 1, daemon.stream)
    assert daemon.error("cuStreamSynchronize", daemon.stream) == FAULT
    handle, address = engine.ok("create", SIZE), engine.cu("cuMemAddressReserve", SIZE, 0, 0, 0)
    engine.cu("cuMemMap", address, SIZE, 0, handle, 0)
    assert engine.error("cuMemcpyDtoD", shared.theirs, address, 1) == FAULT


def test_a_wait_for_a_value_can_be_ended_by_the_one_who_waits(start_process: StartProcess) -> None:
    """A timeline in shared memory orders two processes; after the writer's death the waiter frees itself."""
    engine, daemon = start_process().begin(), start_process().begin()
    shared = share(engine, daemon, "ipc")
    engine.call("hold")
    engine.cu("cuMemsetD8Async", shared.theirs + 8, 9, SIZE - 8, engine.stream)
    engine.cu("cuStreamWriteValue64", engine.stream, shared.theirs, 1, 0)
    daemon.cu("cuStreamWaitValue64", daemon.stream, shared.ours, 1, 0)
    daemon.cu("cuMemcpyDtoHAsync", shared.host, shared.ours + 8, 8, daemon.stream)
    assert daemon.error("cuStreamQuery", daemon.stream) == NOT_READY
    engine.call("let_go")
    daemon.cu("cuStreamSynchronize", daemon.stream)
    assert daemon.call("read", shared.host, 8) == b"\11" * 8
    engine.kill()
    daemon.cu("cuStreamWaitValue64", daemon.stream, shared.ours, 2, 0)
    assert daemon.error("cuStreamQuery", daemon.stream) == NOT_READY
    daemon.cu("cuStreamWriteValue64", daemon.cu("cuStreamCreate", 1), shared.ours, 2, 0)
    daemon.cu("cuStreamSynchronize", daemon.stream)


def test_memory_of_a_gpu_that_is_not_the_current_one_is_refused(start_process: StartProcess) -> None:
    """A handle opens only where its GPU is visible, in that GPU's own context."""
    engine = start_process(devices=2).begin(1)
    handle = engine.cu("cuIpcGetMemHandle", engine.cu("cuMemAlloc", SIZE))
    hidden, both = start_process(devices=2, visible="0").begin(), start_process(devices=2).begin()
    assert hidden.error("cuIpcOpenMemHandle", handle, 1) == "CUDA_ERROR_INVALID_DEVICE"
    assert both.error("cuIpcOpenMemHandle", handle, 1) == "CUDA_ERROR_INVALID_CONTEXT"
    both.begin(1).cu("cuIpcOpenMemHandle", handle, 1)

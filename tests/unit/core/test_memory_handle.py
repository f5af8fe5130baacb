"""How exported memory is described: what is possible, and what is refused before anything is mapped."""

from __future__ import annotations

import msgspec
import pytest

from segue_core.errors import GeometryError
from segue_core.geometry import Geometry, Region
from segue_core.memory_handle import MAX_PIECES, MemoryHandle, uuid_text

UUID = uuid_text(bytes(range(16)))
REGION = Region(0, 0, (4, 16), (16, 1), 1, ("block", "dim"))
IPC = MemoryHandle("cuda_ipc", UUID, 32, (128,), bytes(64))
VMM = MemoryHandle("cuda_vmm", UUID, 0, (48, 48))


def geometry(*handles: MemoryHandle) -> Geometry:
    """Four blocks of 16 bytes in one exported allocation."""
    return Geometry(4, 1, (64,), (REGION,), handles)


def test_handles_say_how_many_descriptors_come_with_them() -> None:
    """The daemon knows which descriptor belongs to what."""
    assert [geometry(*handles).validate().fd_count for handles in ((), (IPC,), (VMM,))] == [1, 0, 2]
    assert [geometry(*handles).gpu for handles in ((), (MemoryHandle(),), (VMM,))] == ["", "", UUID]


def test_an_engine_on_a_host_says_nothing_new() -> None:
    """A geometry without handles is what it was, and means the same bytes as one on a GPU."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(geometry()), type=Geometry)
    assert plain == geometry() and plain.digest == geometry(IPC).digest


WRONG = {
    "not one a handle": (IPC, IPC),
    "no GPU": (msgspec.structs.replace(IPC, uuid="GPU-1"),),
    "outside the allocation": (msgspec.structs.replace(IPC, offset=65),),
    "before the allocation": (msgspec.structs.replace(IPC, offset=-1),),
    "an allocation of nothing": (msgspec.structs.replace(VMM, pieces=(96, 0)),),
    "no allocation": (msgspec.structs.replace(IPC, pieces=()),),
    "two allocations, one handle": (msgspec.structs.replace(IPC, pieces=(64, 64)),),
    "half a handle": (msgspec.structs.replace(IPC, token=bytes(32)),),
    "a host with an offset": (MemoryHandle("memfd", "", 8),),
    "a handle where descriptors are": (msgspec.structs.replace(VMM, token=bytes(64)),),
    "too many descriptors": (msgspec.structs.replace(VMM, pieces=(1,) * (MAX_PIECES + 1)),),
}


@pytest.mark.parametrize("handles", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_is_refused(handles: tuple[MemoryHandle, ...]) -> None:
    """A wrong claim about memory never reaches the driver."""
    with pytest.raises(GeometryError):
        geometry(*handles).validate()


def test_one_rank_has_its_memory_in_one_place() -> None:
    """Two GPUs behind one rank, or a GPU and the host, are refused with the reason."""
    other = msgspec.structs.replace(IPC, uuid=uuid_text(bytes(16)))
    for second in (other, MemoryHandle()):
        with pytest.raises(GeometryError, match="several places"):
            Geometry(4, 1, (64, 64), (REGION,), (IPC, second)).validate()

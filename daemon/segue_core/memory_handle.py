"""How another process reaches an exported allocation: a host file, or memory of an NVIDIA GPU.

Pure description, checked when it arrives. A geometry without handles means host memory, one file a handle.
Invariant: for a checked list, each handle's bytes lie inside its allocations and the number of descriptors
that belong to it is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from segue_core.errors import GeometryError

HandleKind = Literal["memfd", "cuda_ipc", "cuda_vmm"]
"""memfd: host memory, one descriptor. cuda_ipc: `cuMemAlloc` memory, by the 64 bytes of `cuIpcGetMemHandle`,
no descriptor. cuda_vmm: memory of the driver's virtual memory calls, one descriptor for each physical
allocation."""

IPC_HANDLE_BYTES = 64
MAX_PIECES = 2048
"""Physical allocations of one engine; each takes a descriptor on both sides."""
MAX_ALLOCATION_BYTES = 1 << 44
UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class MemoryHandle(msgspec.Struct, frozen=True, array_like=True):
    """One handle of a geometry. Its bytes begin `offset` bytes into the allocations.

    `pieces`: bytes of each physical allocation, in the order of their addresses, which follow each other
    without a gap (one for `cuda_ipc`, none for `memfd`). `uuid`: the GPU, as `uuid_text` writes it. `token`:
    the IPC handle.
    """

    kind: HandleKind = "memfd"
    uuid: Annotated[str, msgspec.Meta(max_length=64)] = ""
    offset: int = 0
    pieces: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PIECES)] = ()
    token: Annotated[bytes, msgspec.Meta(max_length=IPC_HANDLE_BYTES)] = b""

    @property
    def fd_count(self) -> int:
        """Descriptors that travel with it."""
        return {"memfd": 1, "cuda_ipc": 0, "cuda_vmm": len(self.pieces)}[self.kind]


def uuid_text(uuid: bytes) -> str:
    """The 16 bytes that the driver gives, as people and tools write them."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def check_handles(handles: Sequence[MemoryHandle], handle_bytes: Sequence[int]) -> None:
    """Raise GeometryError with the reason unless `handles` can be what `handle_bytes` are exported by."""
    if not handles:
        return
    if len(handles) != len(handle_bytes):
        raise GeometryError(f"{len(handles)} memory handles for {len(handle_bytes)} exported allocations")
    if len({handle.uuid for handle in handles}) > 1:
        raise GeometryError("memory handles of several places: an engine rank has its KV in one")
    if sum(handle.fd_count for handle in handles) > max(MAX_PIECES, len(handles)):
        raise GeometryError(f"more than {MAX_PIECES} physical allocations")
    for number, (handle, nbytes) in enumerate(zip(handles, handle_bytes, strict=True)):
        reason = _wrong(handle, nbytes)
        if reason:
            raise GeometryError(f"memory handle {number} ({handle.kind}): {reason}")


def _wrong(handle: MemoryHandle, nbytes: int) -> str:
    """What is wrong with one handle; empty if nothing is."""
    if handle.kind == "memfd":
        plain = MemoryHandle()
        return "" if handle == plain else "host memory has no GPU, offset or pieces"
    if not UUID.fullmatch(handle.uuid):
        return f"{handle.uuid!r} is not the UUID of a GPU"
    if not handle.pieces or not all(0 < piece <= MAX_ALLOCATION_BYTES for piece in handle.pieces):
        return "sizes of the allocations are missing or impossible"
    if handle.kind == "cuda_ipc" and (len(handle.pieces) != 1 or len(handle.token) != IPC_HANDLE_BYTES):
        return f"needs one allocation and a handle of {IPC_HANDLE_BYTES} bytes"
    if handle.kind == "cuda_vmm" and handle.token:
        return "is reached by descriptors, not by an IPC handle"
    total = sum(handle.pieces)
    if nbytes < 1 or not 0 <= handle.offset <= total - nbytes:
        return f"{nbytes} bytes from byte {handle.offset} on reach outside {total} allocated bytes"
    return ""

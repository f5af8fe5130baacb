"""An engine's KV pages as the daemon sees them: mapped read only, copied out in whole blocks or slots.

`Pages` is the interface; `HostPages` maps host memory by file descriptor, `cuda.pages.CudaPages` GPU memory.
Nothing here can write to the engine. Invariants: only bytes that the validated geometry names are read; what
is closed or out of bounds is refused, never read as something else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from segue_core.errors import ProtocolError, SegueError
from segue_core.geometry import Fragment, Geometry
from segue_daemon.arena import Bytes

HOST_BATCH_BYTES = 512 << 10
"""Out of host memory small deltas are built one behind the other up to here, and go out together: while they
are in the processor's cache."""


class PagesError(SegueError):
    """The memory of this engine cannot be read (any more). It says nothing about any other."""


class Piece(NamedTuple):
    """What is copied to one place: a block, fragments in geometry order; or slots [first, last) of it, in the
    order of `Geometry.slot_runs`."""

    block: int
    out: Bytes
    slots: tuple[int, int] | None = None


class Pages(Protocol):
    """Memory that holds an engine's KV blocks. Copies raise PagesError when it cannot be read, IndexError
    for a block that does not exist, ValueError if `out` is too small."""

    geometry: Geometry
    failure: str
    """Why the memory cannot be read any more; empty while it can."""
    gathers: bool
    """Whether each copy costs a wait, whatever it brings: what goes out together is copied together then.
    Else it is best copied piece by piece, each worked on while it is in the processor's cache."""
    batch_bytes: int
    """How much of small pieces best goes out together."""

    def buffer(self, nbytes: int) -> Bytes:
        """Memory to copy into: (nbytes,) uint8, of the kind that copies are fastest to. It outlives
        `close`."""
        ...

    def copy_block(self, block: int, out: Bytes) -> None:
        """Copy block `block` into `out` ((block_bytes,) uint8), fragments in geometry order."""
        ...

    def copy_pieces(self, pieces: Sequence[Piece]) -> Generator[int, None, None]:
        """Copy pieces, each to its own place. Yields how many of them are complete, in their order, from time
        to time: they can be worked on while others are still copied. A block that is not there is refused
        before anything is copied. Once it is used up or closed, nothing is written any more, unless
        PagesError was raised. Where there is a deadline, all have one."""
        ...

    def copy_blocks(self, blocks: Sequence[int], out: Bytes) -> Generator[int, None, None]:
        """`copy_pieces` of whole blocks into `out`, one behind the other. Too little room, too, is refused
        before anything is copied."""
        ...

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        """Copy slots [first, last) into `out`, in the order of `Geometry.slot_runs`; returns the bytes."""
        ...

    @property
    def let_go(self) -> bool:
        """Whether nothing of the memory is held any more: `close` may not wait for that."""
        ...

    def close(self) -> None:
        """Let the memory go; safe to call twice."""
        ...


class HostPages:
    """Pages in host memory, shared by file descriptor (`fds[h]` is geometry handle h)."""

    def __init__(self, geometry: Geometry, fds: list[int]) -> None:
        """Map every handle. The descriptors stay the caller's. Raises ProtocolError if they are short."""
        self.geometry = geometry
        self.failure = ""
        self.gathers = False
        self.batch_bytes = HOST_BATCH_BYTES
        self._maps: list[mmap.mmap] = []
        for fd, nbytes in zip(fds, geometry.handle_bytes, strict=True):
            size = os.fstat(fd).st_size
            if nbytes < 1 or size < nbytes:
                self.close()
                raise ProtocolError(f"exported memory has {size} bytes, its geometry says {nbytes}")
            self._maps.append(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        self._memory = [np.frombuffer(m, dtype=np.uint8) for m in self._maps]
        self._groups = [self._strided(run, geometry.num_blocks) for run in _equal_runs(geometry.fragments)]
        self._slot_groups: dict[tuple[int, int], list[Bytes]] = {}

    def _strided(self, run: list[Fragment], num_blocks: int) -> Bytes:
        """Equally spaced fragments as a view of shape (num_blocks, fragments, bytes)."""
        first = run[0]
        spacing = run[1].offset - first.offset if len(run) > 1 else first.nbytes
        return as_strided(
            self._memory[first.handle][first.offset :],
            shape=(num_blocks, len(run), first.nbytes),
            strides=(first.block_stride, spacing, 1),
            writeable=False,
        )

    def buffer(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def _check(self, block: int) -> None:
        if not self._maps:
            raise PagesError("the engine's memory is closed")
        check_block(self.geometry, block)

    def copy_block(self, block: int, out: Bytes) -> None:
        self._check(block)
        _copy(self._groups, block, out)

    def copy_pieces(self, pieces: Sequence[Piece]) -> Generator[int, None, None]:
        blocks = [block for block, _, _ in pieces]
        if blocks:
            self._check(min(blocks))
            self._check(max(blocks))
        return one_by_one(self, pieces)

    def copy_blocks(self, blocks: Sequence[int], out: Bytes) -> Generator[int, None, None]:
        check_room(out, len(blocks) * self.geometry.block_bytes)
        return self.copy_pieces(side_by_side(self.geometry, blocks, out))

    def copy_slots(self, block: int, first: int, last: int, out: Bytes) -> int:
        self._check(block)
        groups = self._slot_groups.get((first, last))
        if groups is None:
            pieces = tuple(run.piece for run in self.geometry.slot_runs(first, last))
            groups = [self._strided(run, self.geometry.num_blocks) for run in _equal_runs(pieces)]
            self._slot_groups[first, last] = groups
        return _copy(groups, block, out)

    @property
    def let_go(self) -> bool:
        return not self._maps

    def close(self) -> None:
        self._groups = []
        self._slot_groups = {}
        self._memory = []
        for mapping in self._maps:
            with contextlib.suppress(BufferError):  # a view is still referenced: it goes with that
                mapping.close()
        self._maps = []


def one_by_one(pages: Pages, pieces: Sequence[Piece]) -> Generator[int, None, None]:
    """`copy_pieces` by `copy_block` and `copy_slots`: each is worked on while it is in the processor's
    cache."""
    for complete, (block, out, slots) in enumerate(pieces, start=1):
        if slots is None:
            pages.copy_block(block, out)
        else:
            pages.copy_slots(block, *slots, out)
        yield complete


def side_by_side(geometry: Geometry, blocks: Sequence[int], out: Bytes) -> list[Piece]:
    """Whole blocks in `out`, one behind the other."""
    nbytes = geometry.block_bytes
    return [Piece(block, out[n * nbytes : (n + 1) * nbytes]) for n, block in enumerate(blocks)]


def check_block(geometry: Geometry, block: int) -> None:
    """Raise IndexError unless there is such a block."""
    if not 0 <= block < geometry.num_blocks:
        raise IndexError(f"block {block} of {geometry.num_blocks}")


def check_room(out: Bytes, nbytes: int) -> None:
    """Raise ValueError unless `out` has room for `nbytes` that lie together."""
    if out.size < nbytes or not out.flags.c_contiguous:
        raise ValueError(f"room for {out.size} bytes, {nbytes} are needed, together")


def _copy(groups: list[Bytes], block: int, out: Bytes) -> int:
    """One block's part of each group into `out`, one after another; returns the bytes."""
    at = 0
    for group in groups:
        part = group[block]
        end = at + part.size
        out[at:end].reshape(part.shape)[...] = part
        at = end
    return at


def _equal_runs(fragments: tuple[Fragment, ...]) -> list[list[Fragment]]:
    """Cut the fragment list where size, handle, block stride or spacing changes."""
    runs: list[list[Fragment]] = []
    for fragment in fragments:
        run = runs[-1] if runs else []
        alike = run and (run[0].handle, run[0].nbytes, run[0].block_stride) == (
            fragment.handle,
            fragment.nbytes,
            fragment.block_stride,
        )
        if alike and fragment.offset > run[-1].offset:
            spacing = fragment.offset - run[-1].offset
            if len(run) == 1 or run[1].offset - run[0].offset == spacing:
                run.append(fragment)
                continue
        runs.append([fragment])
    return runs

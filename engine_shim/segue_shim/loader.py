"""Copies replica blocks from the daemon's arena into the engine's pages, at the speed of memory.

Owns the two mappings' arithmetic, not the decision: what may be copied, and until when, is the lease's
affair (see `exporter`). Invariant: nothing is read outside the arena and nothing is written outside
the blocks named; both are checked before the first byte moves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from segue_core.errors import ProtocolError
from segue_core.geometry import Geometry
from segue_shim.layout import Pages
from segue_shim.plan import check_load

if TYPE_CHECKING:
    from segue_shim.cuda_tier import Tier

WORD_BYTES = 8
PREFAULT_BYTES = 32 << 20
MADV_POPULATE_READ = 22
"""From linux/mman.h (5.14); elsewhere the call fails and pages are mapped when first read."""


class Arena:
    """The daemon's replica memory, mapped read only. `incarnation` names the daemon's life it belongs to."""

    def __init__(self, fd: int, nbytes: int, incarnation: int) -> None:
        """Map `nbytes` of `fd`, which stays the caller's. Raises ProtocolError if it is not that large."""
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size:
            raise ProtocolError(f"daemon: an arena of {size} bytes was announced as {nbytes}")
        self.incarnation = incarnation
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; this one is never written, and could not be.
            warnings.simplefilter("ignore")
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tier: Tier | None = None
        """The daemon's GPU memory with copies of blocks, if there is one: read it under `tier_lock` only."""
        self.tier_lock = threading.Lock()
        self._unlock: Callable[[], None] | None = None
        self._closed = False
        self._guard = threading.Lock()

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self.bytes.data_ptr())

    @property
    def locked(self) -> bool:
        """Whether a GPU may read it as it is: it is page-locked."""
        return self._unlock is not None

    def lock(self, unlock: Callable[[], None]) -> None:
        """It was page-locked; `unlock` ends that."""
        with self._guard:
            if not self._closed:
                self._unlock = unlock
                return
        unlock()

    def close(self) -> None:
        """Nothing is loaded from it any more."""
        with self._guard:
            self._closed = True
            unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()
        self.drop_tier()

    def put_tier(self, tier: Tier) -> None:
        """From now on `tier` may be loaded from."""
        with self.tier_lock, self._guard:
            if not self._closed:
                self.tier = tier
                return
        tier.close()

    def drop_tier(self) -> None:
        """Unmap the tier, once nothing is loaded from it any more."""
        with self.tier_lock:
            tier, self.tier = self.tier, None
        if tier is not None:
            tier.close()

    def prefault(self) -> None:
        """Map the pages now, in a thread of its own, so that a load does not pay for it.

        Goes through ctypes because it lets go of the interpreter lock.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start = self.bytes.data_ptr()
        for offset in range(0, self.nbytes, PREFAULT_BYTES):
            length = min(PREFAULT_BYTES, self.nbytes - offset)
            if madvise(start + offset, length, MADV_POPULATE_READ) != 0:
                return


@dataclass(frozen=True, slots=True)
class _Group:
    """`count` fragments of `nbytes` in one handle, `spacing` apart; `source` is where they lie in a block
    as shipped. All in units of the loader's word."""

    handle: int
    offset: int
    block_stride: int
    nbytes: int
    spacing: int
    count: int
    source: int


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` neighbouring blocks from `block` on, whose extents lie `step` apart from `extent` on."""

    block: int
    extent: int
    count: int
    step: int


class Loader:
    """Copies blocks into one engine's `pages`."""

    def __init__(self, pages: Pages) -> None:
        self._geometry = pages.geometry
        self._block_bytes = pages.geometry.block_bytes
        self._byte_views = pages.views
        self._byte_groups = _groups(pages.geometry, 1)
        aligned = all(
            value % WORD_BYTES == 0
            for group in self._byte_groups
            for value in (group.offset, group.block_stride, group.nbytes, group.spacing, group.source)
        )
        self._word_groups = _groups(pages.geometry, WORD_BYTES) if aligned else None
        self._word_views = tuple(_words(view) for view in pages.views) if aligned else ()

    def copy(self, arena: Arena, block_ids: Sequence[int], extents: Sequence[int]) -> int:
        """Fill block `block_ids[i]` from arena offset `extents[i]`; returns the bytes copied.

        Raises ValueError if a block or an extent is out of bounds; nothing has been copied then.
        """
        check_load(self._geometry, arena.nbytes, block_ids, extents)
        if self._word_groups is not None and all(extent % WORD_BYTES == 0 for extent in extents):
            words = [extent // WORD_BYTES for extent in extents]
            _copy(self._word_views, self._word_groups, _words(arena.bytes), _runs(block_ids, words))
        else:
            _copy(self._byte_views, self._byte_groups, arena.bytes, _runs(block_ids, extents))
        return len(block_ids) * self._block_bytes


def _copy(
    views: tuple[torch.Tensor, ...], groups: list[_Group], source: torch.Tensor, runs: Iterator[_Run]
) -> None:
    for run in runs:
        for group in groups:
            shape = (run.count, group.count, group.nbytes)
            views[group.handle].as_strided(
                shape,
                (group.block_stride, group.spacing, 1),
                group.offset + run.block * group.block_stride,
            ).copy_(source.as_strided(shape, (run.step, group.nbytes, 1), run.extent + group.source))


def _groups(geometry: Geometry, unit: int) -> list[_Group]:
    """The fragments of a block, neighbours at one spacing put together: a copy call for each."""
    groups: list[_Group] = []
    source = 0
    for fragment in geometry.fragments:
        last = groups[-1] if groups else None
        if (
            last is not None
            and (last.handle, last.nbytes, last.block_stride)
            == (fragment.handle, fragment.nbytes, fragment.block_stride)
            and (spacing := fragment.offset - last.offset - (last.count - 1) * last.spacing) > 0
            and (last.count == 1 or spacing == last.spacing)
        ):
            groups[-1] = replace(last, spacing=spacing, count=last.count + 1)
        else:
            groups.append(
                _Group(
                    handle=fragment.handle,
                    offset=fragment.offset,
                    block_stride=fragment.block_stride,
                    nbytes=fragment.nbytes,
                    spacing=fragment.nbytes,
                    count=1,
                    source=source,
                )
            )
        source += fragment.nbytes
    return [
        replace(
            group,
            offset=group.offset // unit,
            block_stride=group.block_stride // unit,
            nbytes=group.nbytes // unit,
            spacing=group.spacing // unit,
            source=group.source // unit,
        )
        for group in groups
    ]


def _runs(blocks: Sequence[int], extents: Sequence[int]) -> Iterator[_Run]:
    """Neighbouring blocks whose extents are evenly spaced, put together."""
    start = 0
    while start < len(blocks):
        count, step = 1, 1
        while start + count < len(blocks) and blocks[start + count] == blocks[start] + count:
            gap = extents[start + count] - extents[start + count - 1]
            if gap <= 0 or (count > 1 and gap != step):
                break
            step = gap
            count += 1
        yield _Run(blocks[start], extents[start], count, step)
        start += count


def _words(view: torch.Tensor) -> torch.Tensor:
    return view[: view.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)

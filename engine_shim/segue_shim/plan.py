"""What one engine step means for the sidecar: made by the engine's scheduler, carried out by its worker.

Plain data that may cross processes. Token ids and block ids are packed little-endian u32 arrays.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from segue_core.geometry import Geometry
from segue_core.messages.journal import SequenceBegin, SequenceUpdate


class StepPlan(msgspec.Struct, frozen=True):
    """One step, in the terms of the journal, before it runs.

    `assigned`: every block that the step may overwrite, whoever owns it. `begun`: sequences that start,
    resume or go back, as a whole. `computed`: (seq, tokens) that are in memory once the step is complete.
    `running`: requests that the engine has, protected or not.
    """

    assigned: bytes = b""
    begun: tuple[SequenceBegin, ...] = ()
    updated: tuple[SequenceUpdate, ...] = ()
    paused: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    computed: tuple[tuple[str, int], ...] = ()
    running: int = 0


class Source(msgspec.Struct, frozen=True):
    """Where one rank's part of a replica lies: `extents[i]` (`segue_core.extents`) for block i of the load.

    `daemon` is the incarnation whose memory they belong to. The blocks stay put until `deadline_ns`
    or until the lease is released.
    """

    daemon: int
    lease: int
    deadline_ns: int
    extents: tuple[int, ...]


class Load(msgspec.Struct, frozen=True):
    """A replica of `tokens` tokens to copy into the engine's pages: each rank fills the blocks `block_ids` of
    its own pages from its own source (`sources`, one a rank, in rank order)."""

    tokens: int
    block_ids: tuple[int, ...]
    sources: tuple[Source, ...]


class LoadResult(msgspec.Struct, frozen=True):
    """What became of a load at one rank, whose daemon's incarnation is `daemon`. `loaded` tokens (0: failed);
    `failed_blocks` must be computed instead, at every rank."""

    daemon: int
    lease: int
    loaded: int
    failed_blocks: tuple[int, ...]


def pack_u32(values: Iterable[int]) -> bytes:
    """Ids as little-endian u32; OverflowError for a value that is not one."""
    return _little_endian(array("I", values)).tobytes()


def unpack_u32(packed: bytes | bytearray) -> list[int]:
    """The ids in `packed`."""
    values = array("I")
    values.frombytes(packed)
    return _little_endian(values).tolist()


def unpack_u64(packed: bytes) -> list[int]:
    """The u64 values in `packed`, for example extents."""
    values = array("Q")
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def check_load(
    geometry: Geometry, arena_bytes: int, block_ids: Sequence[int], extents: Sequence[int]
) -> None:
    """Raise ValueError unless every block and every extent is where one may be."""
    if len(block_ids) != len(extents):
        raise ValueError(f"{len(block_ids)} blocks, but {len(extents)} extents")
    for block in block_ids:
        if not 0 <= block < geometry.num_blocks:
            raise ValueError(f"block {block} of {geometry.num_blocks}")
    for extent in extents:
        if not 0 <= extent <= arena_bytes - geometry.block_bytes:
            raise ValueError(f"extent {extent} in an arena of {arena_bytes} bytes")

"""What the replica store keeps and says: replicas, reservations, refusals, losses. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from segue_core.content_key import TOKEN_BYTES, block_key, root_key
from segue_core.messages.peer import Delta, NackReason, Part
from segue_daemon.arena import rounded
from segue_daemon.blocks import Block
from segue_daemon.deltas import EMPTY_DIGEST, checksum_of

OWN_WRITER = ""
"""The writer of what an engine of this host left when it died: no peer can have that name."""


@dataclass(eq=False)
class Replica:
    """A peer's sequence. `blocks` cover the first `watermark` tokens. `busy`: deltas on their way to it."""

    seq: str
    epoch: int
    incarnation: int
    writer: str
    fingerprint: bytes
    salt: bytes
    block_size: int
    block_bytes: int
    token_ids: bytearray = field(default_factory=bytearray)
    blocks: list[Block] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    touched_ns: int = 0
    written_ns: int = 0
    """When its writer was last heard of it; `touched_ns` also moves when it is used."""
    busy: int = 0
    placed_bytes: int = 0
    """Bytes of the arena that were taken for its blocks; those that it found here are not counted."""

    @property
    def own(self) -> bool:
        """Whether it is kept here for the engine of this host, and for no peer."""
        return self.writer == OWN_WRITER

    @property
    def watermark(self) -> int:
        """Tokens held and verified."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena that its blocks take, shared ones included."""
        return len(self.blocks) * rounded(self.block_bytes)


@dataclass(frozen=True)
class Loss:
    """Something that the store had to give up of a replica; its `writer` must hear that only `watermark`
    tokens are left. `reason`: NO_ROOM (evicted) or CORRUPT (a block changed in memory)."""

    writer: str
    seq: str
    epoch: int
    watermark: int
    reason: NackReason


@dataclass(frozen=True)
class Refusal:
    """Why a delta is not taken; `watermark` is what is held of the sequence. `fence`: of FENCED, the epoch
    that writes it."""

    reason: NackReason
    watermark: int
    detail: str = ""
    fence: int = 0


@dataclass(eq=False)
class Reservation:
    """Room for one delta. `targets` are where the payload goes, part by part, in order: (part, block or
    None); WHOLE parts go straight into their block, others pass through a buffer. `digests`: XXH3-64 of what
    arrived for each part, noted by whoever receives; a part without bytes needs none."""

    delta: Delta
    replica: Replica
    targets: list[tuple[Part, Block | None]]
    fresh: bool
    open: bool = True
    digests: dict[int, int] = field(default_factory=dict)

    def checksum(self) -> int:
        """Of what arrived: to be compared with the delta's."""
        return checksum_of(self.digests.get(i, EMPTY_DIGEST) for i in range(len(self.targets)))


@dataclass(frozen=True)
class Wanted:
    """KV that an engine asks for: of `token_ids` (packed u32), in its own block shape."""

    fingerprint: bytes
    salt: bytes
    token_ids: bytes
    block_size: int
    block_bytes: int


@dataclass(frozen=True)
class MatchResult:
    """`tokens` tokens can be loaded, from the blocks at `extents` (first one is block `first_block`)."""

    tokens: int = 0
    first_block: int = 0
    extents: tuple[int, ...] = ()
    lease: int = 0
    deadline_ns: int = 0


def same_writer(replica: Replica, delta: Delta) -> bool:
    """Whether `delta` comes from the life of the writer that `replica` comes from."""
    return (
        replica.epoch == delta.epoch
        and replica.incarnation == delta.incarnation
        and replica.fingerprint == delta.fingerprint
        and replica.salt == delta.salt
        and replica.block_size == delta.block_size
        and replica.block_bytes == delta.block_bytes
    )


def new_replica(delta: Delta, writer: str) -> Replica:
    """An empty replica of the sequence in `delta`."""
    return Replica(
        seq=delta.seq,
        epoch=delta.epoch,
        incarnation=delta.incarnation,
        writer=writer,
        fingerprint=delta.fingerprint,
        salt=delta.salt,
        block_size=delta.block_size,
        block_bytes=delta.block_bytes,
    )


def holds_kv_of(replica: Replica, wanted: Wanted) -> bool:
    """Whether the blocks of `replica` are of the kind that `wanted` asks for; ids are compared elsewhere."""
    names = ("fingerprint", "salt", "block_size", "block_bytes")
    return all(getattr(replica, name) == getattr(wanted, name) for name in names)


def common_prefix(ours: bytearray, theirs: bytes) -> int:
    """Tokens on which two packed id lists agree from the start."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length // TOKEN_BYTES
    left = np.frombuffer(bytes(ours[:length]), "<u4")
    right = np.frombuffer(theirs[:length], "<u4")
    return int(np.argmax(left != right))


def keys_fit(replica: Replica, delta: Delta) -> bool:
    """Whether the keys of sealed parts follow from the ids; notes them in the replica's chain."""
    size = delta.block_size * TOKEN_BYTES
    position = delta.base // delta.block_size
    del replica.keys[position:]
    if not any(part.key for part in delta.parts):
        return True
    ids = bytes(replica.token_ids[position * size :]) + delta.token_ids
    parent = replica.keys[-1] if replica.keys else root_key(replica.fingerprint, replica.salt)
    for number, part in enumerate(delta.parts):
        if not part.key:
            continue
        parent = block_key(parent, ids[number * size : (number + 1) * size])
        if parent != part.key:
            return False
        replica.keys.append(parent)
    return True

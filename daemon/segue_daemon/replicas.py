"""What the replica store keeps and says: replicas, reservations, leases, refusals. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue_core.content_key import TOKEN_BYTES
from segue_core.messages.peer import Delta, NackReason, Part
from segue_daemon.blocks import Block


@dataclass(eq=False)
class Replica:
    """A peer's sequence. `blocks` cover the first `watermark` tokens."""

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

    @property
    def watermark(self) -> int:
        """Tokens held and verified."""
        return len(self.token_ids) // TOKEN_BYTES


@dataclass(frozen=True)
class Refusal:
    """Why a delta is not taken; `watermark` is what is held of the sequence."""

    reason: NackReason
    watermark: int
    detail: str = ""


@dataclass(eq=False)
class Reservation:
    """Room for one delta. `targets` are where the payload goes, part by part, in order: (part, block or
    None); WHOLE parts go straight into their block, others pass through a buffer."""

    delta: Delta
    replica: Replica
    targets: list[tuple[Part, Block | None]]
    fresh: bool


@dataclass(eq=False)
class Lease:
    """Blocks pinned for an engine that loads them, until `deadline_ns`."""

    number: int
    seq: str
    blocks: list[Block]
    deadline_ns: int


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
    """`tokens` tokens can be loaded, from the blocks at `offsets` (first one is block `first_block`)."""

    tokens: int = 0
    first_block: int = 0
    offsets: tuple[int, ...] = ()
    lease: int = 0
    deadline_ns: int = 0


def same_writer(replica: Replica, delta: Delta) -> bool:
    """Whether `delta` comes from the life of the writer that `replica` comes from."""
    names = ("epoch", "incarnation", "fingerprint", "salt", "block_size", "block_bytes")
    return all(getattr(replica, name) == getattr(delta, name) for name in names)


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

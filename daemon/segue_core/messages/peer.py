"""The peer channel: daemon to daemon.

Control runs over ZeroMQ: the writer's DEALER to the receiver's ROUTER, one message a frame. Bulk runs
over a TCP connection that the writer opens: each frame is `BULK_HEADER` (u32 header length, u64
payload length, u32 CRC-32 of both and of the header), a msgpack header, the payload. Bulk is ordered,
so an `End` cannot overtake a `Delta`.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Annotated

import msgspec

from segue_core.messages.request import MAX_SEQ_CHARS
from segue_core.messages.status import MAX_RANKS

BULK_HEADER = struct.Struct("<IQI")
_LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 16 << 20
MAX_GREETING_BYTES = 1024
"""Largest first header of a bulk connection, before anybody has shown a ticket."""

MAX_PARTS = 1 << 16
"""Blocks in one delta; each costs both sides time in which nobody else is served."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Seq = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SEQ_CHARS)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]
Label = Annotated[str, msgspec.Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Writer to receiver, first message of a link. `host`, `zone`: where it runs (empty: not said). `rank` of
    `ranks`: beside which rank of its engine; it writes to the same rank of others."""

    version: int
    name: Name
    incarnation: int
    host: Label = ""
    zone: Label = ""
    rank: Rank = 0
    ranks: Rank = 1


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Receiver to writer: where bulk goes, and how many unacked bytes may be under way.

    `ticket` must open the bulk connection; it ties both channels of one link together. `host`, `zone`: where
    it runs (empty: not said).
    """

    version: int
    name: Name
    incarnation: int
    bulk_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    window_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    ticket: int
    host: Label = ""
    zone: Label = ""
    rank: Rank = 0
    ranks: Rank = 1


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Writer to receiver: are you there? Answered by `Pong` with the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Receiver to writer. `free_bytes`: room for replicas, of `budget_bytes`; `running`: sequences that the
    engine beside it works on; `serving`: whether there is a living one that could take sequences over.
    `consumed_bytes`: as in `Ack`; answers come in order, so one that was not heard before this is lost."""

    number: int
    free_bytes: Count
    budget_bytes: Count = 0
    running: Count = 0
    serving: bool = True
    consumed_bytes: Count = 0


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Receiver to writer: with delta `number`, `watermark` tokens of `seq` are verified here.

    `consumed_bytes` counts bulk bytes taken over the link's life; it returns credit.
    """

    number: int
    seq: str
    epoch: int
    watermark: Count
    consumed_bytes: Count


class NackReason(IntEnum):
    """Why a delta was not taken over."""

    FENCED = 1
    """A higher epoch writes this sequence: stop shipping it."""
    GAP = 2
    """The delta does not continue what is held here: start again from `watermark`."""
    KEY_UNKNOWN = 3
    """A block referred to by key is not held (any more): send it whole."""
    NO_ROOM = 4
    """The budget is spent: try again when there is room."""
    CORRUPT = 5
    """The checksum does not fit: start again from `watermark`."""
    MALFORMED = 6
    """The delta contradicts itself: it is never tried again as it is."""


class Nack(msgspec.Struct, frozen=True, array_like=True, tag="nack"):
    """Receiver to writer: delta `number` was dropped; what is held of `seq` is `watermark` tokens. Number 0:
    no delta was, but what was held beyond `watermark` was given up. `fence`: of FENCED, the epoch that writes
    it now (0: not said)."""

    number: int
    seq: str
    epoch: Epoch
    watermark: Count
    reason: NackReason
    consumed_bytes: Count
    fence: Epoch = 0


class BulkHello(msgspec.Struct, frozen=True, array_like=True, tag="bulk"):
    """First frame of a bulk connection."""

    incarnation: int
    ticket: int


class PartKind(IntEnum):
    """How a block's bytes travel."""

    WHOLE = 1
    """All bytes of the block, in geometry order."""
    ITEMS = 2
    """Changed items of `item_bytes` against what the receiver has. Their numbers are coded as steps: u32
    stride, u32 count, for each; a step moves the number (from -1) by the stride, count times, and an item is
    changed at each. Then all values, in order."""
    RUNS = 3
    """Changed runs: for each its u32 offset in the block and u32 length, then the bytes of all runs."""
    KEY = 4
    """No bytes: the receiver holds a sealed block with this content key."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One block of a delta. `position` counts blocks of the sequence; `key` names a sealed block (empty:
    a tail, still growing). `count`: number of steps (ITEMS) or runs (RUNS). A change to a block that was not
    begun changes one of zeros."""

    position: int
    kind: PartKind
    key: bytes
    nbytes: int
    count: int = 0
    item_bytes: int = 0


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """Takes a replica from `base` to `base + len(token_ids) / 4` tokens. The payload holds the parts
    in order; `checksum` is XXH3-64 over the XXH3-64 of each part's bytes (u64 each). `number` counts the
    link's deltas; `incarnation` is the writing engine's."""

    number: int
    seq: str
    epoch: int
    incarnation: int
    fingerprint: bytes
    salt: bytes
    block_size: int
    block_bytes: int
    base: int
    token_ids: bytes
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_PARTS)]
    checksum: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The sequence is over: its replica may go (its sealed blocks stay as cache within the budget). From a
    daemon that was promoted, with its own incarnation: writers below `epoch` are over, and nothing goes."""

    seq: str
    epoch: int
    incarnation: int


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Daemon of another rank to that of rank 0 of the same engine: tell me where sequences go."""

    version: int
    name: Name
    rank: Rank
    ranks: Rank


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """Rank 0 to another rank: every placement follows, now and at each change. `refusal`: why none does."""

    version: int
    refusal: str = ""


class PeerView(msgspec.Struct, frozen=True, array_like=True):
    """A peer as one rank sees it: `up` once it is connected and has said what room it has."""

    name: Name
    up: bool
    free_bytes: Count
    budget_bytes: Count
    link_ms: Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class TurnedAway(msgspec.Struct, frozen=True, array_like=True):
    """`peer` has no room for this rank's part of `seq`, which takes `need_bytes`."""

    seq: Seq
    peer: Name
    need_bytes: Count


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Another rank to rank 0, as a sign of life: its peers, and who was turned away there. Answered by
    `Placements` with the same number."""

    number: Count
    peers: Annotated[tuple[PeerView, ...], msgspec.Meta(max_length=1024)]
    turned_away: Annotated[tuple[TurnedAway, ...], msgspec.Meta(max_length=256)] = ()


class Word(msgspec.Struct, frozen=True, array_like=True):
    """`seq` is to be held by `peers`, at every rank (empty: by nobody, or it is over)."""

    seq: Seq
    peers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)]


class Placements(msgspec.Struct, frozen=True, array_like=True, tag="placements"):
    """Rank 0 to another rank: what changed. `number`: of the report that this answers; 0: of none."""

    number: Count
    words: Annotated[tuple[Word, ...], msgspec.Meta(max_length=512)]


def bulk_head(header: bytes | bytearray, payload_bytes: int) -> bytes:
    """What goes before `header` on the wire: a bit that changes in it would otherwise give right bytes a
    wrong name, or a right name wrong bytes."""
    lengths = _LENGTHS.pack(len(header), payload_bytes)
    return BULK_HEADER.pack(len(header), payload_bytes, zlib.crc32(header, zlib.crc32(lengths)))


Control = Hello | Welcome | Ping | Pong | Ack | Nack | Join | Joined | Report | Placements
Bulk = BulkHello | Delta | End

"""The peer channel: daemon to daemon.

Control runs over ZeroMQ: the writer's DEALER to the receiver's ROUTER, one message a frame. Bulk runs
over a TCP connection that the writer opens: each frame is `BULK_HEADER` (u32 header length, u64
payload length), a msgpack header, the payload. Bulk is ordered, so an `End` cannot overtake a `Delta`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated

import msgspec

BULK_HEADER = struct.Struct("<IQ")
MAX_HEADER_BYTES = 16 << 20
MAX_GREETING_BYTES = 1024
"""Largest first header of a bulk connection, before anybody has shown a ticket."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Label = Annotated[str, msgspec.Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Writer to receiver, first message of a link. `host`, `zone`: where it runs (empty: not said)."""

    version: int
    name: Name
    incarnation: int
    host: Label = ""
    zone: Label = ""


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


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Writer to receiver: are you there? Answered by `Pong` with the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Receiver to writer. `free_bytes`: room for replicas, of `budget_bytes`; `running`: sequences that the
    engine beside it works on; `serving`: whether there is a living one that could take sequences over."""

    number: int
    free_bytes: Count
    budget_bytes: Count = 0
    running: Count = 0
    serving: bool = True


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
    no delta was, but what was held beyond `watermark` was given up."""

    number: int
    seq: str
    epoch: int
    watermark: Count
    reason: NackReason
    consumed_bytes: Count


class BulkHello(msgspec.Struct, frozen=True, array_like=True, tag="bulk"):
    """First frame of a bulk connection."""

    incarnation: int
    ticket: int


class PartKind(IntEnum):
    """How a block's bytes travel."""

    WHOLE = 1
    """All bytes of the block, in geometry order."""
    WORDS = 2
    """Changed 8-byte words against what the receiver has: u32 word numbers, then u64 values."""
    RUNS = 3
    """Changed runs: for each its u32 offset in the block and u32 length, then the bytes of all runs."""
    KEY = 4
    """No bytes: the receiver holds a sealed block with this content key."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One block of a delta. `position` counts blocks of the sequence; `key` names a sealed block (empty:
    a tail, still growing). `count`: number of words (WORDS) or runs (RUNS)."""

    position: int
    kind: PartKind
    key: bytes
    nbytes: int
    count: int = 0


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """Takes a replica from `base` to `base + len(token_ids) / 4` tokens. The payload holds the parts
    in order; `checksum` is XXH3-64 of it. `number` counts the link's deltas; `incarnation` is the
    writing engine's."""

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
    parts: tuple[Part, ...]
    checksum: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The sequence is over: its replica may go (its sealed blocks stay as cache within the budget)."""

    seq: str
    epoch: int
    incarnation: int


Control = Hello | Welcome | Ping | Pong | Ack | Nack
Bulk = BulkHello | Delta | End

"""A small engine that writes a ledger and pages, and the way of its deltas into a store, without sockets."""

from __future__ import annotations

import os
from array import array
from typing import Any

import numpy as np

from segue_core.content_key import block_key, root_key
from segue_core.geometry import Geometry, Region
from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.messages.peer import Delta, Part, PartKind
from segue_daemon.ledger import Ledger
from segue_daemon.pages import HostPages
from segue_daemon.replicas import Refusal
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Shipment
from segue_daemon.store import ReplicaStore

SIZE = 4

DIM = 24

BLOCKS = 12

FINGERPRINT = b"f" * 16


def opaque() -> Geometry:
    """Slots spread over the block, as K is in vLLM's CPU kernels: [block, dim, slot], two layers."""
    shape, strides = (BLOCKS, DIM, SIZE), (DIM * SIZE * 2, SIZE * 2, 2)
    layer = BLOCKS * DIM * SIZE * 2
    regions = tuple(Region(0, i * layer, shape, strides, 2, ("block", "opaque", "opaque")) for i in range(2))
    return Geometry(BLOCKS, SIZE, (2 * layer,), regions).validate()


def slotted() -> Geometry:
    """[block, slot, dim]: a slot's bytes lie together."""
    layer = BLOCKS * DIM * SIZE * 2
    shape, strides = (BLOCKS, SIZE, DIM), (DIM * SIZE * 2, DIM * 2, 2)
    regions = tuple(Region(0, i * layer, shape, strides, 2, ("block", "slot", "dim")) for i in range(2))
    return Geometry(BLOCKS, SIZE, (2 * layer,), regions).validate()


class Engine:
    """A toy engine in this process: pages in a memfd, its journal applied to a ledger directly."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.fd = os.memfd_create("toy")
        os.ftruncate(self.fd, geometry.handle_bytes[0])
        self.pages = HostPages(geometry, [self.fd])
        self.ledger = Ledger(geometry, FINGERPRINT, max_sequences=100)
        self.free = list(range(BLOCKS))
        self.tables: dict[str, list[int]] = {}
        self.ids: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def write(self, block: int, slot: int, token: int, position: int) -> None:
        values = kv(token, position)
        for layer, region in enumerate(self.geometry.regions):
            for dim in range(DIM):
                at = region.offset + block * region.strides[0]
                at += (
                    (dim * region.strides[1] + slot * 2)
                    if "dim" not in region.axes
                    else slot * DIM * 2 + dim * 2
                )
                os.pwrite(self.fd, values[layer, dim].tobytes(), at)

    def run(self, seq: str, new_ids: list[int]) -> None:
        """Append `new_ids` and compute them in one step. Silently nothing if there are no blocks."""
        table = self.tables.setdefault(seq, [])
        ids = self.ids.setdefault(seq, [])
        need = -(-(len(ids) + len(new_ids)) // SIZE) - len(table)
        if need > len(self.free):
            return
        new = [self.free.pop() for _ in range(need)]
        first = not ids
        table += new
        ids += new_ids
        packed = array("I", new_ids).tobytes(), array("I", new).tobytes()
        self.ledger.apply(
            Begin(
                0,
                False,
                packed[1],
                (SequenceBegin(seq, 1, b"", packed[0], packed[1], 0),) if first else (),
                () if first else (SequenceUpdate(seq, *packed),),
                (),
                (),
            )
        )
        for position in range(self.computed.get(seq, 0), len(ids)):
            self.write(table[position // SIZE], position % SIZE, ids[position], position)
        self.computed[seq] = len(ids)
        self.ledger.apply(Commit(0, ((seq, len(ids)),)))

    def finish(self, seq: str) -> None:
        self.free += self.tables.pop(seq, [])
        self.ids.pop(seq, None)
        self.computed.pop(seq, None)
        self.ledger.apply(Begin(0, False, b"", (), (), (), (seq,)))

    def close(self) -> None:
        self.pages.close()
        os.close(self.fd)


def shipment_of(engine: Engine, delta_bytes: int = 1 << 16, shadow_bytes: int = 256 << 20) -> Shipment:
    """All that `engine` writes, on its way to one peer."""

    class Session:
        pages, ledger, incarnation, dead = engine.pages, engine.ledger, 1, False

    settings = ReplicationSettings(shadow_bytes=shadow_bytes)
    return Shipment(Session(), settings, delta_bytes, lambda _: True)  # type: ignore[arg-type]


def kv(token: int, position: int) -> np.ndarray[Any, Any]:
    base = np.arange(2 * DIM, dtype=np.int64).reshape(2, DIM)
    return ((base * 131 + token * 7919 + position * 104729) % 30011 + 1).astype(np.int16)


def receive(store: ReplicaStore, delta: Delta, payload: bytes) -> int | Refusal:
    """What the receiver does, without sockets."""
    reservation = store.reserve(delta, "a")
    if isinstance(reservation, Refusal):
        return reservation
    at, buffered = 0, {}
    for index, part in enumerate(delta.parts):
        data = np.frombuffer(payload[at : at + part.nbytes], np.uint8)
        at += part.nbytes
        target = store.room_for(reservation, index)
        if target is not None:
            target[:] = data
        elif part.kind != PartKind.KEY:
            buffered[index] = data
    return store.commit(reservation, buffered)


def ids(count: int) -> bytes:
    return array("I", range(count)).tobytes()


def delta(**changes: Any) -> Delta:
    """A well-formed delta of one whole sealed block and a tail."""
    key = block_key(root_key(FINGERPRINT, b""), ids(4))
    good = {
        "number": 1,
        "seq": "s",
        "epoch": 3,
        "incarnation": 1,
        "fingerprint": FINGERPRINT,
        "salt": b"",
        "block_size": SIZE,
        "block_bytes": 64,
        "base": 0,
        "token_ids": ids(6),
        "parts": (Part(0, PartKind.WHOLE, key, 64), Part(1, PartKind.WHOLE, b"", 64)),
        "checksum": 0,
    }
    return Delta(**(good | changes))

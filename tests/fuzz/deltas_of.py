"""Deltas that a store takes, made to continue what it holds; and such that nearly do."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from fuzz.mutate import Mutator
from segue_core.content_key import TOKEN_BYTES, block_key, chain, root_key
from segue_core.messages.peer import Delta, End, Part, PartKind
from segue_daemon.deltas import checksum_of_payload, encode_items
from segue_daemon.store import ReplicaStore

FINGERPRINT = b"f" * 16
BLOCK_SIZE = 4
BLOCK_BYTES = (256, 404)
"""By turns; 404 is no multiple of a word."""
LIVE = 24
DELTAS_PER_NAME = 40
"""Names come and go: a sequence that was fenced for good is not all there is."""


class DeltaMaker:
    """Knows the store only by looking at what it holds."""

    def __init__(self, store: ReplicaStore, mutate: Mutator) -> None:
        self._store = store
        self._mutate = mutate
        self._rng = mutate.rng
        self._number = 0
        self._sent: list[tuple[Delta, bytes]] = []

    def seq(self) -> str:
        """One of the sequences there are now."""
        return f"s{self._number // DELTAS_PER_NAME + self._rng.randrange(LIVE)}"

    def next(self) -> tuple[Delta, bytes]:
        """A delta and its payload: right, or one that came before."""
        if self._sent and self._mutate.chance(0.08):
            return self._rng.choice(self._sent)
        seq = self.seq()
        size, nbytes = BLOCK_SIZE, BLOCK_BYTES[int(seq[1:]) % 2]
        replica = self._store.replicas.get(seq)
        epoch = self._rng.choice((1, 1, 1, 2)) if replica is None else replica.epoch
        again = replica is None or self._mutate.chance(0.03)
        ids = b"" if again or replica is None else bytes(replica.token_ids)
        new = array(
            "I", [self._rng.randrange(3) for _ in range(self._rng.choice((1, 1, 2, 5, 30)))]
        ).tobytes()
        parts, payload = self._parts(ids, new, size, nbytes)
        self._number += 1
        checksum = checksum_of_payload(parts, payload)
        base = len(ids) // TOKEN_BYTES
        head = (self._number, seq, epoch + again * (replica is not None), 7, FINGERPRINT, b"", size, nbytes)
        delta = Delta(*head, base, new, tuple(parts), checksum)
        self._sent = [*self._sent[-200:], (delta, payload)]
        return delta, payload

    def _parts(self, ids: bytes, new: bytes, size: int, nbytes: int) -> tuple[list[Part], bytes]:
        whole = ids + new
        keys = list(chain(root_key(FINGERPRINT, b""), whole, size))
        base, upto = len(ids) // TOKEN_BYTES, len(whole) // TOKEN_BYTES
        parts, payload = [], b""
        for position in range(base // size, -(-upto // size)):
            key = keys[position] if position < len(keys) else b""
            if key and self._mutate.chance(0.2) and self._store._pool.find(key, nbytes):
                parts.append(Part(position, PartKind.KEY, key, 0))
                continue
            part, data = self._bytes(position, key, nbytes, begun=position * size < base)
            parts.append(part)
            payload += data
        return parts, payload

    def _bytes(self, position: int, key: bytes, nbytes: int, *, begun: bool) -> tuple[Part, bytes]:
        kind = self._rng.choice((PartKind.WHOLE, PartKind.ITEMS, PartKind.RUNS))
        if not begun and self._mutate.chance(0.8):
            kind = PartKind.WHOLE
        if kind == PartKind.ITEMS:
            size = self._rng.choice((1, 2, 4) if nbytes % 8 else (1, 2, 4, 8))
            numbers = sorted(self._rng.sample(range(nbytes // size), self._rng.randrange(0, 6)))
            steps = encode_items(np.array(numbers, np.int64)) if numbers else np.empty((0, 2), "<u4")
            data = steps.tobytes() + self._rng.randbytes(size * len(numbers))
            return Part(position, kind, key, len(data), len(steps), size), data
        if kind == PartKind.RUNS:
            table, data = array("I"), b""
            for _ in range(self._rng.randrange(0, 4)):
                offset = self._rng.randrange(nbytes)
                length = self._rng.randrange(nbytes - offset + 1) // 4
                table.extend((offset, length))
                data += self._rng.randbytes(length)
            packed = table.tobytes() + data
            return Part(position, kind, key, len(packed), len(table) // 2), packed
        data = self._rng.randbytes(nbytes) if not key else block_key(key, b"") * (nbytes // 16 + 1)
        return Part(position, PartKind.WHOLE, key, nbytes), data[:nbytes]

    def nearly(self) -> tuple[Delta, bytes]:
        """A delta whose patches or fields lie, with the checksum that fits all the same."""
        delta, payload = self.next()
        payload = self._mutate.octets(payload) if self._mutate.chance(0.6) else payload
        part = self._rng.choice(delta.parts)
        lie = self._rng.choice(("kind", "count", "position", "nbytes", "item_bytes", "key", "none"))
        if lie == "kind":
            part = msgspec.structs.replace(part, kind=self._rng.choice(list(PartKind)))
        elif lie == "key":
            part = msgspec.structs.replace(part, key=self._mutate.octets(part.key))
        elif lie != "none":
            part = msgspec.structs.replace(part, **{lie: self._mutate.integer(getattr(part, lie))})
        parts = tuple(part if part.position == p.position else p for p in delta.parts)
        field = self._rng.choice(("epoch", "base", "block_size", "block_bytes", "incarnation", "number"))
        if self._mutate.chance(0.3):
            delta = msgspec.structs.replace(delta, **{field: self._mutate.integer(getattr(delta, field))})
        checksum = checksum_of_payload(parts, payload)
        return msgspec.structs.replace(delta, parts=parts, checksum=checksum), payload

    def end(self) -> End:
        """Of one that is there, mostly right; the oldest go first."""
        there = list(self._store.replicas)[:LIVE]
        return End(
            self._rng.choice(there) if there and self._mutate.chance(0.8) else self.seq(),
            self._rng.choice((1, 2, 9)),
            self._rng.choice((7, 7, 8)),
        )

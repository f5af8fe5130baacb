"""Scanned blocks: which bytes are proved to be the KV of which content. Pure.

For engines that give no notice before they overwrite (`Register.notice` is "after"). A sealed block never
changes, so once a copy of it was confirmed by a later publication, any other bytes with the same XXH3-64 are
right for its content key, whenever and wherever they were read: at once, without one more publication; for
another peer; after the tables were announced anew; out of a dead engine's memory, which nobody confirms.

Invariant: a hash is learned only from a copy that was confirmed. Bounded: the oldest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import xxhash

from segue_core.messages.peer import Delta, PartKind

MAX_SCANNED_BLOCKS = 1 << 18
"""Hashes that are kept, about 150 bytes each."""


class BlockScan:
    """What was proved of one engine life's sealed blocks, by content key."""

    def __init__(self, max_blocks: int = MAX_SCANNED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def learn(self, delta: Delta, payload: memoryview) -> None:
        """`delta` was confirmed: its whole sealed blocks are what they claim to be."""
        for key, block in _whole_blocks(delta, payload):
            if key:
                self._hashes[key] = xxhash.xxh3_64_intdigest(block)
                self._hashes.move_to_end(key)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)

    def proves(self, key: bytes, block: memoryview) -> bool:
        """Whether `block` is what was confirmed for this content key. Hashes only where one is known."""
        known = self._hashes.get(key)
        return known is not None and known == xxhash.xxh3_64_intdigest(block)

    def proves_all(self, delta: Delta, payload: memoryview) -> bool:
        """Whether each byte of `delta` is proved: nothing but whole sealed blocks, and keys without bytes."""
        if any(part.kind not in (PartKind.WHOLE, PartKind.KEY) or not part.key for part in delta.parts):
            return False
        return all(self.proves(key, block) for key, block in _whole_blocks(delta, payload))


def _whole_blocks(delta: Delta, payload: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """(content key, bytes) of each part that holds a whole block; the key is empty for a tail."""
    at = 0
    for part in delta.parts:
        if part.kind == PartKind.WHOLE:
            yield part.key, payload[at : at + part.nbytes]
        at += part.nbytes

"""What is left here of sequences that are over: the next turn of a conversation begins with them. Pure.

Owns a record of the content keys of each: so the router can ask which daemon still has a conversation. It
keeps nothing of the KV: blocks go when the store needs their room, and what is found is only what the pool
still has. Invariant: at most `MAX_SEQUENCES` records and `MAX_KEY_BYTES` of keys; the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from segue_core.content_key import KEY_BYTES

MAX_SEQUENCES = 65_536
MAX_KEY_BYTES = 32 << 20
"""Keys of 16 bytes, one a block: 32 million tokens at 16 tokens a block."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that is over, as `epoch` left it. `keys`: of its full blocks, in order, end to end."""

    epoch: int
    block_size: int
    block_bytes: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class Remains:
    """So much of it is here: its first `tokens` tokens, in `nbytes` of KV."""

    epoch: int
    tokens: int
    nbytes: int


class EndedSequences:
    """Of one store. Names come from one router each: the last life of a name counts."""

    def __init__(self, *, max_sequences: int = MAX_SEQUENCES, max_key_bytes: int = MAX_KEY_BYTES) -> None:
        self._max_sequences = max_sequences
        self._max_key_bytes = max_key_bytes
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self.key_bytes = 0

    def note(self, seq: str, keys: Iterable[bytes], *, epoch: int, block_size: int, block_bytes: int) -> None:
        """`seq` is over; `keys` are those of its leading full blocks."""
        self.forget(seq)
        joined = b"".join(keys)
        if not joined or len(joined) > self._max_key_bytes:
            return
        self._ended[seq] = Ended(epoch, block_size, block_bytes, joined)
        self.key_bytes += len(joined)
        while len(self._ended) > self._max_sequences or self.key_bytes > self._max_key_bytes:
            self.forget(next(iter(self._ended)))

    def forget(self, seq: str) -> None:
        """`seq` is held as a replica again, or nothing of it is left."""
        ended = self._ended.pop(seq, None)
        if ended is not None:
            self.key_bytes -= len(ended.keys)

    def remains(self, seq: str, held: Callable[[bytes, int], bool]) -> Remains | None:
        """What is left of `seq`; `held(key, nbytes)`: whether that block is in the pool. None: nothing."""
        ended = self._ended.get(seq)
        if ended is None:
            return None
        count = 0
        for start in range(0, len(ended.keys), KEY_BYTES):
            if not held(ended.keys[start : start + KEY_BYTES], ended.block_bytes):
                break
            count += 1
        if not count:
            self.forget(seq)  # without its start the rest cannot be found any more
            return None
        self._ended.move_to_end(seq)
        return Remains(ended.epoch, count * ended.block_size, count * ended.block_bytes)

    def __len__(self) -> int:
        return len(self._ended)

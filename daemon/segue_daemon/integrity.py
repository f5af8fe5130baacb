"""Whether sealed blocks still are what they were when they were sealed. Pure.

Memory fails now and then, without a word. Invariant: a block that was found changed is not found by its key
any more; whoever has it in use hears of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from segue_daemon.blocks import Block, BlockPool

Verify = Literal["always", "load", "off"]
TRUST_NS = 60_000_000_000
"""With `load`, a block whose checksum agreed so recently is given out without looking again."""


class Integrity:
    """Of the blocks of one pool. `verify`: see `StoreSettings`."""

    def __init__(self, pool: BlockPool, verify: Verify, changed: Callable[[Block], None]) -> None:
        """`changed` is called with each block whose bytes are wrong."""
        self.verify = verify
        self.poisoned = 0
        self._pool = pool
        self._changed = changed

    def scrub_one(self, now_ns: int) -> int:
        """Check the sealed block whose turn it is; the bytes looked at, 0 if there is none."""
        block = self._pool.next_sealed()
        if block is None or self.verify == "off":
            return 0
        self._check(block, now_ns)
        return block.nbytes

    def sound(self, block: Block, now_ns: int) -> bool:
        """Whether a sealed block may be given out."""
        if self.verify == "off" or (self.verify == "load" and now_ns - block.checked_ns < TRUST_NS):
            return True
        return self._check(block, now_ns)

    def sound_for_one_more(self, block: Block, now_ns: int) -> bool:
        """Whether a block that is held may count for one more replica."""
        return self.verify != "always" or self._check(block, now_ns)

    def _check(self, block: Block, now_ns: int) -> bool:
        if self._pool.intact(block, now_ns):
            return True
        self.poisoned += 1
        self._pool.condemn(block)
        self._changed(block)
        return False

"""Which items of an opaque block belong to which slot, learned from what changes. Pure.

A layout that cannot be addressed by slots still has them: the items that change when a token is added are at
the same places in every block. Once that has been seen often enough for each slot, the first copy of a tail
need not carry what a block's later slots still hold of an earlier owner: often nearly all of it.

An item counts from the earliest slot at which it was ever seen to change; one that never changed counts from
the start. So what is left out of a tail is only what changes with later tokens and never with those that it
has. Nothing depends on this for full blocks: nothing is left out of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from segue_daemon.arena import Bytes

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
LOOKS = 4
"""Single tokens that are looked at for each slot before the map is used."""
MAX_MASK_BYTES = 64 << 20
"""Larger layouts are not learned: there is a mask for each slot."""
_WORD_BYTES = 8


class SlotMap:
    """Of one layout: blocks of `slots` slots and `items` items of `item_bytes`."""

    def __init__(self, *, slots: int, items: int, item_bytes: int) -> None:
        self._kind = f"u{item_bytes}"
        self._items = items
        self._slots = slots
        self._padded = -(-items * item_bytes // _WORD_BYTES) * _WORD_BYTES
        self._unlearned = dict.fromkeys(range(1, slots), LOOKS)
        self._fits = slots > 1 and 0 < slots * self._padded <= MAX_MASK_BYTES
        self._since = np.full(items if self._fits else 0, slots, np.int32)
        self._masks: dict[int, Words] = {}

    @property
    def ready(self) -> bool:
        """Whether `later` may be asked."""
        return self._fits and not self._unlearned

    def wants(self, slot: int) -> bool:
        """Whether it pays to look at one more token in this slot."""
        return self._fits and slot in self._unlearned

    def learn(self, slot: int, numbers: Numbers) -> None:
        """The token in `slot` was added, and these items changed. A look that is not wanted any more (it was
        taken before the last one came) changes nothing: what is left out of a tail stays what it was."""
        if not self.wants(slot):
            return
        self._since[numbers] = np.minimum(self._since[numbers], slot)
        self._unlearned[slot] -= 1
        if not self._unlearned[slot]:
            del self._unlearned[slot]
        if not self._unlearned:
            self._since[self._since == self._slots] = 0

    def later(self, slots: int) -> Words:
        """The bits of a block, padded to words, that do not matter while only `slots` slots are filled."""
        mask = self._masks.get(slots)
        if mask is None:
            octets: Bytes = np.zeros(self._padded, np.uint8)
            items = octets.view(self._kind)[: self._items]
            items[self._since >= slots] = np.iinfo(items.dtype).max
            mask = self._masks[slots] = octets.view(np.uint64)
        return mask

"""The way from a step's plan to what a daemon believes, with the real parts of it: `LiveTable`, on a GPU
`HeldProgress`, and `Ledger`. Checks after each record that what may be shipped is right.

Owns the slots of the KV cache; writes none. Invariant that it checks: a slot of a sequence that the ledger
calls shippable, in a block that has not changed hands, holds what its tokens make of it.
"""

from __future__ import annotations

import random
from collections import Counter

from schedule_content import BLOCK_SIZE, contents

from segue_core.geometry import Geometry, Region
from segue_core.messages.journal import Record
from segue_daemon.completion import HeldProgress
from segue_daemon.ledger import Ledger
from segue_shim.plan import StepPlan
from segue_shim.table import LiveTable

ANNOUNCE_BYTES = (10**6, 10**6, 600)
"""Room for tables in one record; the small one makes them come in parts."""


class Journal:
    """One engine's records and the daemon's view of them. `complete`: the last step whose kernels ended."""

    def __init__(self, blocks: int, held_back: bool, dice: random.Random, counts: Counter[str]) -> None:
        self._dice = dice
        self._counts = counts
        self._held_back = held_back
        self.table = LiveTable()
        region = Region(0, 0, (blocks, BLOCK_SIZE, 16), (BLOCK_SIZE * 16, 16, 1), 1, ("block", "slot", "dim"))
        geometry = Geometry(blocks, BLOCK_SIZE, (blocks * BLOCK_SIZE * 16,), (region,))
        self.ledger = Ledger(geometry, b"x" * 16, max_sequences=100)
        self._held = HeldProgress(self._computed)
        self.slots: dict[tuple[int, int], int] = {}
        """(block, slot) to its content."""
        self.step = 0
        self.complete = 0

    def begin(self, plan: StepPlan) -> None:
        """A step is about to run: what it overwrites is said first."""
        self.step += 1
        if self._dice.random() < 0.05:
            self.table.announce_all()
        self._apply(self.table.begin(plan, self.step, self._dice.choice(ANNOUNCE_BYTES)))
        self._check("as it began")

    def commit(self, plan: StepPlan, failed: tuple[int, ...] = ()) -> None:
        """The step was handed to the device; without a GPU it is complete."""
        self._apply(self.table.commit(plan, self.step, failed))
        if not self._held_back:
            self.complete = self.step
        self._check("once committed")

    def flush(self, plan: StepPlan) -> bool:
        """A step of nothing but this plan, as in an engine whose halves share a process."""
        if self._held_back:
            return False
        self.begin(plan)
        self.commit(plan)
        return True

    def completed(self, step: int) -> None:
        """The GPU has done all up to this step."""
        self.complete = step
        self._release()
        self._check("once complete")

    def _apply(self, record: Record | None) -> None:
        if record is None:
            return
        self.ledger.apply(self._held.take(record, self.complete) if self._held_back else record)
        self._release()

    def _release(self) -> None:
        progress = self._held.release(self.complete)
        if progress is not None:
            self.ledger.apply(progress)

    def _computed(self, seq: str) -> int:
        sequence = self.ledger.sequences.get(seq)
        return sequence.computed if sequence is not None else 0

    def _check(self, when: str) -> None:
        for sequence in self.ledger.sequences.values():
            shippable = sequence.shippable
            expected = contents(bytes(sequence.token_ids))
            for first in range(0, shippable, BLOCK_SIZE):
                place = first // BLOCK_SIZE
                if not self.ledger.intact(sequence, place, place + 1):
                    continue
                block = sequence.blocks[place]
                for at in range(first, min(first + BLOCK_SIZE, shippable)):
                    assert self.slots.get((block, at - first)) == expected[at], (
                        f"step {self.step} {when}: {sequence.seq} may ship {shippable} tokens, and token"
                        f" {at}, in block {block}, is wrong ({sequence.computed} computed,"
                        f" {sequence.known} known)"
                    )
            self._counts["tokens checked"] += shippable
            if sequence.computed > sequence.known:
                self._counts["ahead of ids"] += 1

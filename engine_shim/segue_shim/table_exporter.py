"""For an engine that can only hand over its memory and its block tables: publish them between steps.

    exporter = TableExporter(socket_path, engine="a", model="m", fingerprint=..., incarnation=...)
    exporter.register_pages(kv_tensors, num_blocks=..., block_size=...)
    after each step: exporter.publish(tables, step=number, running=...)

An `Exporter` tells before anything is overwritten, so a torn copy is noticed at once. Such an engine cannot:
its daemon holds each copy back until a later publication says that the blocks still belong to the sequence at
the same place, and sends only then. That is enough because of what the engine promises:

* `publish` is called between steps. While it runs nothing writes to the pages, and what it says is true: KV
  of `computed` tokens of each sequence is complete in its blocks.
* Between two publications at most one step runs, and it writes a block for one sequence only: for the one
  that has it afterwards. A sequence that has a block at the same place before and after keeps its computed
  slots as they were. Loads count as part of the step that follows them.
* A sequence that lost its blocks within a step, got them back and was computed again in the same step breaks
  this: publish it without blocks in between, or count the step twice.

So a block that went to somebody else and came back took two steps at least, and a publication between them
saw it gone. More than one step without a publication is noticed by its number: everything begins anew then,
and older copies are void. An engine that goes on like that is protected only where it stands still.

What is lost at a failure is what the engine did not confirm any more: the tokens of its last step or two.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar

from segue_core.messages.journal import Commit, SequenceBegin
from segue_core.messages.local import Notice
from segue_core.ring import Word
from segue_shim.exporter import ANNOUNCE_SHARE, Exporter
from segue_shim.guard import contained, nothing
from segue_shim.layout import Pages
from segue_shim.published import PublishedTables

logger = logging.getLogger("segue_shim")


class TableExporter(Exporter):
    """An `Exporter` that is told with `publish` instead of `begin` and `commit`. It loads like any other,
    between two publications."""

    notice: ClassVar[Notice] = "after"
    _tables: PublishedTables | None = None
    _warned = False

    def _start(self, pages: Pages) -> None:
        geometry = pages.geometry
        if geometry.gpu:
            self.refuse(
                "an engine on a GPU must say each step before it runs: use Exporter, not TableExporter"
            )
            return
        self._tables = PublishedTables(num_blocks=geometry.num_blocks, block_size=geometry.block_size)
        super()._start(pages)

    @contained(nothing)
    def publish(self, tables: Iterable[SequenceBegin], *, step: int, running: int) -> None:
        """All sequences that are to be protected, each as a whole, as they are now.

        `step` counts the engine's steps so far; `running` its requests, protected or not. A sequence that
        is not named any more is over; one without blocks waits for its turn. Ids and salt of a sequence are
        for good while its epoch is the same. An engine without work says the same once more, with the same
        `step`: that confirms the last tokens, and costs next to nothing.
        """
        if self._tables is None:
            return
        self._adopt()
        plan = self._tables.publish(tables, step=step, running=running)
        self._warn(self._tables)
        self._step = step
        if self._tables.missed_steps:
            self._table.announce_all()
        channel = self._channel
        if channel is None:
            self._table.begin(plan, step, 0)
            self._table.commit(plan, step)
            return
        ring = channel.ring
        if ring.get(Word.SNAPSHOT_WANTED):
            ring.set(Word.SNAPSHOT_WANTED, 0)
            self._table.announce_all()
        begin = self._table.begin(plan, step, ring.free() // ANNOUNCE_SHARE)
        # A commit each time, even an empty one: it is what confirms the copies that were made before.
        commit = self._table.commit(plan, step) or Commit(step=step, computed=())
        for record in (begin, commit):
            if record is not None and not channel.append(self._encoder.encode(record)):
                self._table.announce_all()
                break
        ring.set(Word.RUNNING, running)
        ring.set(Word.STEP_CHANGED_NS, self._clock.now_ns())
        ring.set(Word.STEP_BEGUN, step)
        ring.set(Word.STEP_COMMITTED, step)

    def _warn(self, tables: PublishedTables) -> None:
        """Say once what the engine does wrong; it costs protection, nothing else."""
        if self._warned:
            return
        if tables.missed_steps:
            self._warned = True
            logger.warning(
                "segue: %d steps ran between two publications; what was copied meanwhile is void:"
                " publish after each step",
                tables.missed_steps + 1,
            )
        elif tables.taken_back:
            self._warned = True
            logger.warning(
                "segue: %s changed its ids or its salt under the same epoch; it starts again from nothing",
                tables.taken_back[0],
            )

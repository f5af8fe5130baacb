"""The light engine without a journal: computes like the other, and only publishes tables between steps."""

from __future__ import annotations

from segue_core.messages.journal import SequenceBegin
from segue_shim.exporter import Exporter
from segue_shim.plan import Load, LoadResult, Source, pack_u32
from segue_shim.table_exporter import TableExporter
from support.light_engine import BLOCK_SIZE, LightEngine


class TableEngine(LightEngine):
    """A `LightEngine` on top of `TableExporter`. Freed blocks are handed out again at once."""

    exporter_type: type[Exporter] = TableExporter
    steps = 0

    def finish(self, seq: str) -> None:
        """The sequence is over; its blocks are the next to be reused."""
        self.free = self.live.pop(seq).blocks + self.free

    def preempt(self, seq: str) -> None:
        """Take its blocks away; they are computed anew from the next step but one on."""
        live = self.live[seq]
        self.free = live.blocks + self.free
        live.blocks, live.computed = [], 0

    def step(self, chunk: int = 10_000, *, but: str = "") -> None:
        """One forward pass of all sequences but one, and the publication after it."""
        for live in self.live.values():
            if live.seq == but:
                continue
            upto = min(len(live.ids), live.computed + chunk)
            live.blocks += [self.free.pop(0) for _ in range(-(-upto // BLOCK_SIZE) - len(live.blocks))]
            for position in range(live.computed, upto):
                self._write(live.blocks, position, live.ids[position])
            live.computed = upto
        self.steps += 1
        self.publish()

    def publish(self) -> None:
        """Say what there is now."""
        assert isinstance(self.exporter, TableExporter)
        tables = [
            SequenceBegin(live.seq, live.epoch, b"", pack_u32(live.ids), pack_u32(live.blocks), live.computed)
            for live in self.live.values()
        ]
        self.exporter.publish(tables, step=self.steps, running=len(tables))

    def take_over(
        self, seq: str, ids: list[int], epoch: int, tokens: int, sources: tuple[Source, ...]
    ) -> LoadResult:
        """Go on with a sequence of which `tokens` tokens are loaded, as part of the next step."""
        live = self.start(seq, ids, epoch)
        live.blocks = [self.free.pop(0) for _ in range(-(-tokens // BLOCK_SIZE))]
        (result,) = self.exporter.load([Load(tokens, tuple(live.blocks), sources)])
        live.computed = result.loaded
        return result

"""A light engine on top of the real `Exporter`: no model, but real pages, journal and loads.

Its KV is a pure function of token, position and rank, so that what arrives elsewhere can be checked byte for
byte. Blocks are handed out and reused like a real engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from segue_core.messages.journal import SequenceBegin, SequenceUpdate
from segue_core.messages.request import Replication
from segue_shim.exporter import Exporter
from segue_shim.match_client import MatchClient
from segue_shim.plan import Load, LoadResult, Source, StepPlan, pack_u32, unpack_u64

BLOCK_SIZE = 8
HEADS = 2
DIM = 16
LAYERS = 3
FINGERPRINT = b"light-engine-fp!"

OPAQUE = ("block", "opaque", "opaque", "opaque")
SLOTS = ("block", "slot", "head", "dim")


@dataclass
class Live:
    """One sequence on the engine."""

    seq: str
    epoch: int
    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    begun: bool = False
    told: int = 0
    replication: Replication = "normal"


def kv_of(token: int, position: int, layer: int, rank: int = 0) -> torch.Tensor:
    """KV of one token: (HEADS, DIM) int16, different for each token, position, layer and rank."""
    base = torch.arange(HEADS * DIM, dtype=torch.int32) * 31
    mixed = base + token * 7919 + position * 104729 + layer * 15485863 + rank * 32452843
    return (mixed & 0x7FFF).to(torch.int16).reshape(HEADS, DIM)


class LightEngine:
    """An engine of one process with `num_blocks` blocks of 8 slots. `slots`: lay tokens out so that a
    slot's bytes are known; otherwise K is spread over the block as vLLM's CPU kernels do."""

    exporter_type: type[Exporter] = Exporter

    def __init__(
        self,
        socket: str,
        name: str,
        *,
        incarnation: int,
        num_blocks: int = 64,
        slots: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.slots = slots
        self.rank = rank
        if slots:
            shape = (LAYERS, num_blocks, BLOCK_SIZE, HEADS, DIM)
        else:
            shape = (LAYERS, num_blocks, HEADS, DIM, BLOCK_SIZE)
        self.pages = torch.zeros(shape, dtype=torch.int16)
        self.exporter = self.exporter_type(
            socket,
            engine=name,
            model="light",
            fingerprint=FINGERPRINT,
            incarnation=incarnation,
            rank=rank,
            ranks=ranks,
        )
        self.client = MatchClient(
            socket,
            engine=name,
            incarnation=incarnation,
            fingerprint=FINGERPRINT,
            block_size=BLOCK_SIZE,
            rank=rank,
            ranks=ranks,
        )
        tensors = {f"layer{i}": self.pages[i] for i in range(LAYERS)}
        axes = SLOTS if slots else OPAQUE
        assert self.exporter.register_pages(tensors, num_blocks=num_blocks, block_size=BLOCK_SIZE, axes=axes)
        self.free = list(range(num_blocks))
        self.live: dict[str, Live] = {}
        self.finished: list[str] = []

    def start(self, seq: str, ids: list[int], epoch: int = 1, replication: Replication = "normal") -> Live:
        """Admit a sequence; its prompt is computed by the next steps."""
        live = Live(seq, epoch, list(ids), replication=replication)
        self.live[seq] = live
        return live

    def finish(self, seq: str) -> None:
        """The sequence is over; its blocks may be reused from now on."""
        live = self.live.pop(seq)
        self.free = live.blocks + self.free
        self.finished.append(seq)

    def step(self, chunk: int = 10_000) -> None:
        """One forward pass: every sequence computes all its known tokens (at most `chunk`)."""
        assigned, begun, updated, computed, work = [], [], [], [], []
        for live in self.live.values():
            upto = min(len(live.ids), live.computed + chunk)
            new = [self.free.pop(0) for _ in range(-(-upto // BLOCK_SIZE) - len(live.blocks))]
            assigned += new
            live.blocks += new
            if not live.begun:
                packed = pack_u32(live.ids), pack_u32(live.blocks)
                begun.append(SequenceBegin(live.seq, live.epoch, b"", *packed, 0, live.replication))
                live.begun = True
            else:
                updated.append(SequenceUpdate(live.seq, pack_u32(live.ids[live.told :]), pack_u32(new)))
            live.told = len(live.ids)
            work.append((live, upto))
            computed.append((live.seq, upto))
        plan = StepPlan(
            assigned=pack_u32(assigned),
            begun=tuple(begun),
            updated=tuple(updated),
            ended=tuple(self.finished),
            computed=tuple(computed),
            running=len(self.live),
        )
        self.finished = []
        self.exporter.begin(plan)
        for live, upto in work:
            for position in range(live.computed, upto):
                self._write(live.blocks, position, live.ids[position])
            live.computed = upto
        self.exporter.commit()

    def _write(self, blocks: list[int], position: int, token: int) -> None:
        block, slot = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        for layer in range(LAYERS):
            if self.slots:
                self.pages[layer, block, slot] = kv_of(token, position, layer, self.rank)
            else:
                self.pages[layer, block, :, :, slot] = kv_of(token, position, layer, self.rank)

    def resume(self, seq: str, ids: list[int], epoch: int) -> int:
        """Take a sequence over: ask the daemon, load what it holds; returns the tokens loaded.

        The load happens inside a step of its own; call `step` to compute the rest."""
        matched = self.client.match(
            seq=seq, epoch=epoch, salt=b"", token_ids=pack_u32(ids), computed=0, limit=len(ids) - 1
        )
        if matched is None:
            self.start(seq, ids, epoch)
            return 0
        extents = tuple(unpack_u64(matched.extents))
        source = Source(self.client.daemon, matched.lease, matched.deadline_ns, extents)
        result = self.take_over(seq, ids, epoch, matched.tokens, (source,))
        self.client.release(matched.lease, result.loaded)
        return result.loaded

    def take_over(
        self, seq: str, ids: list[int], epoch: int, tokens: int, sources: tuple[Source, ...]
    ) -> LoadResult:
        """Go on with a sequence of which `tokens` tokens are to be loaded, in a step of its own."""
        live = self.start(seq, ids, epoch)
        count = -(-tokens // BLOCK_SIZE)
        live.blocks = [self.free.pop(0) for _ in range(count)]
        load = Load(tokens, tuple(live.blocks), sources)
        self.exporter.begin(
            StepPlan(
                assigned=pack_u32(live.blocks),
                begun=(SequenceBegin(seq, epoch, b"", pack_u32(ids), pack_u32(live.blocks), 0),),
                computed=((seq, tokens),),
                running=len(self.live),
            )
        )
        live.begun, live.told = True, len(ids)
        (result,) = self.exporter.load([load])
        self.exporter.commit(result.failed_blocks)
        live.computed = result.loaded
        return result

    def wrong_tokens(self, seq: str) -> list[int]:
        """Positions of computed tokens whose KV in the pages is not what it must be."""
        live = self.live[seq]
        wrong = []
        for position in range(live.computed):
            block, slot = live.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            for layer in range(LAYERS):
                page = self.pages[layer, block]
                have = page[slot] if self.slots else page[:, :, slot]
                if not torch.equal(have, kv_of(live.ids[position], position, layer, self.rank)):
                    wrong.append(position)
                    break
        return wrong

    def close(self) -> None:
        """Hang up."""
        self.exporter.close()
        self.client.close()

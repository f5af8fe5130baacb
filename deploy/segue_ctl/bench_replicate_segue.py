"""The full path of `seguectl bench replicate`: engine pages, daemon, wire, daemon, arena; verified.

An engine without a model announces what a real one would; two real daemons do the rest. Goodput counts new KV
that the peer holds, from the first commit to the moment when all of it is there; afterwards the arena is
compared with the pages, byte for byte, through the same question that a resuming engine asks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count

import numpy as np

from segue_ctl.bench_daemons import BenchDaemon, wait_until
from segue_ctl.bench_engine import Arena, BenchEngine, packed
from segue_ctl.bench_replicate_shapes import Shape, slot_index
from segue_ctl.waiting import ClusterError

PACE_S = 0.004
BLOCKS_A_SEQUENCE = 16
TAIL_SEQUENCES = 64
LOOK_S = 0.000_2
ARRIVAL_S = 60.0


@dataclass(frozen=True)
class Moved:
    """What one run of one shape showed."""

    kv_bytes: int
    wire_kv_bytes: int
    """What `wire_bytes` brought: also the tokens that began the tails, which are not timed."""
    wall_s: float
    cpu_s: float
    wire_bytes: int
    p50_us: float
    p99_us: float
    verified: bool


class FullPath:
    """One shape on its way from `engine` through daemons `a` and `b` into the arena of `b`."""

    def __init__(
        self, shape: Shape, engine: BenchEngine, a: BenchDaemon, b: BenchDaemon, arena: Arena
    ) -> None:
        self._shape = shape
        self._geometry = shape.geometry
        self._engine = engine
        self._a, self._b = a, b
        self._arena = arena
        self._numbers = count()

    def run(self, total_bytes: int, samples: int) -> Moved:
        """Goodput over about `total_bytes` of new KV, the comparison, then the latency of single deltas."""
        moving = self._tails if self._shape.tail else self._blocks
        moving(1)  # buffers are allocated, the congestion window opens
        wire, cpu = self._a.link().sent_bytes, self._cpu_s()
        moved, wall_s, cpu_apart_s, sequences = moving(total_bytes)
        carried = moved
        if self._shape.tail:
            carried += moved // (self._geometry.block_size - 1)
        cpu_s = self._cpu_s() - cpu - cpu_apart_s
        wire = self._a.link().sent_bytes - wire
        verified = all(self._equal(*sequence) for sequence in sequences)
        self._engine.begin(ended=[name for name, _, _ in sequences])
        self._one_by_one(samples)
        link = self._a.link()
        return Moved(
            moved, carried, wall_s, cpu_s, wire, link.lag_p50_ms * 1e3, link.lag_p99_ms * 1e3, verified
        )

    def _cpu_s(self) -> float:
        return self._a.cpu_s() + self._b.cpu_s()

    def _ids(self, tokens: int) -> tuple[str, bytes]:
        """A new sequence: its name, and ids that no other one has."""
        number = next(self._numbers)
        return f"bench-{number}", packed(range(number << 16, (number << 16) + tokens))

    def _blocks(self, total_bytes: int) -> tuple[int, float, float, list[tuple[str, bytes, list[int]]]]:
        """Sequences of as many blocks as the pages have, two at a time."""
        table = list(range(self._geometry.num_blocks))
        tokens = len(table) * self._geometry.block_size
        under_way: list[tuple[str, bytes]] = []
        moved = 0
        started = time.perf_counter()
        while True:
            if moved < total_bytes:
                name, ids = self._ids(tokens)
                self._engine.begin(begun=[(name, ids, table)])
                self._engine.commit([(name, tokens)])
                under_way.append((name, ids))
                moved += len(table) * self._geometry.block_bytes
            if len(under_way) == 1 and moved < total_bytes:
                continue
            name, ids = under_way.pop(0)
            if (held := self._b.promote(name, tokens)) != tokens:
                raise ClusterError(f"{name}: {held} of {tokens} tokens have arrived in time")
            if not under_way and moved >= total_bytes:
                return moved, time.perf_counter() - started, 0.0, [(name, ids, table)]
            self._engine.begin(ended=[name])

    def _tails(self, total_bytes: int) -> tuple[int, float, float, list[tuple[str, bytes, list[int]]]]:
        """Many sequences that fill a block by one token a step; a step comes once the last is there.
        What is between the steps is not counted."""
        size = self._geometry.block_size
        many = min(TAIL_SEQUENCES, self._geometry.num_blocks)
        moved, wall_s, cpu_apart_s = 0, 0.0, 0.0
        while True:
            cpu = self._cpu_s()
            made = [(*self._ids(size), [block]) for block in range(many)]
            self._engine.begin(begun=made)
            self._engine.commit((name, 1) for name, _, _ in made)
            for name, _, _ in made:
                wait_until(lambda name=name: self._b.held(name) == 1, self._b)  # type: ignore[misc]
            places = [self._offset(name, ids) for name, ids, _ in made]
            cpu_apart_s += self._cpu_s() - cpu
            for slot in range(1, size):
                self._engine.begin()
                self._write(many, slot)
                started = time.perf_counter()
                self._engine.commit((name, slot + 1) for name, _, _ in made)
                self._arrived(places, slot)
                wall_s += time.perf_counter() - started
                moved += many * self._shape.token_bytes
            if moved >= total_bytes:
                return moved, wall_s, cpu_apart_s, made
            self._engine.begin(ended=[name for name, _, _ in made])

    def _offset(self, name: str, ids: bytes) -> int:
        """Where the block of a short sequence lies in the arena."""
        tokens, offsets, lease = self._arena.match(name, ids[:4])
        self._arena.release(lease)
        if tokens != 1:
            raise ClusterError(f"{name}: the peer does not hold its first token")
        return offsets[0]

    def _write(self, many: int, slot: int) -> None:
        """New KV of one token in each of the first `many` blocks."""
        where = slot_index(self._shape, slot)
        for block in range(many):
            self._engine.write(block, where)

    def _arrived(self, places: list[int], slot: int) -> None:
        """Return when the last item of `slot` is in the arena for all."""
        last = int(slot_index(self._shape, slot)[-1])
        wanted = np.array([self._engine.items(block)[last] for block in range(len(places))], np.uint16)
        items = self._arena.bytes.view(np.uint16)
        where = np.array(places) // 2 + last
        deadline = time.monotonic() + ARRIVAL_S
        while not np.array_equal(items[where], wanted):
            if time.monotonic() > deadline:
                raise ClusterError("tails do not arrive: the replicas' blocks may have moved")
            time.sleep(LOOK_S)

    def _one_by_one(self, samples: int) -> None:
        """Single deltas, each long after the one before, for the daemon's own quantiles of lag."""
        size, blocks = self._geometry.block_size, self._geometry.num_blocks
        step = 1 if self._shape.tail else size
        length = min(BLOCKS_A_SEQUENCE, blocks)
        sent = 0
        while sent < samples:
            name, ids = self._ids(length * size)
            self._engine.begin(begun=[(name, ids, range(length))])
            for upto in range(step, length * size + 1, step):
                if self._shape.tail:
                    self._engine.begin()
                    self._engine.write((upto - 1) // size, slot_index(self._shape, (upto - 1) % size))
                self._engine.commit([(name, upto)])
                sent += 1
                time.sleep(PACE_S)
            self._engine.begin(ended=[name])

    def _equal(self, name: str, ids: bytes, blocks: list[int]) -> bool:
        """Whether the peer's arena holds the tokens of a sequence exactly as the pages do."""
        tokens, offsets, lease = self._arena.match(name, ids)
        size = self._geometry.block_size
        equal = tokens == len(ids) // 4
        for position, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
            slots = min(size, tokens - position * size)
            where = np.concatenate([slot_index(self._shape, slot) for slot in range(slots)])
            held = self._arena.bytes[offset : offset + self._geometry.block_bytes].view(np.uint16)
            equal = equal and np.array_equal(held[where], self._engine.items(block)[where])
        self._arena.release(lease)
        return equal

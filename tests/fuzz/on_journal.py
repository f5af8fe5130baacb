"""The journal: records and header words as a broken or hostile engine writes them, and deltas made of them.

Real: the ring in a memfd, `EngineSession`, `Ledger`, `Shipment`, `Differ`, `HostPages`. Whatever the journal
says, nothing is read outside of the engine's pages, what is kept stays within limits, and a snapshot mends
all of it.
"""

from __future__ import annotations

import os
from array import array

import msgspec

from fuzz.mutate import Mutator
from fuzz.target import Target, demand
from segue_core.clock import ManualClock
from segue_core.geometry import Geometry, Region
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.messages.local import Register
from segue_core.ring import HEADER_BYTES, Ring, Word
from segue_core.shared_memory import seal_size, sealable_memory
from segue_daemon.engine import EngineSession
from segue_daemon.ledger import MAX_SEQUENCE_TOKENS
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Shipment

BLOCKS, SIZE = 16, 4
PAGES_BYTES = BLOCKS * SIZE * 32
GEOMETRY = Geometry(
    BLOCKS,
    SIZE,
    (PAGES_BYTES,),
    (Region(0, 0, (BLOCKS, SIZE, 16), (SIZE * 32, 32, 2), 2, ("block", "slot", "dim")),),
)
MAX_SEQUENCES = 8
SEQS = [f"s{number}" for number in range(12)]


class JournalTarget(Target):
    """See the module."""

    name = "journal"
    world_frames = 20_000

    def __init__(self, mutate: Mutator) -> None:
        super().__init__(mutate)
        self.clock = ManualClock(start_ns=1)
        self.step = 0
        self.repaired = 0

    async def start(self) -> None:
        self.lifeline = Lifeline()
        self.ring_fd, pages = sealable_memory("journal"), sealable_memory("pages")
        self.writer = Ring(self.ring_fd, create=1 << 16)
        seal_size(self.ring_fd)
        os.ftruncate(pages, PAGES_BYTES)
        message = Register(PROTOCOL_VERSION, "a", 1, "m", b"f" * 16, GEOMETRY)
        fds = [os.dup(self.ring_fd), os.eventfd(0), os.dup(self.lifeline.fd), pages]
        self.session = EngineSession(message, fds, os.getpid(), self.clock, max_sequences=MAX_SEQUENCES)
        settings = ReplicationSettings(delta_bytes=1 << 16, shadow_bytes=1 << 16)
        self.shipment = Shipment(self.session, settings, 1 << 12, lambda _: True)
        self.number = 0

    async def feed(self) -> int:
        frames = self.rng.randrange(1, 12)
        for _ in range(frames):
            if self.mutate.chance(0.04):
                self._spoil_header()
            elif self.mutate.chance(0.03):
                at = HEADER_BYTES + self.rng.randrange(1 << 16)
                os.pwrite(self.ring_fd, self.rng.randbytes(self.rng.choice((1, 4, 8, 64))), at)
            elif self.mutate.chance(0.02):
                self._spoil_length()
            else:
                self.writer.append(self.mutate.message(self._record()))
        self._drain()
        self._ship()
        if self.mutate.chance(0.02):
            self._mend()
        return frames

    # -- what is written ------------------------------------------------------------------------

    def _record(self) -> Begin | Commit:
        self.step += 1
        seqs = self.rng.sample(SEQS, self.rng.randrange(1, 4))
        if self.mutate.chance(0.4):
            return Commit(self.step, tuple((seq, self.rng.randrange(24)) for seq in seqs))
        begun, updated = [], []
        for seq in seqs:
            ids, blocks = self._ids(self.rng.randrange(20)), self._blocks(self.rng.randrange(6))
            if self.mutate.chance(0.5):
                begun.append(SequenceBegin(seq, self.rng.randrange(1, 4), b"", ids, blocks, 0))
            else:
                updated.append(SequenceUpdate(seq, ids, blocks))
        gone = [tuple(seq for seq in seqs if self.mutate.chance(0.1)) for _ in range(2)]
        reset = self.mutate.chance(0.05)
        return Begin(self.step, reset, self._blocks(4), tuple(begun), tuple(updated), *gone)

    def _ids(self, count: int) -> bytes:
        return array("I", [self.rng.randrange(50_000) for _ in range(count)]).tobytes()

    def _blocks(self, count: int) -> bytes:
        return array("I", [self.rng.randrange(BLOCKS) for _ in range(count)]).tobytes()

    def _spoil_header(self) -> None:
        """A header word that means nothing, or nearly something."""
        word = self.rng.choice(list(Word))
        if word in (Word.MAGIC, Word.VERSION, Word.CAPACITY) and self.mutate.chance(0.5):
            word = Word.HEAD
        near = self.writer.get(word)
        value = (
            self.mutate.integer(near) if self.mutate.chance(0.7) else near + self.rng.choice((-8, 8, 4096))
        )
        self.writer.set(word, value % (1 << 64))

    def _spoil_length(self) -> None:
        """The next unread record says that it is longer, shorter, or the end of the ring."""
        at = HEADER_BYTES + self.writer.get(Word.TAIL) % self.writer.capacity
        length = self.rng.choice(
            (0xFFFF_FFFF, 0xFFFF_FFFE, 0, 7, 1 << 16, 1 << 31, self.rng.randrange(1 << 12))
        )
        os.pwrite(self.ring_fd, length.to_bytes(4, "little"), at)

    # -- what is made of it ---------------------------------------------------------------------

    def _drain(self) -> None:
        self.clock.advance_ms(self.rng.choice((0, 1, 60)))
        for changes in self.session.drain():
            self.shipment.note(changes, self.clock.now_ns())
            for seq, _ in changes.ended:
                self.shipment.forget(seq)
        self.session.sleep()
        for sequence in self.session.ledger.sequences.values():
            demand(sequence.computed <= len(sequence.blocks) * SIZE, "more computed than there are blocks")
            demand(len(sequence.blocks) == len(sequence.generations), "a block without its generation")
            demand(not len(sequence.token_ids) % 4, "half a token id")

    def _ship(self) -> None:
        for _ in range(4):
            ready = self.shipment.next_delta(self.number + 1, self._drain, self.clock.now_ns())
            if ready is None:
                break
            self.number += 1
            demand(
                sum(part.nbytes for part in ready.delta.parts) == len(ready.payload),
                "parts are not the payload",
            )
            msgspec.msgpack.encode(ready.delta)

    def _mend(self) -> None:
        """The engine is well again: whatever was before, its next snapshot counts."""
        begun = SequenceBegin("good", 1, b"", self._ids(5), bytes(8), 0)
        snapshot = msgspec.msgpack.encode(Begin(self.step, True, b"", (begun,), (), (), ()))
        commit = msgspec.msgpack.encode(Commit(self.step, (("good", 5),)))
        for _ in range(4):
            self.clock.advance_ms(200)
            self.writer.append(snapshot)
            self.writer.append(commit)
            self._drain()
        good = self.session.ledger.sequences.get("good")
        demand(good is not None and good.computed == 5, "an engine that is well again is not heard")
        self.repaired += 1

    def sizes(self) -> dict[str, tuple[int, int]]:
        ledger, shipment = self.session.ledger, self.shipment
        tokens = max((s.known for s in ledger.sequences.values()), default=0)
        blocks = max((len(s.blocks) for s in ledger.sequences.values()), default=0)
        return {
            "sequences": (len(ledger.sequences), MAX_SEQUENCES),
            "tokens of a sequence": (tokens, MAX_SEQUENCE_TOKENS),
            "blocks of a sequence": (blocks, MAX_SEQUENCE_TOKENS),
            "progress": (len(shipment.planner.progress), 200),
        }

    def effects(self) -> dict[str, int]:
        return {
            "snapshots heard": self.repaired,
            "lost records": self.session.broken_records,
            "deltas": self.number,
        }

    async def stop(self) -> None:
        self.session.close()
        self.writer.close()
        os.close(self.ring_fd)
        self.lifeline.let_go()
        if self.lifeline.fd >= 0 and not self.lifeline._map.closed:
            os.close(self.lifeline.fd)

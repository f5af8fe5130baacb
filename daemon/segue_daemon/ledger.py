"""The ledger: what the engine beside us has, as told by its journal. Pure: records in, state out.

It knows each protected sequence's token ids, block table and progress, and for every block a
*generation* that grows whenever the block may be overwritten. Invariants:
* a block of a sequence may be copied only while its generation is the one noted when the sequence got
  it (`intact`); a copy is good only if that still holds after the journal was drained again;
* `shippable` never exceeds what is both computed and known.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from segue_core.content_key import TOKEN_BYTES, block_key, root_key
from segue_core.errors import ProtocolError
from segue_core.geometry import Geometry
from segue_core.messages.journal import Begin, Commit, Record, SequenceBegin, SequenceUpdate
from segue_core.messages.request import MAX_SEQ_CHARS, Replication

MAX_SEQUENCE_TOKENS = 1 << 24
"""Longer than any context: what goes on growing past it is a broken engine's."""


@dataclass
class Sequence:
    """One generation on the engine here. `blocks[i]` holds slots [i * block_size, (i+1) * block_size)."""

    seq: str
    epoch: int
    salt: bytes
    token_ids: bytearray
    blocks: array[int]
    generations: list[int]
    computed: int
    fence: int = 0
    """The epoch under which it goes on elsewhere; 0: it does not."""
    keys: list[bytes] = field(default_factory=list)
    replication: Replication = "normal"

    @property
    def fenced(self) -> bool:
        """Whether its writer is somebody else by now."""
        return self.fence > 0

    @property
    def replicated(self) -> bool:
        """Whether peers may have it."""
        return self.replication != "off"

    @property
    def known(self) -> int:
        """Tokens whose ids are known."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def shippable(self) -> int:
        """Tokens whose KV may be sent: computed and known."""
        return min(self.computed, self.known)


@dataclass(frozen=True)
class Changes:
    """What a record changed: sequences that may have more to send; (seq, epoch) of those that are over,
    and of those that were forgotten and may be announced anew."""

    grown: tuple[str, ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    forgotten: tuple[tuple[str, int], ...] = ()


class Ledger:
    """All protected sequences of one engine life."""

    def __init__(self, geometry: Geometry, fingerprint: bytes, *, max_sequences: int) -> None:
        self.geometry = geometry
        self.fingerprint = fingerprint
        self.sequences: dict[str, Sequence] = {}
        self.step = 0
        self.stale = False
        """Records were written that are not applied yet: until they are, no block is known to be intact."""
        self.refused = 0
        self._max_sequences = max_sequences
        self._generation = array("Q", [0]) * geometry.num_blocks

    def apply(self, record: Record) -> Changes:
        """Take one journal record. Raises ProtocolError if it contradicts the geometry; the ledger
        is then unchanged in what it claims about intact blocks, and a snapshot should be asked for."""
        if isinstance(record, Commit):
            return self._commit(record)
        return self._begin(record)

    def _begin(self, record: Begin) -> Changes:
        for block in self._block_ids(record.assigned, "assigned"):
            self._generation[block] += 1
        self.step = record.step
        ended = [(seq, self.sequences[seq].epoch) for seq in record.ended if seq in self.sequences]
        forgotten = self.forget_all().forgotten if record.reset else ()
        for seq in record.ended:
            self.sequences.pop(seq, None)
        for seq in record.paused:
            if seq in self.sequences:
                self._pause(self.sequences[seq])
        for begun in record.begun:
            self._add(begun)
        for update in record.updated:
            self._update(update)
        return Changes(
            grown=tuple(b.seq for b in record.begun if b.seq in self.sequences),
            ended=tuple(ended),
            forgotten=forgotten,
        )

    def _commit(self, record: Commit) -> Changes:
        self.step = record.step
        grown = []
        for seq, computed in record.computed:
            sequence = self.sequences.get(seq)
            if sequence is None:
                continue
            if not 0 <= computed <= len(sequence.blocks) * self.geometry.block_size:
                raise ProtocolError(
                    f"journal: {seq}: {computed} tokens computed in {len(sequence.blocks)} blocks"
                )
            sequence.computed = computed
            grown.append(seq)
        return Changes(grown=tuple(grown))

    def _add(self, begun: SequenceBegin) -> None:
        blocks = self._block_ids(begun.block_ids, begun.seq)
        _check_tokens(begun.token_ids, begun.seq)
        if not 0 < len(begun.seq) <= MAX_SEQ_CHARS:
            raise ProtocolError(f"journal: a sequence name of {len(begun.seq)} characters")
        if not 0 <= begun.epoch < 1 << 63:
            raise ProtocolError(f"journal: {begun.seq}: epoch {begun.epoch}")
        if not 0 <= begun.computed <= len(blocks) * self.geometry.block_size:
            raise ProtocolError(f"journal: {begun.seq}: {begun.computed} computed in {len(blocks)} blocks")
        before = self.sequences.get(begun.seq)
        if before is None and len(self.sequences) >= self._max_sequences:
            self.refused += 1
            return
        same = before is not None and before.epoch == begun.epoch
        self.sequences[begun.seq] = Sequence(
            seq=begun.seq,
            epoch=begun.epoch,
            salt=begun.salt,
            token_ids=bytearray(begun.token_ids),
            blocks=blocks,
            generations=[self._generation[block] for block in blocks],
            computed=begun.computed,
            fence=before.fence if same and before is not None else 0,
            replication=begun.replication,
        )

    def _update(self, update: SequenceUpdate) -> None:
        sequence = self.sequences.get(update.seq)
        if sequence is None:
            return
        _check_tokens(update.token_ids, update.seq)
        blocks = self._block_ids(update.block_ids, update.seq)
        tokens = sequence.known + len(update.token_ids) // TOKEN_BYTES
        if max(tokens, len(sequence.blocks) + len(blocks)) > MAX_SEQUENCE_TOKENS:
            raise ProtocolError(f"journal: {update.seq} outgrows {MAX_SEQUENCE_TOKENS} tokens")
        sequence.token_ids += update.token_ids
        sequence.blocks.extend(blocks)
        sequence.generations += [self._generation[block] for block in blocks]

    def _pause(self, sequence: Sequence) -> None:
        sequence.blocks = array("I")
        sequence.generations = []
        sequence.computed = 0

    def _block_ids(self, packed: bytes, where: str) -> array[int]:
        if len(packed) % 4:
            raise ProtocolError(f"journal: {where}: block ids of {len(packed)} bytes")
        blocks = array("I", packed)
        if blocks and max(blocks) >= self.geometry.num_blocks:
            raise ProtocolError(f"journal: {where}: block {max(blocks)} of {self.geometry.num_blocks}")
        return blocks

    def intact(self, sequence: Sequence, first: int, last: int) -> bool:
        """Whether blocks [first, last) of the table still belong to `sequence`, unchanged hands."""
        if self.stale or self.sequences.get(sequence.seq) is not sequence or last > len(sequence.blocks):
            return False
        for i in range(first, last):  # asked twice a delta: `all` takes three times as long
            if self._generation[sequence.blocks[i]] != sequence.generations[i]:
                return False
        return True

    def key(self, sequence: Sequence, position: int) -> bytes:
        """Content key of the full block at `position` of the table."""
        step = self.geometry.block_size * TOKEN_BYTES
        keys = sequence.keys
        view = memoryview(sequence.token_ids)
        while len(keys) <= position:
            parent = keys[-1] if keys else root_key(self.fingerprint, sequence.salt)
            keys.append(block_key(parent, view[len(keys) * step : (len(keys) + 1) * step]))
        view.release()
        return keys[position]

    def forget_all(self) -> Changes:
        """Records were lost: nothing is known for sure until the engine announces its sequences anew."""
        forgotten = tuple((s.seq, s.epoch) for s in self.sequences.values())
        self.sequences.clear()
        return Changes(forgotten=forgotten)

    def fence(self, seq: str, epoch: int) -> bool:
        """Stop shipping `seq` if its writer here is older than `epoch`; whether that is news."""
        sequence = self.sequences.get(seq)
        if sequence is None or max(sequence.epoch, sequence.fence) >= epoch:
            return False
        sequence.fence = epoch
        return True

    @property
    def fenced(self) -> int:
        """Sequences that go on elsewhere. O(sequences)."""
        return sum(sequence.fenced for sequence in self.sequences.values())


def _check_tokens(packed: bytes, where: str) -> None:
    if len(packed) % TOKEN_BYTES:
        raise ProtocolError(f"journal: {where}: token ids of {len(packed)} bytes")

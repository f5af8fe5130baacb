"""The live table: what the daemon is told, and what it is spared."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import msgspec
import pytest

from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.ring import Ring
from segue_shim.exporter import ANNOUNCE_SHARE
from segue_shim.plan import StepPlan, pack_u32
from segue_shim.table import LiveTable
from support.daemon_stub import LedgerReader

PLENTY = 1 << 20


def start(seq: str, tokens: int = 8, *, epoch: int = 1, computed: int = 0, block: int = 1) -> SequenceBegin:
    blocks = range(block, block + -(-tokens // 4))
    return SequenceBegin(seq, epoch, b"", pack_u32(range(tokens)), pack_u32(blocks), computed)


def test_a_sequence_is_announced_then_updated_then_ended() -> None:
    """The plain life of a sequence, one record a step."""
    table = LiveTable()
    begun = table.begin(StepPlan(begun=(start("s"),), assigned=pack_u32([1, 2])), 1, PLENTY)
    assert begun is not None and begun.begun == (start("s"),) and begun.assigned == pack_u32([1, 2])
    committed = table.commit(StepPlan(computed=(("s", 8),)), 1)
    assert committed is not None and committed.computed == (("s", 8),)
    update = SequenceUpdate("s", pack_u32([8]), pack_u32([3]))
    updated = table.begin(StepPlan(updated=(update,)), 2, PLENTY)
    assert updated is not None and updated.updated == (update,) and not updated.begun
    ended = table.begin(StepPlan(ended=("s",)), 3, PLENTY)
    assert ended is not None and ended.ended == ("s",)
    assert len(table) == 0


def test_a_step_with_nothing_to_say_writes_nothing() -> None:
    """Steps of unprotected requests cost no record, unless they take blocks over."""
    table = LiveTable()
    assert table.begin(StepPlan(running=3), 1, PLENTY) is None
    assert table.commit(StepPlan(running=3), 1) is None
    assert table.begin(StepPlan(assigned=pack_u32([7])), 2, PLENTY) is not None


def test_announcing_anew_says_how_far_each_sequence_is() -> None:
    """After a reset the daemon gets whole sequences, as they are now."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s"), start("t", block=5))), 1, PLENTY)
    table.commit(StepPlan(computed=(("s", 8), ("t", 3))), 1)
    table.announce_all()
    record = table.begin(StepPlan(updated=(SequenceUpdate("s", pack_u32([99]), b""),)), 2, PLENTY)
    assert record is not None and record.reset and record.updated == ()
    assert {(begun.seq, begun.computed, len(begun.token_ids)) for begun in record.begun} == {
        ("s", 8, 36),
        ("t", 3, 32),
    }


def test_announcements_are_spread_over_steps() -> None:
    """What does not fit now follows, one reset only; until then nothing else is said about it."""
    table = LiveTable()
    table.begin(StepPlan(begun=tuple(start(f"s{n}", 100) for n in range(4))), 1, PLENTY)
    table.announce_all()
    first = table.begin(StepPlan(), 2, 1500)
    assert first is not None and first.reset and 0 < len(first.begun) < 4
    commit = table.commit(StepPlan(computed=tuple((f"s{n}", 50) for n in range(4))), 2)
    assert commit is not None and len(commit.computed) == len(first.begun)
    second = table.begin(StepPlan(), 3, PLENTY)
    assert second is not None and not second.reset
    assert len(first.begun) + len(second.begun) == 4
    assert all(begun.computed == 50 for begun in second.begun)


def test_a_sequence_too_large_to_announce_does_not_hold_up_the_others() -> None:
    """It stays unprotected."""
    table = LiveTable()
    record = table.begin(StepPlan(begun=(start("large", 5000), start("small"))), 1, 2000)
    assert record is not None and [begun.seq for begun in record.begun] == ["small"]


def test_a_sequence_taken_back_without_room_to_say_so_is_paused() -> None:
    """The daemon must not go on shipping blocks that are being computed anew."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s", 100),)), 1, PLENTY)
    record = table.begin(StepPlan(begun=(start("s", 100, computed=4),)), 2, 10)
    assert record is not None and record.paused == ("s",) and record.begun == ()


def test_paused_and_resumed_in_one_step_is_a_new_beginning() -> None:
    """Only the announcement is said."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s"),)), 1, PLENTY)
    record = table.begin(StepPlan(paused=("s",), begun=(start("s", block=7),)), 2, PLENTY)
    assert record is not None and record.paused == () and record.begun[0].block_ids == pack_u32([7, 8])


def test_ended_and_begun_in_one_step_is_a_new_beginning() -> None:
    """A sequence that comes back with a higher epoch at once is not taken for over."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s"),)), 1, PLENTY)
    record = table.begin(StepPlan(ended=("s",), begun=(start("s", epoch=2),)), 2, PLENTY)
    assert record is not None and record.ended == () and record.begun[0].epoch == 2


def test_a_fenced_sequence_is_not_mentioned_again_until_a_higher_epoch() -> None:
    """The daemon said that it goes on elsewhere."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s"),)), 1, PLENTY)
    table.fence("s", 2)
    assert table.begin(StepPlan(updated=(SequenceUpdate("s", b"", pack_u32([9])),)), 2, PLENTY) is None
    assert table.commit(StepPlan(computed=(("s", 8),)), 2) is None
    table.announce_all()
    record = table.begin(StepPlan(), 3, PLENTY)
    assert record is not None and record.reset and record.begun == ()
    assert table.begin(StepPlan(begun=(start("s"),)), 4, PLENTY) is None
    higher = table.begin(StepPlan(begun=(start("s", epoch=3),)), 5, PLENTY)
    assert higher is not None and higher.begun[0].epoch == 3


def test_a_fence_for_an_older_epoch_changes_nothing() -> None:
    """It was meant for the writer before."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s", epoch=4),)), 1, PLENTY)
    table.fence("s", 4)
    assert table.commit(StepPlan(computed=(("s", 8),)), 1) is not None


def test_failed_blocks_hold_back_every_sequence_that_has_them() -> None:
    """Also one that only shares the block as a prefix."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s"), start("shares"), start("other", block=9))), 1, PLENTY)
    plan = StepPlan(computed=(("s", 8), ("shares", 8), ("other", 8)))
    record = table.commit(plan, 1, failed_blocks=(2,))
    assert record is not None and record.computed == (("other", 8),)


def test_what_may_have_been_in_vain_is_claimed_by_the_next_step_only() -> None:
    """Another rank may have failed to load its part of these blocks; if not, nothing is lost."""
    table = LiveTable()
    table.begin(StepPlan(begun=(start("s"), start("other", block=9))), 1, PLENTY)
    record = table.commit(StepPlan(computed=(("s", 8), ("other", 8))), 1, unsure_blocks=(2,))
    assert record is not None and record.computed == (("other", 8),)
    record = table.commit(StepPlan(computed=(("s", 9),)), 2)
    assert record is not None and record.computed == (("s", 9),)


@dataclass
class Engine:
    """A made-up engine: random lives of sequences, never two owners of a block."""

    random: random.Random
    live: dict[str, list[int]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    next_block: int = 0

    def take(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def step(self) -> StepPlan:
        choose = self.random
        begun, updated, paused, ended, computed = [], [], [], [], []
        assigned: list[int] = []
        for seq in list(self.live):
            fate = choose.random()
            if fate < 0.05:
                ended.append(seq)
                for table in (self.live, self.blocks, self.computed):
                    table.pop(seq, None)
            elif seq in self.blocks and fate < 0.1:
                paused.append(seq)
                del self.blocks[seq], self.computed[seq]
            elif seq not in self.blocks and fate < 0.3:
                begun.append(self.place(seq, assigned))
            elif seq in self.blocks and fate < 0.34 and self.computed[seq] > 8:
                begun.append(self.place(seq, assigned, back=True))
            elif seq in self.blocks:
                tokens = [choose.randrange(1000) for _ in range(choose.randrange(3))]
                self.live[seq] += tokens
                new = self.take(-(-len(self.live[seq]) // 4) - len(self.blocks[seq]))
                self.blocks[seq] += new
                assigned += new
                if tokens or new:
                    updated.append(SequenceUpdate(seq, pack_u32(tokens), pack_u32(new)))
        if len(self.live) < 6 and choose.random() < 0.4:
            seq = f"s{choose.randrange(20)}"
            if seq not in self.live:
                self.live[seq] = [choose.randrange(1000) for _ in range(choose.randrange(1, 60))]
                self.epochs[seq] = self.epochs.get(seq, 0) + 1
                begun.append(self.place(seq, assigned))
        computed = [(seq, len(self.live[seq])) for seq in self.blocks]
        return StepPlan(
            assigned=pack_u32(assigned),
            begun=tuple(begun),
            updated=tuple(updated),
            paused=tuple(paused),
            ended=tuple(ended),
            computed=tuple(computed),
        )

    def place(self, seq: str, assigned: list[int], back: bool = False) -> SequenceBegin:
        if not back:
            self.blocks[seq] = self.take(-(-len(self.live[seq]) // 4))
        self.computed[seq] = 4 if back else 0
        assigned += self.blocks[seq][self.computed[seq] // 4 :]
        return SequenceBegin(
            seq,
            self.epochs[seq],
            b"",
            pack_u32(self.live[seq]),
            pack_u32(self.blocks[seq]),
            self.computed[seq],
        )


def write(table: LiveTable, ring: Ring, record: Begin | Commit | None) -> bool:
    """As the exporter does it; whether the record was dropped."""
    if record is None or ring.append(msgspec.msgpack.encode(record)):
        return False
    table.announce_all()
    return True


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_lost_the_daemon_never_knows_anything_wrong(seed: int) -> None:
    """Random lives over a ring that is often full: what the daemon knows is true, and in the end complete."""
    chance = random.Random(seed)
    fd = os.memfd_create("ring")
    ring = Ring(fd, create=16384)
    reader_ring = Ring(fd)
    ledger = LedgerReader(reader_ring, block_size=4)
    table, engine = LiveTable(), Engine(chance)
    dropped = 0
    for step in range(1, 300):
        calm = step > 250
        plan = engine.step()
        dropped += write(table, ring, table.begin(plan, step, ring.free() // ANNOUNCE_SHARE))
        dropped += write(table, ring, table.commit(plan, step))
        engine.computed.update(plan.computed)
        if calm or chance.random() < 0.01:
            ledger.drain()
            check(ledger, engine, complete=step > 290, current=not dropped or step > 290)
    assert not ledger.problems
    assert dropped > 0
    reader_ring.close()
    ring.close()
    os.close(fd)


def check(ledger: LedgerReader, engine: Engine, *, complete: bool, current: bool) -> None:
    """`current`: nothing was lost of late, so the daemon is up to date; `complete`: and knows all."""
    for seq, known in ledger.sequences.items():
        if not current and known.epoch != engine.epochs[seq]:
            continue  # its end was lost; the reset that follows takes it away
        if current:
            assert seq in engine.live
        if seq in engine.live:
            assert known.token_ids == engine.live[seq][: len(known.token_ids)]
        if current and known.block_ids:
            assert known.block_ids == engine.blocks[seq]
            assert known.computed == engine.computed[seq]
            assert known.token_ids == engine.live[seq]
    if complete:
        held = {seq for seq, known in ledger.sequences.items() if known.block_ids}
        assert held == set(engine.blocks)


def test_a_clients_word_on_replication_is_said_in_every_announcement() -> None:
    """Also when a daemon comes back: what was kept back must not leak then."""
    table = LiveTable()
    kept = msgspec.structs.replace(start("s"), replication="off")
    first = table.begin(StepPlan(begun=(kept,), assigned=pack_u32([1, 2])), 1, PLENTY)
    table.announce_all()
    again = table.begin(StepPlan(), 2, PLENTY)
    assert first is not None and again is not None
    assert first.begun[0].replication == again.begun[0].replication == "off"

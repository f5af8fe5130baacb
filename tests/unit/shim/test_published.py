"""Publications of an engine's tables: what the journal says of them."""

from __future__ import annotations

import logging

import pytest

from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.ring import Word
from segue_shim.plan import pack_u32
from segue_shim.published import PublishedTables
from segue_shim.table_exporter import TableExporter
from support.daemon_stub import DaemonStub, Registration, wait_until
from support.kv_pages import BLOCK_SIZE, BLOCKS, FAST, kv_tensors

pytestmark = pytest.mark.timeout(30)


def table(
    seq: str = "s",
    tokens: int = 6,
    blocks: tuple[int, ...] = (1, 2),
    computed: int = 6,
    *,
    epoch: int = 1,
    salt: bytes = b"",
    first: int = 0,
) -> SequenceBegin:
    ids = pack_u32(range(first, first + tokens))
    return SequenceBegin(seq, epoch, salt, ids, pack_u32(blocks), computed)


def tables() -> PublishedTables:
    made = PublishedTables(num_blocks=BLOCKS, block_size=4)
    made.publish([table()], step=1, running=1)
    return made


def test_growth_is_told_as_growth_and_the_same_again_as_nothing() -> None:
    """An idle engine's publications cost next to nothing; a decode step tells one token."""
    made = tables()
    assert made.publish([table()], step=1, running=1).begun == ()
    plan = made.publish([table(tokens=9, blocks=(1, 2, 5), computed=8)], step=2, running=1)
    assert plan.updated == (SequenceUpdate("s", pack_u32([6, 7, 8]), pack_u32([5])),)
    assert (plan.begun, plan.computed) == ((), (("s", 8),))


@pytest.mark.parametrize(
    "now",
    [
        table(blocks=(1, 3)),
        table(blocks=(2, 1)),
        table(blocks=(1,), computed=4),
        table(computed=5),
        table(epoch=2),
        table(epoch=2, salt=b"x"),
        table(epoch=2, first=9),
    ],
    ids=["other-block", "swapped", "fewer", "less-computed", "epoch", "epoch-salt", "epoch-ids"],
)
def test_a_sequence_that_lost_anything_begins_anew(now: SequenceBegin) -> None:
    """What was copied of it before does not count any more."""
    plan = tables().publish([now], step=2, running=1)
    assert (plan.begun, plan.updated, plan.ended) == ((now,), (), ())


def test_a_preempted_sequence_waits_and_begins_anew() -> None:
    """Without blocks it is not over: its replica stays."""
    made = tables()
    waiting = table(tokens=7, blocks=(), computed=0)
    plan = made.publish([waiting], step=2, running=1)
    assert (plan.paused, plan.ended) == (("s",), ())
    assert made.publish([waiting], step=3, running=1).paused == ()
    back = table(tokens=7, blocks=(1, 2), computed=7)
    assert made.publish([back], step=4, running=1).begun == (back,)
    assert made.publish([], step=5, running=0).ended == ("s",)


@pytest.mark.parametrize("now", [table(first=1), table(salt=b"x"), table(tokens=5, computed=5)])
def test_ids_that_were_told_are_for_good(now: SequenceBegin) -> None:
    """A sequence that takes them back under the same epoch is ended at the peers before it is begun again."""
    made = tables()
    plan = made.publish([now], step=2, running=1)
    assert (plan.begun, plan.ended, made.taken_back) == ((), ("s",), ("s",))
    assert made.publish([now], step=3, running=1).begun == (now,)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([table(blocks=(1, BLOCKS))], "block 12, but the engine has 12"),
        ([table(blocks=(1,))], "6 tokens computed, in blocks for 4"),
        ([table(), table()], "twice"),
        ([table(seq="")], "name of 0 characters"),
        ([SequenceBegin("s", 1, b"", b"\0" * 5, b"", 0)], "packed as u32"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(wrong: list[SequenceBegin], says: str) -> None:
    """With a message that says what is wrong."""
    with pytest.raises(ValueError, match=says):
        PublishedTables(num_blocks=BLOCKS, block_size=4).publish(wrong, step=1, running=1)
    with pytest.raises(ValueError, match="steps only count up"):
        tables().publish([], step=0, running=0)


def registered(socket_path: str, stub: DaemonStub) -> tuple[TableExporter, Registration]:
    exporter = TableExporter(
        socket_path, engine="a", model="m", fingerprint=b"f" * 16, incarnation=5, options=FAST
    )
    assert exporter.register_pages(kv_tensors(), num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    registration = stub.registered()
    wait_until(lambda: exporter.registered)
    return exporter, registration


def test_each_publication_ends_in_a_commit(socket_path: str, stub: DaemonStub) -> None:
    """The daemon waits for it before it sends what it has copied; a full journal starts over."""
    exporter, registration = registered(socket_path, stub)
    assert registration.message.notice == "after"
    exporter.publish([table()], step=7, running=3)
    begin, commit = registration.ledger.drain()
    assert isinstance(begin, Begin) and begin.reset and isinstance(commit, Commit)
    ring = registration.ring
    assert (ring.get(Word.STEP_COMMITTED), ring.get(Word.RUNNING)) == (7, 3)
    exporter.publish([table()], step=7, running=3)
    assert registration.ledger.drain() == [Commit(7, ())]
    exporter.publish([table(tokens=7, computed=7)], step=8, running=3)
    registration.ledger.drain()
    assert (registration.ledger.sequences["s"].computed, registration.ledger.problems) == (7, [])
    while not ring.get(Word.DROPPED):
        exporter.publish([table(tokens=7, computed=7)], step=8, running=3)
    registration.ledger.drain()
    exporter.publish([table(tokens=7, computed=7)], step=8, running=3)
    begin, _ = registration.ledger.drain()
    assert isinstance(begin, Begin) and begin.reset and len(begin.begun) == 1
    exporter.close()


def test_an_engine_that_skips_publications_is_noticed(
    socket_path: str, stub: DaemonStub, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks may have gone to others and come back meanwhile: all begins anew, and the log says why, once."""
    exporter, registration = registered(socket_path, stub)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 4, 7):
            exporter.publish([table()], step=step, running=1)
    begins = [record for record in registration.ledger.drain() if isinstance(record, Begin)]
    assert [(begin.step, begin.reset) for begin in begins] == [(1, True), (4, True), (7, True)]
    assert caplog.text.count("2 steps ran between two publications") == 1
    exporter.close()


def test_an_engine_with_broken_tables_runs_on_unprotected(
    socket_path: str, stub: DaemonStub, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised in the engine; its daemon hears that there is nothing to protect."""
    exporter, registration = registered(socket_path, stub)
    exporter.publish([table()], step=1, running=1)
    exporter.publish([table(blocks=(1, 99))], step=2, running=1)
    assert exporter.broken and "block 99" in caplog.text
    registration.ledger.drain()
    assert registration.ledger.sequences == {}
    exporter.close()

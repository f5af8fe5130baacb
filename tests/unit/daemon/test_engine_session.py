"""One engine life as the daemon reads it: lost records cost protection, never correctness."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

import msgspec
import pytest

from segue_core.clock import ManualClock
from segue_core.geometry import Geometry, Region
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.local import Register
from segue_core.ring import Ring, Word
from segue_core.shared_memory import seal_size, sealable_memory
from segue_daemon import engine
from segue_daemon.engine import EngineSession
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Shipment

GEOMETRY = Geometry(8, 2, (512,), (Region(0, 0, (8, 2, 16), (64, 32, 2), 2, ("block", "slot", "dim")),))


class Bench:
    """A session and the engine's end of its journal."""

    def __init__(self) -> None:
        self.lifeline = Lifeline()
        ring_fd, pages = sealable_memory("journal"), sealable_memory("pages")
        self.writer = Ring(ring_fd, create=4096)
        seal_size(ring_fd)
        os.ftruncate(pages, 512)
        self.clock = ManualClock(start_ns=1)
        message = Register(PROTOCOL_VERSION, "a", 1, "m", b"f" * 16, GEOMETRY)
        fds = [ring_fd, os.eventfd(0), os.dup(self.lifeline.fd), pages]
        self.session = EngineSession(message, fds, os.getpid(), self.clock, max_sequences=10)

    def write(self, record: Begin | Commit) -> bool:
        return self.writer.append(msgspec.msgpack.encode(record))

    def close(self) -> None:
        self.session.close()
        self.writer.close()
        self.lifeline.let_go()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def begin(step: int, seq: str, blocks: list[int], *, reset: bool = False) -> Begin:
    packed = array("I", blocks).tobytes()
    ids = array("I", range(2 * len(blocks))).tobytes()
    return Begin(step, reset, packed, (SequenceBegin(seq, 1, b"", ids, packed, 0),), (), (), ())


def test_a_full_journal_makes_what_is_unread_worthless_too(bench: Bench) -> None:
    """The lost record may have given the blocks away: older records must not bring their sequence back."""
    assert bench.write(begin(1, "s", [0, 1]))
    assert bench.write(Commit(1, (("s", 4),)))
    while bench.write(Begin(2, False, bytes(400), (), (), (), ())):
        pass
    bench.session.drain()
    assert bench.session.ledger.sequences == {}
    assert bench.writer.get(Word.SNAPSHOT_WANTED) == 1
    assert bench.write(begin(3, "s", [2, 3], reset=True))
    bench.session.drain()
    assert list(bench.session.ledger.sequences) == ["s"]


def test_what_was_known_is_reported_as_forgotten(bench: Bench) -> None:
    """Peers are told sooner or later that a sequence is over if it is not announced anew."""
    bench.write(begin(1, "s", [0]))
    bench.session.drain()
    bench.writer.append(b"noise")
    changes = bench.session.drain()
    assert [c.forgotten for c in changes] == [(("s", 1),)]
    assert bench.session.broken_records == 1


def test_a_record_that_stays_unreadable_is_given_up(bench: Bench) -> None:
    """Torn for a moment is late; torn for long is broken."""
    bench.write(begin(1, "s", [0]))
    bench.session.drain()
    start = bench.writer.get(Word.HEAD)
    assert bench.write(Commit(1, (("s", 2),)))
    bench.writer._data[start + 8] ^= 0xFF
    bench.session.drain()
    assert "s" in bench.session.ledger.sequences
    bench.clock.advance_ms(200)
    bench.session.drain()
    assert "s" not in bench.session.ledger.sequences


def test_impossible_bookkeeping_is_survived(bench: Bench) -> None:
    """A head that cannot be is skipped, whatever it says."""
    for head in (2**64 - 1, 3, 1 << 40):
        bench.writer.set(Word.HEAD, head)
        bench.session.drain()
    assert bench.session.broken_records >= 1


class Copying:
    """A shipment to one peer; each move takes one record more, as after a long pause each takes its share."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.shipment = Shipment(bench.session, ReplicationSettings(), 1 << 16, lambda _: True)

    def drain(self) -> None:
        for changes in self.bench.session.drain():
            self.shipment.note(changes)

    def next(self) -> str | None:
        ready = self.shipment.next_delta(1, self.drain)
        return ready.delta.seq if ready is not None else None


def gives_blocks_of_s_away(bench: Bench) -> None:
    """`v` and `s` were begun and computed; what the journal says after that was not read yet."""
    bench.write(begin(1, "v", [3]))
    bench.write(begin(1, "s", [0, 1]))
    bench.write(Commit(1, (("v", 2), ("s", 4))))
    for _ in range(3):
        bench.session.drain()
    for record in (Commit(2, ()), Commit(2, ()), begin(3, "t", [0, 1])):
        bench.write(record)


def test_a_copy_is_not_sent_before_all_that_was_written_meanwhile_was_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of the daemon the journal holds more than is read at once: somewhere in it the blocks
    that were just copied may have been given to somebody else."""
    monkeypatch.setattr(engine, "MAX_RECORDS_PER_DRAIN", 1)
    gives_blocks_of_s_away(bench)
    copying = Copying(bench)
    assert [copying.next() for _ in range(4)] == [None, "v", None, None]
    bench.write(Commit(3, (("t", 4),)))
    bench.write(begin(4, "u", [2]))
    bench.write(Commit(4, (("u", 2),)))
    for _ in range(3):
        copying.drain()
    assert {copying.next() for _ in range(2)} == {"t", "u"}


def test_much_to_read_is_not_taken_for_something_unreadable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is needed: of a dead engine nobody can announce it anew."""
    monkeypatch.setattr(engine, "MAX_RECORDS_PER_DRAIN", 1)
    for step in range(4):
        bench.write(begin(step, f"s{step}", [step]))
    for _ in range(4):
        bench.clock.advance_ms(200)
        bench.session.drain()
    assert len(bench.session.ledger.sequences) == 4 and not bench.session.broken_records


def test_a_copy_is_not_sent_while_a_record_cannot_be_read(bench: Bench) -> None:
    """It may be the one that gives the blocks away."""
    gives_blocks_of_s_away(bench)
    copying = Copying(bench)
    bench.writer._data[bench.writer.get(Word.TAIL) % 4096 + 8] ^= 0xFF
    assert copying.next() is None
    assert "s" in bench.session.ledger.sequences


def test_of_a_dead_engine_nothing_is_claimed_before_its_last_word(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left is copied from memory that only the end of its journal tells about."""
    monkeypatch.setattr(engine, "MAX_RECORDS_PER_DRAIN", 1)
    gives_blocks_of_s_away(bench)
    bench.session.last_words()
    ledger = bench.session.ledger
    assert not ledger.stale and not ledger.intact(ledger.sequences["s"], 0, 2)
    assert ledger.intact(ledger.sequences["t"], 0, 2)
    bench.writer.append(b"noise")
    bench.write(Commit(4, ()))
    bench.writer._data[bench.writer.get(Word.HEAD) % 4096 - 8] ^= 0xFF
    bench.session.last_words()
    assert ledger.sequences == {} and not ledger.stale

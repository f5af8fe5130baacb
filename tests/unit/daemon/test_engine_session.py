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
from segue_daemon.engine import EngineSession

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

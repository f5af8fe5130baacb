"""What is told of a shipment without looking at all that lives is the same as if one had looked."""

from __future__ import annotations

import os
from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from segue_core.clock import ManualClock
from segue_core.geometry import Geometry, Region
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.peer import Ack, Nack, NackReason
from segue_daemon.ledger import Ledger
from segue_daemon.pages import HostPages
from segue_daemon.placement import Placement
from segue_daemon.placer import Placer
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Shipment

NAMES = ("s", "t", "u")
SIZE, BLOCKS, DIM = 4, 12, 16
GEOMETRY = Geometry(
    BLOCKS,
    SIZE,
    (BLOCKS * SIZE * DIM,),
    (Region(0, 0, (BLOCKS, SIZE, DIM), (SIZE * DIM, DIM, 1), 1, ("block", "slot", "dim")),),
).validate()
TABLES = {name: array("I", range(4 * i, 4 * i + 4)).tobytes() for i, name in enumerate(NAMES)}

Steps = st.lists(
    st.tuples(
        st.sampled_from(
            ("grow", "grow", "send", "send", "ack", "ack", "gap", "full", "room", "fence", "end")
        ),
        st.sampled_from(NAMES),
        st.integers(0, 16),
    ),
    max_size=60,
)


@given(Steps)
def test_lag_is_the_same_as_counted_over_all_sequences(steps: list[tuple[str, str, int]]) -> None:
    """Growth, sends, acks, nacks, refusals, fences and ends, in any order."""
    fd = os.memfd_create("figures")
    os.ftruncate(fd, GEOMETRY.handle_bytes[0])
    ledger = Ledger(GEOMETRY, b"f" * 16, max_sequences=9)
    pages = HostPages(GEOMETRY, [fd])
    session = SimpleNamespace(pages=pages, ledger=ledger, incarnation=1, dead=False)
    shipment = Shipment(session, ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    number = 0
    for what, seq, tokens in steps:
        progress = shipment.planner.progress.get(seq)
        acked = progress.acked if progress else 0
        if what == "grow":
            if seq not in ledger.sequences:
                begun = SequenceBegin(seq, 1, b"", bytes(64), TABLES[seq], 0)
                shipment.note(ledger.apply(Begin(1, False, b"", (begun,), (), (), ())))
            shipment.note(ledger.apply(Commit(1, ((seq, max(tokens, ledger.sequences[seq].computed)),))))
        elif what == "send":
            number += shipment.next_delta(number + 1, lambda: None) is not None
        elif what == "ack":
            shipment.acked(Ack(number, seq, 1, tokens, 0))
        elif what == "gap":
            shipment.nacked(Nack(number, seq, 1, min(tokens, acked), NackReason.GAP, 0))
        elif what == "full":
            shipment.nacked(Nack(number, seq, 1, acked, NackReason.NO_ROOM, 0))
        elif what == "room":
            shipment.retry_refused(1 << 20)
        elif what == "fence":
            ledger.fence(seq, 2)
        else:
            ledger.apply(Begin(1, False, b"", (), (), (), (seq,)))
            shipment.forget(seq)
        counted = 0
        for name, sequence in ledger.sequences.items():
            progress = shipment.planner.progress.get(name)
            if progress is not None and not progress.stopped and not sequence.fenced:
                counted += max(0, sequence.shippable - progress.acked)
        assert bool(shipment.unflushed()) == bool(counted)
        assert shipment.lag_tokens() == counted
        known = shipment.planner.progress
        held = [p.acked > 0 for name, p in known.items() if not ledger.sequences[name].fenced]
        assert shipment.copies() == (len(held), sum(held))
    pages.close()
    os.close(fd)


def test_copies_are_wanted_of_what_this_engine_writes_and_peers_may_have() -> None:
    """What went on elsewhere is protected from there: counted here it would look unprotected for ever."""
    ledger = Ledger(GEOMETRY, b"f" * 16, max_sequences=9)
    for name, replication in (("s", "normal"), ("t", "normal"), ("u", "off")):
        begun = SequenceBegin(name, 1, b"", bytes(64), TABLES[name], 4, replication)  # type: ignore[arg-type]
        ledger.apply(Begin(1, False, b"", (begun,), (), (), ()))
    pages = SimpleNamespace(geometry=GEOMETRY, buffer=bytearray, batch_bytes=0, gathers=False)
    session = SimpleNamespace(pages=pages, ledger=ledger, incarnation=1, dead=False)
    shipment = Shipment(session, ReplicationSettings(), 1 << 16, lambda _: True)  # type: ignore[arg-type]
    link: Any = SimpleNamespace(connected=True, copies=lambda _: shipment.copies())
    host: Any = SimpleNamespace(live=session)
    placer = Placer(Placement(["b"]), host, [link], ManualClock(start_ns=1))
    shipment.planner.progress["s"].acked = shipment.planner.progress["t"].acked = 4
    assert (placer.status().wanted, placer.status().placed, placer.status().achieved) == (2, 2, 2)
    ledger.fence("t", 2)
    assert (placer.status().wanted, placer.status().placed, placer.status().achieved) == (1, 1, 1)

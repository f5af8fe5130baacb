"""Epochs outlive replicas: a writer that wakes up late does not begin anew what went on elsewhere."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from segue_core.content_key import chain, root_key
from segue_core.messages.peer import Delta, End, NackReason, Part, PartKind
from segue_daemon.fences import Fences
from segue_daemon.replicas import Refusal
from segue_daemon.store import ReplicaStore

SIZE, BLOCK = 4, 64
FINGERPRINT = b"f" * 16
WRITER = 77


def new_store() -> ReplicaStore:
    return ReplicaStore(np.zeros(8 * BLOCK, np.uint8), lease_ns=1)


def ship(store: ReplicaStore, upto: int, *, base: int = 0, epoch: int = 1) -> int | Refusal:
    """A delta of sequence `s`, in whole blocks."""
    ids = array("I", range(upto)).tobytes()
    keys = list(chain(root_key(FINGERPRINT, b""), ids, SIZE))
    parts = tuple(Part(i, PartKind.WHOLE, keys[i], BLOCK) for i in range(base // SIZE, upto // SIZE))
    new = ids[4 * base :]
    delta = Delta(1, "s", epoch, WRITER, FINGERPRINT, b"", SIZE, BLOCK, base, new, parts, 0)
    reservation = store.reserve(delta, "w")
    return reservation if isinstance(reservation, Refusal) else store.commit(reservation, {})


@pytest.mark.parametrize("how", ["ended", "evicted"])
def test_an_old_writer_does_not_begin_anew_where_the_new_ones_replica_was_dropped(how: str) -> None:
    """The epoch outlives the replica, also where nobody was promoted."""
    store = new_store()
    assert ship(store, 8, epoch=3) == 8
    if how == "ended":
        store.end(End("s", 3, WRITER))
    else:
        assert store.drop_writer("w", before_ns=1) == 1
    late = ship(store, 8, epoch=2)
    assert isinstance(late, Refusal) and (late.reason, late.fence) == (NackReason.FENCED, 3)
    assert ship(store, 4, epoch=3) == 4, "whoever wrote it may go on"


def test_a_replica_of_an_older_writer_stays_but_does_not_grow_once_somebody_was_promoted() -> None:
    """Also at a daemon that was not promoted itself: it may be all there is if the new writer fails too."""
    store = new_store()
    assert ship(store, 8) == 8
    store.end(End("s", 2, 5))
    late = ship(store, 12, base=8)
    assert isinstance(late, Refusal) and (late.reason, late.fence) == (NackReason.FENCED, 2)
    assert store.replicas["s"].watermark == 8
    store.end(End("s", 1, WRITER))
    assert not store.replicas, "its own writer may end it"


def test_fences_are_bounded_and_never_lowered() -> None:
    """The one that was raised longest ago is forgotten first."""
    fences = Fences(limit=2)
    for seq, epoch in (("a", 5), ("b", 2), ("a", 3), ("b", 4), ("c", 2)):
        fences.lift(seq, epoch)
    assert [fences.of(seq) for seq in "abc"] == [0, 4, 2] and len(fences) == 2
    assert fences.forgotten == 1, "what is not guarded any more is counted"


def test_an_epoch_under_which_the_engine_here_writes_is_not_given_out_again() -> None:
    """Also by a daemon that was restarted: it has forgotten who was promoted, its engine has not."""
    store = new_store()
    store.written_here = {"s": 2}.__getitem__
    assert store.promote("s", 2) is None
    assert store.promote("s", 3) == 0


def test_a_writer_is_not_told_that_an_earlier_writers_tokens_are_its_own() -> None:
    """What it believes to be held is not sent, and counts as protected."""
    store = new_store()
    assert ship(store, 8) == 8
    ids = array("I", range(8)).tobytes()
    keys = chain(root_key(FINGERPRINT, b""), ids, SIZE)
    named = tuple(Part(i, PartKind.KEY, key, 0) for i, key in enumerate(keys))
    reservation = store.reserve(Delta(1, "s", 2, 5, FINGERPRINT, b"", SIZE, BLOCK, 0, ids, named, 0), "v")
    assert not isinstance(reservation, Refusal)
    block = reservation.targets[1][1]
    assert block is not None
    block.checksum = 0
    for _ in range(2):
        store.integrity.scrub_one(0)  # finds the block changed while the delta is on its way
    assert store.replicas["s"].watermark == 4, "what was here keeps what is right"
    refused = store.commit(reservation, {})
    assert isinstance(refused, Refusal) and (refused.reason, refused.watermark) == (NackReason.KEY_UNKNOWN, 0)

"""The journal: what goes in comes out in order, whatever the sizes; garbage never gets through."""

from __future__ import annotations

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.errors import ProtocolError
from segue_core.ring import HEADER_BYTES, Ring, Word


def make(capacity: int = 4096) -> tuple[Ring, Ring, int]:
    fd = os.memfd_create("ring-test")
    return Ring(fd, create=capacity), Ring(fd), fd


@given(st.lists(st.one_of(st.binary(max_size=1500), st.just(None)), max_size=200))
def test_records_come_out_once_and_in_order(script: list[bytes | None]) -> None:
    """bytes: the engine writes; None: the daemon reads one. A full ring drops and counts, nothing else."""
    writer, reader, fd = make()
    expected: deque[bytes] = deque()
    dropped = 0
    for step in script:
        if step is None:
            assert reader.read() == (expected.popleft() if expected else None)
        elif writer.append(step):
            expected.append(step)
        else:
            dropped += 1
    while expected:
        assert reader.read() == expected.popleft()
    assert reader.read() is None
    assert reader.get(Word.DROPPED) == dropped
    os.close(fd)


@given(st.integers(1, 3000), st.integers(0, 500))
def test_what_fits_can_be_appended(size: int, shift: int) -> None:
    """`fits` is exact for a ring that was read empty, wherever its end falls."""
    writer, reader, fd = make()
    for _ in range(shift):
        assert writer.append(b"x" * 9)
        reader.read()
    assert writer.fits(size) == writer.append(b"y" * size)
    os.close(fd)


def test_a_torn_record_is_not_there_yet() -> None:
    """A payload that does not match its checksum is never handed out."""
    writer, reader, fd = make()
    writer.append(b"good record")
    os.pwrite(fd, b"BAD", HEADER_BYTES + 8)
    assert reader.read() is None
    reader.skip()
    writer.append(b"next")
    assert reader.read() == b"next"
    os.close(fd)


@given(st.binary(min_size=64, max_size=256), st.integers(0, 2**64 - 1))
def test_garbage_is_refused_and_never_read_outside(junk: bytes, head: int) -> None:
    """Whatever bytes the ring and its header hold: a verified payload, nothing, or a ProtocolError."""
    writer, reader, fd = make()
    os.pwrite(fd, junk, HEADER_BYTES)
    writer.set(Word.HEAD, head)
    try:
        payload = reader.read()
        assert payload is None or len(payload) <= 4096
    except ProtocolError:
        pass
    os.close(fd)


def test_the_bell_is_rung_once_per_sleep() -> None:
    """A sleeping reader costs one doorbell, an awake one none."""
    writer, reader, fd = make()
    assert not writer.doorbell_wanted()
    reader.set(Word.SLEEPING, 1)
    assert writer.doorbell_wanted()
    assert not writer.doorbell_wanted()
    os.close(fd)


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES, HEADER_BYTES + 8192])
def test_memory_that_is_no_ring_is_refused(size: int) -> None:
    """A daemon that is handed some other memory says so instead of reading it."""
    fd = os.memfd_create("not-a-ring")
    os.ftruncate(fd, size)
    with pytest.raises(ProtocolError):
        Ring(fd)
    os.close(fd)


def test_a_record_of_the_last_lap_is_not_taken_for_a_new_one() -> None:
    """On machines that reorder stores `head` may be seen before the record: what lies there is old."""
    writer, reader, fd = make(4096)
    for _ in range(4):
        assert writer.append(b"x" * 1016)
        assert reader.read() == b"x" * 1016
    before = os.pread(fd, 1024, HEADER_BYTES)
    assert writer.append(b"y" * 1016)
    os.pwrite(fd, before, HEADER_BYTES)
    assert reader.read() is None
    os.close(fd)

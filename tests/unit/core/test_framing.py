"""Frames: cut, too long or malformed ones are refused, and no descriptor leaks."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.errors import ProtocolError
from segue_core.framing import LENGTH, MAX_FDS, close_fds, decode, encode_frame, recv_with_fds, send_with_fds
from segue_core.messages.journal import Record
from segue_core.messages.local import Attach, ToDaemon
from segue_core.messages.peer import Bulk, Control


def test_a_frame_carries_its_descriptors() -> None:
    """Memory is handed over with the message that describes it."""
    left, right = socket.socketpair()
    with left, right:
        fd = os.memfd_create("x")
        os.write(fd, b"hello")
        send_with_fds(left, Attach(1, "a", 7), [fd])
        body, fds = recv_with_fds(right, peer="test")
        assert decode(body, ToDaemon, peer="test") == Attach(1, "a", 7)
        assert os.pread(fds[0], 5, 0) == b"hello"
        os.close(fd)
        os.close(fds[0])


def test_more_descriptors_than_fit_at_once_travel_in_order() -> None:
    """GPU memory in many physical allocations is handed over whole, to a receiver that allows as many."""
    left, right = socket.socketpair()
    with left, right:
        sent = [os.memfd_create(str(number)) for number in range(2 * MAX_FDS + 3)]
        try:
            for number, fd in enumerate(sent):
                os.ftruncate(fd, number)
            send_with_fds(left, Attach(1, "a", 7), sent)
            body, fds = recv_with_fds(right, peer="test", max_fds=len(sent))
            assert decode(body, ToDaemon, peer="test") == Attach(1, "a", 7)
            assert [os.fstat(fd).st_size for fd in fds] == list(range(len(sent)))
            close_fds(fds)
            send_with_fds(left, Attach(1, "a", 7), sent)
            with pytest.raises(ProtocolError, match="more than"):
                recv_with_fds(right, peer="test")
        finally:
            close_fds(sent)


@pytest.mark.parametrize("cut", [1, 4, 6])
def test_a_stream_that_ends_inside_a_frame_is_an_error(cut: int) -> None:
    """Half a message is never taken for a whole one."""
    left, right = socket.socketpair()
    with right:
        left.sendall(encode_frame(Attach(1, "a", 7))[:cut])
        left.close()
        with pytest.raises(ProtocolError, match="inside a frame"):
            recv_with_fds(right, peer="test")


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    """A liar cannot make memory grow."""
    left, right = socket.socketpair()
    with left, right:
        left.sendall(LENGTH.pack(2_000_000_000))
        with pytest.raises(ProtocolError, match="over the limit"):
            recv_with_fds(right, peer="test")


@given(st.binary(max_size=200), st.sampled_from([ToDaemon, Control, Bulk, Record]))
def test_garbage_is_a_protocol_error(junk: bytes, kind: object) -> None:
    """Whatever arrives is a typed message or an error that names the peer."""
    try:
        decode(junk, kind, peer="liar")
    except ProtocolError as error:
        assert "liar" in str(error)

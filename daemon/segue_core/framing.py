"""Frames on stream sockets: u32 length, then a msgpack message; on unix sockets also file descriptors.

Every read has a limit. A frame longer than the limit, cut short, or not decodable is a
`ProtocolError` that names the peer; the connection is then of no further use.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any

import msgspec

from segue_core.errors import ProtocolError

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
MAX_FDS = 64
"""In one frame, unless a receiver says otherwise; also what is sent at once, below what the kernel takes
(253)."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as a frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(payload: bytes | memoryview, kind: Any, *, peer: str) -> Any:
    """Decode and validate `payload` as `kind` (a Struct or a union of them)."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{peer}: not a valid message: {error}") from error


def send_with_fds(connection: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Send one frame on a blocking unix socket, the descriptors with its first byte."""
    frame = encode_frame(message)
    sent = 0
    while len(fds) - sent * MAX_FDS > MAX_FDS:  # more than fit at once: some with each of the first bytes
        some = fds[sent * MAX_FDS : (sent + 1) * MAX_FDS]
        socket.send_fds(connection, [frame[sent : sent + 1]], some)
        sent += 1
    if fds:
        sent += socket.send_fds(connection, [frame[sent:]], fds[sent * MAX_FDS :])
    if sent < len(frame):  # sending nothing would fail if the other side has answered and closed already
        connection.sendall(memoryview(frame)[sent:])


def recv_with_fds(
    connection: socket.socket, *, peer: str, limit: int = MAX_FRAME_BYTES, max_fds: int = MAX_FDS
) -> tuple[bytes, list[int]]:
    """Receive one frame and its descriptors from a blocking unix socket.

    Returns (b"", []) at a clean end of stream. The caller owns the descriptors. Raises ProtocolError
    if the frame is too long or cut short (descriptors received so far are closed).
    """
    fds: list[int] = []
    try:
        header = _recv_exactly(connection, LENGTH.size, fds, peer, max_fds)
        if not header:
            return b"", []
        (length,) = LENGTH.unpack(header)
        if length > limit:
            raise ProtocolError(f"{peer}: frame of {length} bytes is over the limit of {limit}")
        body = _recv_exactly(connection, length, fds, peer, max_fds)
        if len(body) != length:
            raise ProtocolError(f"{peer}: stream ended inside a frame")
    except BaseException:
        close_fds(fds)
        raise
    return body, fds


def close_fds(fds: list[int]) -> None:
    """Close every descriptor in `fds` and empty the list."""
    while fds:
        os.close(fds.pop())


def _recv_exactly(connection: socket.socket, count: int, fds: list[int], peer: str, max_fds: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        chunk, ancillary, flags, _ = connection.recvmsg(min(count - len(data), 1 << 20), space)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                fds.extend(received)
        if flags & socket.MSG_CTRUNC or len(fds) > max_fds:
            raise ProtocolError(
                f"{peer}: more than {max_fds} file descriptors in one frame, or than `ulimit -n` lets in"
            )
        if not chunk:
            if data:
                raise ProtocolError(f"{peer}: stream ended inside a frame")
            return b""
        data += chunk
    return bytes(data)

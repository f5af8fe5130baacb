"""An engine without a model for benchmarks: pages full of noise, a journal, and questions to a daemon.

Speaks the local channel as a worker and as a scheduler do, on blocking sockets. It writes what a step would
have written and says so; it never reuses or loads blocks. Invariant: KV of a token that was committed does
not change.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from array import array
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from segue_core.errors import ProtocolError
from segue_core.framing import close_fds, decode, recv_with_fds, send_with_fds
from segue_core.geometry import Geometry
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.messages.local import Attach, Match, Matched, Register, Registered, Release, ToEngine
from segue_core.ring import Ring, Word
from segue_core.shared_memory import read_only, seal_size, sealable_memory

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]
FINGERPRINT = b"benchmark engine"
DEADLINE_S = 30.0
T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


def packed(numbers: Iterable[int]) -> bytes:
    """Token or block ids as they travel."""
    return array("I", numbers).tobytes()


class Arena:
    """A daemon's replica memory as an engine sees it, and what the daemon says is in it."""

    def __init__(self, path: str, name: str, incarnation: int) -> None:
        """Attach to the daemon at `path` as the scheduler of an engine that is registered there."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(DEADLINE_S)
        self._connection.connect(path)
        send_with_fds(self._connection, Attach(PROTOCOL_VERSION, name, incarnation), [])
        reply, fds = _reply(self._connection, Registered)
        self._map = mmap.mmap(fds[0], reply.arena_bytes, prot=mmap.PROT_READ)
        close_fds(fds)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def match(self, seq: str, token_ids: bytes) -> tuple[int, list[int], int]:
        """(tokens held, arena offset of each block, lease to release) of a sequence."""
        tokens = len(token_ids) // 4
        question = Match(1, seq, 1, FINGERPRINT, b"", token_ids, 0, tokens)
        send_with_fds(self._connection, question, [])
        matched, _ = _reply(self._connection, Matched)
        return matched.tokens, list(array("Q", matched.extents)), matched.lease

    def release(self, lease: int) -> None:
        """The lease is over."""
        send_with_fds(self._connection, Release(lease, 0), [])

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


class BenchEngine:
    """Registers at `path`. `pages` are its KV memory as bytes, handle 0 of `geometry`."""

    def __init__(self, path: str, name: str, geometry: Geometry, *, ring_bytes: int = 64 << 20) -> None:
        self.geometry = geometry
        self.incarnation = secrets.randbits(62) | 1
        self.step = 0
        nbytes = geometry.handle_bytes[0]
        memory = sealable_memory("segue-bench-pages")
        os.ftruncate(memory, nbytes)
        self._map = mmap.mmap(memory, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.pages: Bytes = np.frombuffer(self._map, np.uint8)
        fill_with_noise(self.pages)
        self._noise = np.random.default_rng(11)
        self._journal = sealable_memory("segue-bench-journal")
        self._ring = Ring(self._journal, create=ring_bytes)
        seal_size(self._journal)
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lifeline = Lifeline()
        self._lifeline.hold()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(DEADLINE_S)
        self._connection.connect(path)
        pages = read_only(memory)
        register = Register(PROTOCOL_VERSION, name, self.incarnation, "noise", FINGERPRINT, geometry)
        fds = [self._journal, self._doorbell, self._lifeline.fd, pages]
        try:
            send_with_fds(self._connection, register, fds)
            close_fds(_reply(self._connection, Registered)[1])
        finally:
            close_fds([pages, memory])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(
        self,
        begun: Sequence[tuple[str, bytes, Sequence[int]]] = (),
        updated: Sequence[tuple[str, bytes, Sequence[int]]] = (),
        ended: Sequence[str] = (),
    ) -> None:
        """A step starts: (seq, token ids, blocks) of sequences that begin or gain some."""
        self.step += 1
        self._append(
            Begin(
                self.step,
                False,
                b"",
                tuple(SequenceBegin(seq, 1, b"", ids, packed(blocks), 0) for seq, ids, blocks in begun),
                tuple(SequenceUpdate(seq, ids, packed(blocks)) for seq, ids, blocks in updated),
                (),
                tuple(ended),
            )
        )
        self._ring.set(Word.STEP_BEGUN, self.step)

    def commit(self, computed: Iterable[tuple[str, int]]) -> None:
        """The step is complete: KV of so many tokens of each sequence is in the pages."""
        self._append(Commit(self.step, tuple(computed)))
        self._ring.set(Word.STEP_COMMITTED, self.step)

    def _append(self, record: Begin | Commit) -> None:
        if not self._ring.append(_encode(record)):
            raise ProtocolError("the journal is full: the daemon does not keep up")
        if self._ring.doorbell_wanted():
            with contextlib.suppress(BlockingIOError):  # the counter is full: it rings already
                os.eventfd_write(self._doorbell, 1)

    def items(self, block: int) -> Items:
        """A copy of a block's items of 2 bytes, in the order in which they travel."""
        return self._block(block).copy().reshape(-1)

    def write(self, block: int, where: Numbers) -> None:
        """New values for some items of a block."""
        values = self._noise.integers(0, 1 << 16, len(where), np.uint16)
        fragment, item = np.divmod(where, self._block(block).shape[1])
        self._block(block)[fragment, item] = values

    def _block(self, block: int) -> Items:
        """A block's items as (fragments, items of one), a view."""
        first = self.geometry.fragments[0]
        spacing = self.geometry.fragments[1].offset - first.offset
        return as_strided(
            self.pages[first.offset + block * first.block_stride :].view(np.uint16),
            shape=(len(self.geometry.fragments), first.nbytes // 2),
            strides=(spacing, 2),
        )

    def close(self) -> None:
        """Hang up in good order."""
        self._lifeline.let_go()
        self._connection.close()
        self._ring.close()
        close_fds([self._journal, self._doorbell])
        self.pages = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def fill_with_noise(memory: Bytes) -> None:
    """Bytes that no comparison and no page sharing can take for one another."""
    noise = np.random.default_rng(7)
    for at in range(0, len(memory), 1 << 24):
        piece = memory[at : at + (1 << 24)]
        piece[:] = np.frombuffer(noise.bytes(len(piece)), np.uint8)


def _reply(connection: socket.socket, kind: type[T]) -> tuple[T, list[int]]:
    while True:
        body, fds = recv_with_fds(connection, peer="segue-daemon")
        if not body:
            raise ProtocolError("segue-daemon hung up")
        message = decode(body, ToEngine, peer="segue-daemon")
        if isinstance(message, kind):
            return message, fds
        close_fds(fds)
        if getattr(message, "reason", ""):
            raise ProtocolError(f"segue-daemon: {message.reason}")

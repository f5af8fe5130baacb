"""The other end of the local channel, for tests: a real unix socket, real descriptors, no decisions.

`DaemonStub` registers engines and answers matches as the test says. `LedgerReader` reads a journal as a
daemon would and keeps what a daemon would then know.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from segue_core.framing import LENGTH, decode, encode_frame, recv_with_fds, send_with_fds
from segue_core.messages.journal import Begin, Commit, Record
from segue_core.messages.local import (
    Attach,
    Match,
    Matched,
    Refused,
    Register,
    Registered,
    Release,
    ToDaemon,
)
from segue_core.ring import Ring, Word
from support.waiting import wait_for

PEER = "engine under test"


def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    """The first true value of `condition`, which must come within the time."""
    return wait_for(condition, "what is waited for", timeout_s=timeout_s)


def ids(packed: bytes) -> list[int]:
    values = array("I")
    values.frombytes(packed)
    return values.tolist()


@dataclass
class KnownSequence:
    """What the daemon knows of one sequence."""

    epoch: int
    salt: bytes
    token_ids: list[int]
    block_ids: list[int]
    computed: int


@dataclass
class LedgerReader:
    """Applies records in order. `problems` collects what breaks the contract."""

    ring: Ring
    block_size: int = 32
    sequences: dict[str, KnownSequence] = field(default_factory=dict)
    records: list[Begin | Commit] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resets: int = 0

    def drain(self) -> list[Begin | Commit]:
        """Read all there is; returns the new records."""
        new: list[Begin | Commit] = []
        while (payload := self.ring.read()) is not None:
            record = decode(payload, Record, peer=PEER)
            new.append(record)
            (self._begin if isinstance(record, Begin) else self._commit)(record)
        self.records += new
        return new

    def _begin(self, record: Begin) -> None:
        if record.reset:
            self.resets += 1
            self.sequences.clear()
        for seq in (*record.ended, *record.paused):
            if seq not in self.sequences:
                self.problems.append(f"step {record.step}: {seq} ended or paused, but not known")
        for seq in record.ended:
            self.sequences.pop(seq, None)
        for seq in record.paused:
            if seq in self.sequences:
                self.sequences[seq].block_ids, self.sequences[seq].computed = [], 0
        for update in record.updated:
            known = self.sequences.get(update.seq)
            if known is None:
                self.problems.append(f"step {record.step}: {update.seq} updated, but not known")
                continue
            known.token_ids += ids(update.token_ids)
            known.block_ids += ids(update.block_ids)
        for begun in record.begun:
            self.sequences[begun.seq] = KnownSequence(
                begun.epoch, begun.salt, ids(begun.token_ids), ids(begun.block_ids), begun.computed
            )
        assigned = set(ids(record.assigned))
        for seq, known in self.sequences.items():
            full = known.block_ids[: known.computed // self.block_size]
            if assigned & set(full):
                self.problems.append(
                    f"step {record.step}: blocks of {seq} count as computed, but are assigned"
                )

    def _commit(self, record: Commit) -> None:
        for seq, computed in record.computed:
            known = self.sequences.get(seq)
            if known is None:
                self.problems.append(f"step {record.step}: {seq} committed, but not known")
            else:
                known.computed = computed


class Registration:
    """One engine as the daemon sees it: its message, its journal, its pages (read only)."""

    def __init__(self, message: Register, fds: list[int], connection: socket.socket) -> None:
        self.message = message
        self.connection = connection
        self.doorbell = fds[1]
        self.ring = Ring(fds[0])
        self.ledger = LedgerReader(self.ring, message.geometry.block_size)
        self.pages: list[mmap.mmap] = []
        for fd, nbytes in zip(fds[3:], message.geometry.handle_bytes, strict=True):
            self.pages.append(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
        self.fds = fds

    def block(self, number: int) -> bytes:
        """The bytes of one block, in geometry order."""
        return b"".join(
            self.pages[piece.handle][start : start + piece.nbytes]
            for piece in self.message.geometry.fragments
            for start in [piece.offset + number * piece.block_stride]
        )


class DaemonStub:
    """Serves one socket until `kill`. `answer` gives the reply to a match (None: stay silent)."""

    def __init__(
        self,
        path: str,
        *,
        arena_bytes: int = 1 << 20,
        announce_bytes: int | None = None,
        incarnation: int = 77,
        on_register: Callable[[Register], Any] | None = None,
        answer: Callable[[Match], Matched | bytes | None] | None = None,
    ) -> None:
        self.path = path
        self.incarnation = incarnation
        self.arena_fd = os.memfd_create("stub-arena")
        os.ftruncate(self.arena_fd, arena_bytes)
        self.arena = mmap.mmap(self.arena_fd, arena_bytes)
        self.arena_bytes = announce_bytes if announce_bytes is not None else arena_bytes
        self.on_register = on_register
        self.answer = answer
        self.registrations: list[Registration] = []
        self.attached: list[Attach] = []
        self.matches: list[Match] = []
        self.releases: list[Release] = []
        self.connections: list[socket.socket] = []
        self.accepted = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def registered(self, count: int = 1, timeout_s: float = 10.0) -> Registration:
        """The `count`-th registration."""
        wait_until(lambda: len(self.registrations) >= count, timeout_s)
        return self.registrations[count - 1]

    def kill(self) -> None:
        """Die: every connection breaks, the socket's file stays behind until it is bound anew."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while True:
                body, fds = recv_with_fds(connection, peer=PEER)
                if not body:
                    return
                message = decode(body, ToDaemon, peer=PEER)
                if isinstance(message, Register):
                    self._register(message, fds, connection)
                elif isinstance(message, Attach):
                    self.attached.append(message)
                    send_with_fds(connection, Registered(self.incarnation, self.arena_bytes), [self.arena_fd])
                elif isinstance(message, Match):
                    self.matches.append(message)
                    reply = self.answer(message) if self.answer is not None else None
                    if reply is not None:
                        connection.sendall(reply if isinstance(reply, bytes) else encode_frame(reply))
                else:
                    assert isinstance(message, Release)
                    self.releases.append(message)
        except OSError:
            return

    def _register(self, message: Register, fds: list[int], connection: socket.socket) -> None:
        reply = self.on_register(message) if self.on_register is not None else True
        if reply is None:
            return
        if isinstance(reply, bytes):
            connection.sendall(LENGTH.pack(len(reply)) + reply)
            return
        if isinstance(reply, Refused):
            connection.sendall(encode_frame(reply))
            return
        registration = Registration(message, fds, connection)
        registration.ring.set(Word.SLEEPING, 1)
        send_with_fds(connection, Registered(self.incarnation, self.arena_bytes), [self.arena_fd])
        self.registrations.append(registration)


def page_tensor(registration: Registration, handle: int, dtype: torch.dtype) -> torch.Tensor:
    """The engine's memory as the daemon maps it: it changes while the engine runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it cannot be written; it is not
        return torch.frombuffer(registration.pages[handle], dtype=dtype)

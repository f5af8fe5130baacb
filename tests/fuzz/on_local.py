"""The unix socket: frames with missing or too many descriptors, of the wrong kinds, sizes and seals.

Real: the daemon's local server, registration and matches. Afterwards no descriptor is left, whoever sent it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from fuzz.daemon_world import DaemonWorld
from fuzz.mutate import Mutator
from fuzz.target import Target, demand, open_files
from segue_core.framing import LENGTH, MAX_FDS
from segue_core.geometry import AXES, Geometry, Region
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import Attach, Match, Register, Release
from segue_core.ring import Ring
from segue_core.shared_memory import seal_size, sealable_memory

BLOCKS, SIZE = 8, 2
PAGES_BYTES = 512
GEOMETRY = Geometry(
    BLOCKS,
    SIZE,
    (PAGES_BYTES,),
    (Region(0, 0, (BLOCKS, SIZE, 16), (64, 32, 2), 2, ("block", "slot", "dim")),),
)
FINGERPRINT = b"f" * 16
ANSWER_S = 30.0
OPEN_FOR_OTHERS = 40
"""Descriptors that come and go: connections, maps of a registered engine, threads of lifelines."""


def memory(nbytes: int, *, sealed: bool = True) -> int:
    """A memory file."""
    fd = sealable_memory("fuzz")
    os.ftruncate(fd, nbytes)
    if sealed:
        seal_size(fd)
    return fd


def journal(*, sealed: bool = True) -> int:
    """An empty ring."""
    fd = sealable_memory("journal")
    Ring(fd, create=4096).close()
    if sealed:
        seal_size(fd)
    return fd


def a_pipe() -> int:
    """The reading end of a pipe that nobody writes to."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


KINDS: tuple[Callable[[], int], ...] = (
    journal,
    lambda: journal(sealed=False),
    lambda: memory(64),
    lambda: memory(1 << 20),
    lambda: memory(4096, sealed=False),
    lambda: memory(1 << 33),
    lambda: os.eventfd(0),
    lambda: os.eventfd(7),
    a_pipe,
    lambda: os.open("/dev/null", os.O_RDWR),
    lambda: os.open("/dev/zero", os.O_RDONLY),
    lambda: os.open("/", os.O_RDONLY),
    lambda: os.open(__file__, os.O_RDONLY),
    lambda: socket.socket(socket.AF_UNIX).detach(),
)


class LocalTarget(Target):
    """See the module."""

    name = "local"
    world_frames = 4_000

    def __init__(self, mutate: Mutator) -> None:
        super().__init__(mutate)
        self.registered = 0

    async def start(self) -> None:
        self.world = DaemonWorld()
        await self.world.start()
        self.lifeline = Lifeline()
        self.files = self.seen_files = open_files()

    async def feed(self) -> int:
        fds = self._descriptors()
        frames = [self._first(), *(self._later() for _ in range(self.rng.randrange(4)))]
        stream = b"".join(frames)
        if self.mutate.chance(0.1):
            stream = self.mutate.octets(stream)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.to_thread(self._talk, stream, fds)
        finally:
            for fd in fds:
                os.close(fd)
        self.registered += b"registered" in answer
        self.world.watch.check()
        return len(frames)

    def _talk(self, stream: bytes, fds: list[int]) -> bytes:
        """One connection, from its first byte to its end."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(self.world.folder / "s"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    sent = connection.sendmsg([stream or b"\0"], [rights])
                    connection.sendall(stream[sent:])
                else:
                    connection.sendall(stream)
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(1 << 16):
                    answer += piece
            return answer

    def _descriptors(self) -> list[int]:
        roll = self.rng.random()
        if roll < 0.2:
            return []
        right = [
            journal,
            lambda: os.eventfd(0),
            lambda: os.dup(self.lifeline.fd),
            lambda: memory(PAGES_BYTES),
        ]
        if roll < 0.6:
            return [make() for make in right]
        if roll < 0.85:
            right[self.rng.randrange(4)] = self.rng.choice(KINDS)
            return [make() for make in right]
        count = self.rng.choice((1, 2, 3, 5, 20, MAX_FDS, MAX_FDS + 1, 100))
        return [self.rng.choice(KINDS)() for _ in range(count)]

    def _first(self) -> bytes:
        roll = self.rng.random()
        if roll < 0.03:
            return LENGTH.pack(self.rng.choice((0, 1, (1 << 32) - 1, 1 << 26))) + b"x"
        if roll < 0.15:
            return framed(self.mutate.message(self._geometric()))
        if roll < 0.7:
            return framed(self.mutate.message(self._register(GEOMETRY)))
        if roll < 0.95:
            return framed(self.mutate.message(Attach(PROTOCOL_VERSION, "a", 1)))
        return self._later()

    def _register(self, geometry: Geometry) -> Register:
        return Register(
            PROTOCOL_VERSION,
            "a",
            self.rng.randrange(1, 3),
            "m",
            FINGERPRINT,
            geometry,
            {"t": 0.5},
            ("output",),
            "why",
        )

    def _geometric(self) -> Register:
        """A geometry that is nearly one."""
        rng = self.rng
        rank = rng.randrange(1, 9)
        sides = (1, 2, 3, 8, 16, 100, 1 << 10, 1 << 15, 1 << 20, (1 << 31) - 1)
        shape = [rng.choice(sides) for _ in range(rank)]
        at = rng.randrange(rank)
        axes = tuple("block" if i == at else rng.choice(AXES[2:]) for i in range(rank))
        strides = tuple(rng.choice((1, 1, 2, 2, 32, 64, 4096)) for _ in range(rank))
        region = Region(0, 0, tuple(shape), strides, rng.choice((1, 2, 4)), axes)
        return self._register(Geometry(shape[at], SIZE, (1 << 33,), (region,) * rng.choice((1, 1, 2, 200))))

    def _later(self) -> bytes:
        ids = self.rng.randbytes(4 * self.rng.randrange(40))
        seq = f"s{self.rng.randrange(4)}"
        match = Match(self.rng.randrange(99), seq, 1, FINGERPRINT, b"", ids, self.rng.randrange(4), 1000)
        return framed(self.mutate.message(self.rng.choice((match, match, Release(1, 1)))))

    def _open_files(self) -> int:
        """Looked at now and then: it is slow."""
        if self.mutate.chance(0.02):
            self.seen_files = open_files()
        return self.seen_files

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {
            "open files": (self._open_files(), self.files + OPEN_FOR_OTHERS),
            "connections": (len(self.world.daemon._local._tasks), 64),
        }

    def effects(self) -> dict[str, int]:
        return {"registrations": self.registered}

    async def stop(self) -> None:
        await self.world.stop()
        demand(not self.world.daemon.host.live, "an engine outlives its daemon")
        os.close(self.lifeline.fd)
        self.lifeline._map = None  # type: ignore[assignment]


def framed(body: bytes) -> bytes:
    """A frame of the local channel."""
    return LENGTH.pack(len(body)) + body

"""What `seguectl bench replicate` is compared with: memcpy, a bare socket pair, ZeroMQ.

Each method moves the same units from pages of the same layout to memory of the same size: gather,
transport, scatter, and nothing else: no header, no checksum, no decision. Sender and receiver are two
processes on a core each. Latency is from the send to a one-byte answer, one unit at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import zmq

from segue_core.errors import SegueError
from segue_ctl.bench_engine import Bytes, fill_with_noise
from segue_ctl.bench_replicate_shapes import Shape
from segue_ctl.free_ports import LOOPBACK

GATHER_BELOW = 16 << 10
"""Shorter pieces are copied together first (measured)."""
SOCKET_BUFFER_BYTES = 4 << 20
PACE_S = 0.004
ANSWER_S = 60.0


@dataclass(frozen=True)
class Timed:
    """What one method did with one shape."""

    gb_per_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_gb: float


class Units:
    """Pages from or to which units are moved in turn; a unit lies in equal pieces, equally far apart."""

    def __init__(self, shape: Shape) -> None:
        self.count, self.nbytes = shape.pieces
        self.unit_bytes = shape.unit_bytes
        self.units = max(1, shape.geometry.handle_bytes[0] // self.unit_bytes)
        size = self.count * self.units * self.nbytes
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        fill_with_noise(self.memory)
        self._pieces = self.memory.reshape(self.count, self.units, self.nbytes)
        self.staging = np.zeros(self.unit_bytes, np.uint8)

    def pieces(self, unit: int) -> list[memoryview]:
        """The pieces of a unit as buffers."""
        view, nbytes, apart = self.memory.data, self.nbytes, self.units * self.nbytes
        at = unit % self.units * nbytes
        return [view[start : start + nbytes] for start in range(at, at + self.count * apart, apart)]

    def gathered(self, unit: int) -> list[memoryview]:
        """A unit as buffers to send."""
        if self.nbytes >= GATHER_BELOW:
            return self.pieces(unit)
        np.copyto(self.staging.reshape(self.count, self.nbytes), self._pieces[:, unit % self.units])
        return [self.staging.data]

    def scatter(self, unit: int, data: Bytes) -> None:
        """Put a unit that arrived in one piece where it belongs."""
        np.copyto(self._pieces[:, unit % self.units], data.reshape(self.count, self.nbytes))

    def copy(self, unit: int, source: Units) -> None:
        """A unit from other memory."""
        np.copyto(self._pieces[:, unit % self.units], source._pieces[:, unit % self.units])


def memcpy(shape: Shape, total_bytes: int) -> Timed:
    """One thread that copies gathered pieces to scattered ones."""
    source, target = Units(shape), Units(shape)
    target.copy(0, source)
    times = []
    number = max(1, total_bytes // shape.unit_bytes)
    for unit in range(number):
        started = time.perf_counter_ns()
        target.copy(unit, source)
        times.append(time.perf_counter_ns() - started)
    seconds = sum(times) / 1e9
    rate = number * shape.unit_bytes / seconds / 1e9
    return Timed(rate, *_quantiles_us(times), 1 / rate)


def _quantiles_us(times_ns: list[int]) -> tuple[float, float]:
    ordered = sorted(times_ns)
    return ordered[len(ordered) // 2] / 1e3, ordered[int(len(ordered) * 0.99)] / 1e3


def pair(method: str, shape: Shape, total_bytes: int, samples: int) -> Timed:
    """`socket` or `zmq`: two processes, started afresh."""
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    number = max(8, total_bytes // shape.unit_bytes)
    ours, theirs = context.Pipe()
    reports = []
    processes = []
    for role, end in enumerate((ours, theirs)):
        source, sink = context.Pipe(duplex=False)
        reports.append(source)
        arguments = (_SIDES[method][role], cores[role % len(cores)], end, sink, shape, (number, samples))
        processes.append(context.Process(target=_side, args=arguments, daemon=True))
    try:
        for process in processes:
            process.start()
        told = [_report(source, method) for source in reports]
    finally:
        for process in processes:
            process.kill()
            process.join()
    moved = number * shape.unit_bytes
    sent, received = told
    cpu_s = sent.cpu_s + received.cpu_s
    return Timed(moved / sent.wall_s / 1e9, sent.p50_us, sent.p99_us, cpu_s / moved * 1e9)


def _report(source: Connection, method: str) -> Report:
    if not source.poll(ANSWER_S):
        raise SegueError(f"bench replicate: {method} did not end within {ANSWER_S:.0f} s")
    report: Report = source.recv()
    return report


@dataclass(frozen=True)
class Report:
    """What one side saw."""

    wall_s: float
    cpu_s: float
    p50_us: float = 0.0
    p99_us: float = 0.0


class Wire(Protocol):
    """One side's end of a transport."""

    def send(self, units: Units, unit: int) -> None:
        """Send one unit."""
        ...

    def receive(self, units: Units, unit: int) -> None:
        """Receive one unit to its place."""
        ...

    def answer(self) -> None:
        """Say that everything up to here has arrived."""
        ...

    def answered(self) -> None:
        """Wait for that."""
        ...


def _side(
    open_wire: Callable[[Connection], Wire],
    core: int,
    end: Connection,
    sink: Connection,
    shape: Shape,
    counts: tuple[int, int],
) -> None:
    os.sched_setaffinity(0, {core})
    units = Units(shape)
    wire = open_wire(end)
    work = _receive_all if open_wire in (_socket_receiver, _zmq_receiver) else _send_all
    sink.send(work(wire, units, *counts))


def _send_all(wire: Wire, units: Units, number: int, samples: int) -> Report:
    wire.answered()  # the other side is ready
    started, cpu = time.perf_counter(), time.process_time()
    for unit in range(number):
        wire.send(units, unit)
    wire.answered()
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    times = []
    for unit in range(samples):
        time.sleep(PACE_S)
        sent_ns = time.perf_counter_ns()
        wire.send(units, unit)
        wire.answered()
        times.append(time.perf_counter_ns() - sent_ns)
    return Report(wall_s, cpu_s, *_quantiles_us(times))


def _receive_all(wire: Wire, units: Units, number: int, samples: int) -> Report:
    wire.answer()
    cpu = time.process_time()
    for unit in range(number):
        wire.receive(units, unit)
    wire.answer()
    cpu_s = time.process_time() - cpu
    for unit in range(samples):
        wire.receive(units, unit)
        wire.answer()
    return Report(0.0, cpu_s)


class _Stream:
    """A TCP connection: scatter/gather where pieces are long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

    def send(self, units: Units, unit: int) -> None:
        buffers = units.gathered(unit)
        while buffers:
            _advance(buffers, self._connection.sendmsg(buffers))

    def receive(self, units: Units, unit: int) -> None:
        scattered = units.nbytes < GATHER_BELOW
        buffers = [units.staging.data] if scattered else units.pieces(unit)
        while buffers:
            count = self._connection.recvmsg_into(buffers)[0]
            if not count:
                raise EOFError("the sender ended")
            _advance(buffers, count)
        if scattered:
            units.scatter(unit, units.staging)

    def answer(self) -> None:
        self._connection.sendall(b"!")

    def answered(self) -> None:
        self._connection.recv(1)


def _advance(buffers: list[memoryview], count: int) -> None:
    """Take `count` bytes off the front."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


def _socket_receiver(end: Connection) -> Wire:
    with socket.create_server((LOOPBACK, 0)) as listener:
        end.send(listener.getsockname()[1])
        return _Stream(listener.accept()[0])


def _socket_sender(end: Connection) -> Wire:
    return _Stream(socket.create_connection((LOOPBACK, end.recv())))


class _Frames:
    """A ZeroMQ pair: each unit gathered into one frame, and scattered again."""

    def __init__(self, wire: zmq.Socket[bytes]) -> None:
        self._wire = wire

    def send(self, units: Units, unit: int) -> None:
        self._wire.send(b"".join(units.pieces(unit)), copy=False)

    def receive(self, units: Units, unit: int) -> None:
        frame = self._wire.recv(copy=False)
        units.scatter(unit, np.frombuffer(frame.buffer, np.uint8))

    def answer(self) -> None:
        self._wire.send(b"!")

    def answered(self) -> None:
        self._wire.recv()


def _zmq_receiver(end: Connection) -> Wire:
    wire = zmq.Context().socket(zmq.PAIR)
    end.send(wire.bind_to_random_port(f"tcp://{LOOPBACK}"))
    return _Frames(wire)


def _zmq_sender(end: Connection) -> Wire:
    wire = zmq.Context().socket(zmq.PAIR)
    wire.sndhwm = 8
    wire.connect(f"tcp://{LOOPBACK}:{end.recv()}")
    return _Frames(wire)


_SIDES = {"socket": (_socket_sender, _socket_receiver), "zmq": (_zmq_sender, _zmq_receiver)}

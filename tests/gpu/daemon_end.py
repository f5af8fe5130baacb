"""A daemon's GPU side, run in a child: maps what the engine's end shares, compares, and measures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from gpu.shapes import AT_ONCE, LOADED_SEED, SEED, TAILS_AT_ONCE, Shape
from segue_core.geometry import Geometry
from segue_daemon.cuda.pages import CudaPages
from segue_daemon.cuda.tier_memory import TierMemory
from segue_daemon.pages import Piece
from support.cuda_process import WithDescriptors

RELEASE_S = 20.0
state: dict[str, Any] = {}


def open_exported(encoded: bytes, descriptors: list[int] | None = None) -> float:
    """Map it as at a registration; milliseconds."""
    geometry = msgspec.msgpack.decode(encoded, type=Geometry).validate()
    begun_ns = time.monotonic_ns()
    try:
        state["pages"] = CudaPages(geometry, descriptors or [])
    finally:
        for fd in descriptors or []:
            os.close(fd)
    return (time.monotonic_ns() - begun_ns) / 1e6


def compare(slots: int, slot_bytes: int, blocks: int) -> bool:
    """Whether every block is what the engine's end wrote."""
    shape, pages = Shape(slots, slot_bytes, blocks), state["pages"]
    out = pages.buffer(AT_ONCE * shape.block_bytes)
    for first in range(0, blocks, AT_ONCE):
        some = list(range(first, min(blocks, first + AT_ONCE)))
        done = list(pages.copy_blocks(some, out[: len(some) * shape.block_bytes]))
        assert done[-1] == len(some)
        for at, number in enumerate(some):
            found = out[at * shape.block_bytes : (at + 1) * shape.block_bytes]
            if not np.array_equal(found, shape.block(number, SEED).reshape(-1)):
                return False
    return True


def compare_tails(slots: int, slot_bytes: int, blocks: int) -> bool:
    """Whether single slots are what the engine's end wrote, copied together and one by one."""
    shape, pages = Shape(slots, slot_bytes, blocks), state["pages"]
    nbytes = shape.block_bytes // slots
    many = range(min(blocks, TAILS_AT_ONCE))
    together, alone = pages.buffer(2 * nbytes * len(many)), np.empty(nbytes, np.uint8)
    tails = _tails(many, [number % slots for number in many], 2 * nbytes, together)
    assert list(pages.copy_pieces(tails))[-1] == len(many)
    for number, tail in zip(many, tails, strict=True):
        first, last = tail.slots
        assert pages.copy_slots(number, first, last, alone) == nbytes
        expected = shape.block(number, SEED)[:, first].reshape(-1)
        if not all(np.array_equal(found[:nbytes], expected) for found in (tail.out, alone)):
            return False
    return True


def _tails(blocks: Iterable[int], slots: Iterable[int], apart: int, room: Any) -> list[Any]:
    """A slot of each block, each tail so many bytes behind the one before it."""
    places = enumerate(zip(blocks, slots, strict=True))
    return [Piece(block, room[n * apart :], (slot, slot + 1)) for n, (block, slot) in places]


def gather_blocks(seconds: float) -> dict[str, float]:
    """Copy deltas of several blocks for a while."""
    pages = state["pages"]
    geometry = pages.geometry
    out = pages.buffer(AT_ONCE * geometry.block_bytes)

    def delta(number: int) -> None:
        first = number * AT_ONCE % (geometry.num_blocks - AT_ONCE + 1)
        for _ in pages.copy_blocks(range(first, first + AT_ONCE), out):
            continue

    return _repeat(delta, AT_ONCE * geometry.block_bytes, seconds)


def gather_tails(seconds: float, at_once: int) -> dict[str, float]:
    """Copy single slots for a while, so many together, as each step of decoding makes them."""
    pages = state["pages"]
    nbytes = pages.geometry.block_bytes // pages.geometry.block_size
    out = pages.buffer(at_once * nbytes)
    return _repeat(lambda number: _gather_tails(number, number, at_once, out), at_once * nbytes, seconds)


def _gather_tails(first: int, step: int, many: int, out: Any) -> None:
    pages, geometry = state["pages"], state["pages"].geometry
    blocks = [(first + number) % geometry.num_blocks for number in range(many)]
    apart = geometry.block_bytes // geometry.block_size
    for _ in pages.copy_pieces(_tails(blocks, [step % geometry.block_size] * many, apart, out)):
        continue


def _repeat(copy: Any, nbytes: int, seconds: float) -> dict[str, float]:
    """{gb_per_s, p50_us, p99_us} of `copy(number)`, which copies `nbytes`."""
    copy(0)
    taken_ns: list[int] = []
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    while (now_ns := time.monotonic_ns()) < end_ns or not taken_ns:
        copy(len(taken_ns))
        taken_ns.append(time.monotonic_ns() - now_ns)
    p50, p99 = np.percentile(taken_ns, (50, 99)) / 1e3
    return {
        "gb_per_s": len(taken_ns) * nbytes / max(1, sum(taken_ns)),
        "p50_us": float(p50),
        "p99_us": float(p99),
    }


def replicate(seconds: float, tails_a_step: int, step_ms: float) -> dict[str, float]:
    """What a daemon copies beside an engine that decodes: some tails each step, in time with it."""
    pages = state["pages"]
    geometry = pages.geometry
    nbytes = geometry.block_bytes // geometry.block_size
    out = pages.buffer(TAILS_AT_ONCE * nbytes)
    begun_ns = time.monotonic_ns()
    step = late = 0
    while (due_ns := begun_ns + int(step * step_ms * 1e6)) < begun_ns + seconds * 1e9:
        left_ns = due_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        else:
            late += step > 0
        for number in range(0, tails_a_step, TAILS_AT_ONCE):
            _gather_tails(number + step, step, min(TAILS_AT_ONCE, tails_a_step - number), out)
        step += 1
    taken_s = (time.monotonic_ns() - begun_ns) / 1e9
    return {"gb_per_s": step * tails_a_step * nbytes / taken_s / 1e9, "steps": step, "late_steps": late}


def fill_tier(slots: int, slot_bytes: int, blocks: int) -> WithDescriptors:
    """Copy blocks of this shape to GPU memory of this process: [its bytes, GB/s of filling it], and its
    descriptor."""
    shape = Shape(slots, slot_bytes, blocks)
    geometry, nbytes = state["pages"].geometry, shape.block_bytes
    tier = state["tier"] = TierMemory(geometry.gpu, blocks * nbytes, AT_ONCE * nbytes)
    taken_ns = 0
    for first in range(0, blocks, AT_ONCE):
        some = range(first, min(blocks, first + AT_ONCE))
        for at, number in enumerate(some):
            tier.room[at * nbytes : (at + 1) * nbytes] = shape.block(number, LOADED_SEED).reshape(-1)
        begun_ns = time.monotonic_ns()
        tier.put([number * nbytes for number in some], nbytes)
        taken_ns += time.monotonic_ns() - begun_ns
    return WithDescriptors([tier.nbytes, blocks * nbytes / max(1, taken_ns)], [os.dup(tier.fd)])


def close_tier() -> bool:
    """Let it go, and wait until it is gone."""
    tier = state.pop("tier")
    tier.close()
    return bool(tier.released.wait(RELEASE_S))


def close() -> bool:
    """Let the memory go, and wait until it is gone."""
    pages = state.pop("pages")
    pages.close()
    return bool(pages.released.wait(RELEASE_S))

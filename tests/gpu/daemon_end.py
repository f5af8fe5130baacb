"""A daemon's GPU side, run in a child: maps what the engine's end shares, compares, and measures."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import numpy as np

from gpu.shapes import AT_ONCE, LOADED_SEED, SEED, Shape
from segue_core.geometry import Geometry
from segue_daemon.cuda.pages import CudaPages
from segue_daemon.cuda.tier_memory import TierMemory
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
    """Whether single slots are what the engine's end wrote."""
    shape, pages = Shape(slots, slot_bytes, blocks), state["pages"]
    for number in range(min(blocks, 16)):
        slot = number % slots
        out = np.empty(shape.block_bytes // slots, np.uint8)
        assert pages.copy_slots(number, slot, slot + 1, out) == out.nbytes
        if not np.array_equal(out, shape.block(number, SEED)[:, slot].reshape(-1)):
            return False
    return True


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


def gather_tails(seconds: float) -> dict[str, float]:
    """Copy single slots for a while, as each step of decoding makes them."""
    pages = state["pages"]
    geometry = pages.geometry
    nbytes = geometry.block_bytes // geometry.block_size
    out = pages.buffer(nbytes)

    def tail(number: int) -> None:
        slot = number % geometry.block_size
        pages.copy_slots(number % geometry.num_blocks, slot, slot + 1, out)

    return _repeat(tail, nbytes, seconds)


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
    out = pages.buffer(nbytes)
    begun_ns = time.monotonic_ns()
    step = late = 0
    while (due_ns := begun_ns + int(step * step_ms * 1e6)) < begun_ns + seconds * 1e9:
        left_ns = due_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        else:
            late += step > 0
        for number in range(tails_a_step):
            slot = step % geometry.block_size
            pages.copy_slots((number + step) % geometry.num_blocks, slot, slot + 1, out)
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

"""The daemon's side of the error grid, run in a child with the driver's double: an engine's GPU memory is
opened, copied and closed, and so is a tier of copies, while a call fails; each time in a process of its
own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from conformance.pages_engine import BLOCKS, content
from segue_core.geometry import Geometry
from segue_daemon.cuda import pages as cuda_pages
from segue_daemon.cuda import tier_memory
from segue_daemon.cuda.driver import load
from segue_daemon.open_pages import open_pages
from segue_daemon.pages import Pages, PagesError
from support.cuda_double import Control
from support.cuda_held import SETTLED_S, held, left_behind
from support.forked import forked

engines: dict[str, tuple[Geometry, list[int]]] = {}
BLOCK, SLOTS = 3, (1, 3)
HANG_S = 0.1
SHUT_DOWN = 4
TIER_BYTES, TIER_OFFSETS = 1 << 20, (1 << 19, 0)
cuda_pages.CHUNK_BYTES = 1  # several chunks, and so events, for these few blocks


def keep(name: str, encoded: bytes, descriptors: list[int] | None = None) -> None:
    """What an engine exported, for all trials."""
    engines[name] = msgspec.msgpack.decode(encoded, type=Geometry).validate(), descriptors or []


def calls(name: str, entry_points: list[str]) -> dict[str, int]:
    """How often each entry point is called while nothing fails, from the driver's first call on."""

    def count() -> dict[str, int]:
        error, right = life(name)
        assert right, error
        return {entry: Control().calls(entry) for entry in entry_points}

    found: dict[str, int] = forked(count)
    return found


def trial(name: str, failures: list[str], beside: str | None) -> list[dict[str, Any]]:
    """Lives of one engine, with each of `failures`, then with none. `beside`: an engine on another GPU that
    was there before. [what became of each]."""
    results: list[dict[str, Any]] = forked(_trial, name, failures, beside)
    return results


def _trial(name: str, failures: list[str], beside: str | None) -> list[dict[str, Any]]:
    other = open_pages(*engines[beside]) if beside else None
    before = held()
    results: list[dict[str, Any]] = []
    shut_down = False
    for failing in (*failures, ""):
        hangs = failing.endswith(":hang")
        shut_down |= failing.endswith(f":{SHUT_DOWN}")
        with hasty() if hangs else contextlib.nullcontext():
            Control().fail(failing)
            error, right = life(name, waiting=not hangs)
            Control().fail("")
        # Once the driver is shut down nothing can be given back.
        left = {} if shut_down else left_behind(before)
        results.append(
            {"error": error, "right": right, "left": left, "other": other is None or goes_on(other)}
        )
    if other is not None:
        other.close()
    return results


@contextlib.contextmanager
def hasty() -> Iterator[None]:
    """Short deadlines."""
    of_pages = cuda_pages.CudaPages.__init__.__kwdefaults__
    of_tier = tier_memory.TierMemory.__init__.__kwdefaults__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(of_pages, "open_timeout_s", HANG_S)
        patch.setitem(of_pages, "copy_timeout_s", HANG_S)
        patch.setitem(of_tier, "timeout_s", HANG_S)
        patch.setattr(cuda_pages, "PIN_TIMEOUT_S", HANG_S)
        patch.setattr(tier_memory, "PUT_TIMEOUT_S", HANG_S)
        yield


def goes_on(pages: Pages) -> bool:
    """Whether they can still be read."""
    try:
        return copied(pages) == content()[:, BLOCK].tobytes()
    except PagesError:
        return False


def life(name: str, waiting: bool = True) -> tuple[str, bool]:
    """Open, copy and close as a daemon does: (what the engine is told if that fails, whether all bytes were
    right)."""
    try:
        pages = open_pages(*engines[name])
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    try:
        wanted = content()
        right = copied(pages) == wanted[:, BLOCK].tobytes()
        whole = pages.buffer(BLOCKS * pages.geometry.block_bytes)
        for _ in pages.copy_blocks(range(BLOCKS), whole):
            pass
        right &= whole.tobytes() == wanted.swapaxes(0, 1).tobytes()
        slots = np.empty(pages.geometry.block_bytes, np.uint8)
        nbytes = pages.copy_slots(BLOCK, *SLOTS, slots)
        right &= slots[:nbytes].tobytes() == wanted[:, BLOCK, SLOTS[0] : SLOTS[1]].tobytes()
        return "", right and tier_holds_what_is_put(pages, waiting)
    except Exception as error:
        return f"{type(error).__name__}: {error} | {pages.failure}", False
    finally:
        pages.close()
        if waiting:
            assert isinstance(pages, cuda_pages.CudaPages)
            assert pages.released.wait(SETTLED_S)


def tier_holds_what_is_put(pages: Pages, waiting: bool) -> bool:
    """Put two blocks in a tier of copies, and read them back."""
    nbytes = pages.geometry.block_bytes
    tier = tier_memory.TierMemory(pages.geometry.gpu, TIER_BYTES, 2 * nbytes)
    try:
        put = np.random.default_rng(5).integers(0, 256, 2 * nbytes, dtype=np.uint8)
        tier.room[:] = put
        tier.put(TIER_OFFSETS, nbytes)
        tier.room[:] = 0
        sources = [tier._start + offset for offset in TIER_OFFSETS]

        def read() -> None:
            targets = [tier._room_at, tier._room_at + nbytes]
            load().gather(targets, sources, [nbytes] * 2, tier._stream)
            load().synchronize(tier._stream)

        tier._thread.run("read", read, HANG_S)
        return bool((tier.room == put).all()) and os.fstat(tier.fd).st_size >= TIER_BYTES
    finally:
        tier.close()
        assert not waiting or tier.released.wait(SETTLED_S)


def copied(pages: Pages) -> bytes:
    """A block's bytes."""
    out = np.empty(pages.geometry.block_bytes, np.uint8)
    pages.copy_block(BLOCK, out)
    return out.tobytes()


def close_all() -> None:
    """The descriptors of all engines."""
    for _, fds in engines.values():
        for fd in fds:
            os.close(fd)
    engines.clear()

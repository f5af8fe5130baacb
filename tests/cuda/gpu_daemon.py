"""A daemon's GPU side, run in a child with the driver's double: several mappings, sessions, injected
trouble."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from conformance.pages_engine import content
from segue_core.clock import MonotonicClock
from segue_core.geometry import Geometry
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.local import Register
from segue_core.messages.peer import Delta, PartKind
from segue_daemon.bucket import Bucket, SharedBudget, Throttle
from segue_daemon.cuda import driver
from segue_daemon.cuda.pages import CudaPages
from segue_daemon.deltas import ENTRY_BYTES
from segue_daemon.engine import EngineSession
from segue_daemon.kept import OwnKeep
from segue_daemon.ledger import Ledger
from segue_daemon.open_pages import open_pages
from segue_daemon.outbox import Outbox
from segue_daemon.settings import ReplicationSettings
from segue_daemon.shipment import Shipment
from segue_daemon.store import ReplicaStore
from segue_shim.plan import pack_u32
from support.cuda_double import Control
from support.waiting import last_of

opened: dict[str, CudaPages] = {}
state: dict[str, Any] = {}


def open_as(name: str, encoded: bytes, timeout_s: float = 20.0, descriptors: list[int] | None = None) -> None:
    """Map what an engine exported, under a name."""
    geometry = msgspec.msgpack.decode(encoded, type=Geometry).validate()
    try:
        opened[name] = CudaPages(geometry, descriptors or [], copy_timeout_s=timeout_s)
    finally:
        close_all(descriptors)


def refusal(encoded: bytes, descriptors: list[int] | None = None) -> str:
    """What the engine is told that cannot be mapped."""
    geometry = msgspec.msgpack.decode(encoded, type=Geometry).validate()
    try:
        open_pages(geometry, descriptors or []).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close_all(descriptors)
    return "none"


def close_all(descriptors: list[int] | None) -> None:
    """They are the caller's."""
    for fd in descriptors or []:
        os.close(fd)


def copy(name: str, block: int) -> bytes:
    """A block's bytes."""
    out = np.empty(opened[name].geometry.block_bytes, np.uint8)
    opened[name].copy_block(block, out)
    return out.tobytes()


def failing_copy(name: str, block: int) -> list[str]:
    """[what a copy raises, what the pages say of themselves]."""
    try:
        copy(name, block)
    except Exception as error:
        return [type(error).__name__, opened[name].failure]
    return ["none", opened[name].failure]


def copy_many(name: str, blocks: list[int]) -> list[Any]:
    """Copy blocks to page-locked memory: [how many are said to be complete, digest of those, what is raised,
    what the pages say of themselves]."""
    pages, complete, error = opened[name], 0, ""
    room = np.empty(0, np.uint8)
    try:
        room = pages.buffer(len(blocks) * pages.geometry.block_bytes)
        for now in pages.copy_blocks(blocks, room):
            complete = now
    except Exception as raised:
        error = type(raised).__name__
    found = room[: complete * pages.geometry.block_bytes]
    return [complete, hashlib.blake2b(found).hexdigest(), error, pages.failure]


def copy_to_ordinary_memory(name: str, blocks: list[int]) -> list[Any]:
    """Copy blocks to memory that is not page-locked: [how many are said to be complete, what is raised]."""
    pages, complete = opened[name], 0
    room = np.empty(len(blocks) * pages.geometry.block_bytes, np.uint8)
    try:
        for now in pages.copy_blocks(blocks, room):
            complete = now
    except Exception as raised:
        return [complete, type(raised).__name__]
    return [complete, ""]


def close_midway(name: str, blocks: list[int]) -> list[Any]:
    """Let the memory go between two results of a copy of blocks: [how many there were by then, what the next
    one raises, what the pages say of themselves]."""
    pages = opened[name]
    copies = pages.copy_blocks(blocks, np.empty(len(blocks) * pages.geometry.block_bytes, np.uint8))
    complete = next(copies)
    pages.close()
    try:
        next(copies)
    except Exception as raised:
        return [complete, type(raised).__name__, pages.failure]
    return [complete, "", pages.failure]


def copy_in_small_batches(name: str, blocks: list[int], most: int) -> list[Any]:
    """The same with at most so many pieces in one call of the driver; and how many such calls that took."""
    before, usual = Control().calls("cuMemcpyBatchAsync"), driver.BATCH_COPIES
    driver.BATCH_COPIES = most
    try:
        return [*copy_many(name, blocks), Control().calls("cuMemcpyBatchAsync") - before]
    finally:
        driver.BATCH_COPIES = usual


def leave_early(name: str, blocks: list[int]) -> list[Any]:
    """Stop taking results after the first: [how many blocks there were by then, whether the buffer stays as
    it is afterwards]."""
    pages = opened[name]
    room = pages.buffer(len(blocks) * pages.geometry.block_bytes)
    copies = pages.copy_blocks(blocks, room)
    complete = next(copies)
    copies.close()
    room[:] = 0xA5
    copy(name, 0)  # behind whatever is still queued
    return [complete, bool((room == 0xA5).all())]


def leave_stuck(name: str, blocks: list[int]) -> list[Any]:
    """Stop taking results of a copy that does not come to its end: [how many blocks there were by then, what
    is raised, what the pages say of themselves]."""
    pages = opened[name]
    room = pages.buffer(len(blocks) * pages.geometry.block_bytes)
    copies = pages.copy_blocks(blocks, room)
    complete = next(copies)
    try:
        copies.close()
    except Exception as raised:
        return [complete, type(raised).__name__, pages.failure]
    return [complete, "", pages.failure]


def left_behind(name: str) -> int:
    """Let go of the pages, and later of a buffer: how many of those and the page-locked buffers are still
    there."""
    pages = opened.pop(name)
    buffer = pages.buffer(8192)
    assert pages._device is not None
    whatever = [weakref.ref(pages), *map(weakref.ref, pages._device.buffers)]
    pages.close()
    assert pages.released.wait(20)
    del pages, buffer

    def left() -> int:
        gc.collect()
        return sum(gone() is not None for gone in whatever)

    return last_of(left, lambda count: not count)


def ship_tails(name: str, timeout_s: float = 20.0) -> dict[str, Any]:
    """Decode one token of a sequence in each block, and take what a link would: how many deltas came
    together, what of them the engine has like that, the driver's calls for it, what the pages say then."""
    pages = opened[name]
    geometry = pages.geometry
    blocks = range(geometry.num_blocks)
    ledger = Ledger(geometry, b"f" * 16, max_sequences=len(blocks))
    ids = pack_u32(range(geometry.block_size))
    begun = tuple(SequenceBegin(f"s{n}", 1, b"", ids, pack_u32([n]), 0) for n in blocks)
    ledger.apply(Begin(1, False, pack_u32(blocks), begun, (), (), ()))
    session: Any = SimpleNamespace(pages=pages, ledger=ledger, incarnation=1, dead=False)
    shipment = Shipment(session, ReplicationSettings(shadow_bytes=0), 1 << 20, lambda _: True)
    outbox = Outbox(Throttle("b", Bucket(0), SharedBudget(0)))
    outbox.opened(64 << 20)
    outbox.shipments[1] = shipment
    counted = ("cuMemcpyBatchAsync", "cuStreamSynchronize", "cuEventSynchronize")
    before, found = [0, 0, 0], []
    for tokens in (1, 2):
        shipment.note(ledger.apply(Commit(tokens, tuple((start.seq, tokens) for start in begun))))
        before, found = [Control().calls(call) for call in counted], []
        while isinstance(ready := outbox.next_deltas(lambda: None, 0), list):
            found.append([is_right(delta, payload) for delta, payload in ready])
        pages._copy_timeout_s = timeout_s
    made = [Control().calls(call) - n for call, n in zip(counted, before, strict=True)]
    return {"right": found, "calls": made, "failure": pages.failure}


def is_right(delta: Delta, payload: memoryview) -> bool:
    """Whether this is the second token of a sequence, or its whole block, as `content` has it."""
    (part,) = delta.parts
    block, data = int(delta.seq[1:]), bytes(payload)
    if part.kind == PartKind.WHOLE:
        return data == content()[:, block].tobytes()
    return data[ENTRY_BYTES * part.count :] == content()[:, block, 1].tobytes()


def keep(name: str, at_once: int) -> dict[str, Any]:
    """Keep what a dead engine left, a sequence in all blocks, so many of them in a slice: tokens, whether
    they are right, and the driver's copies for it."""
    pages = opened[name]
    geometry = pages.geometry
    table = pack_u32(range(geometry.num_blocks))
    tokens = geometry.num_blocks * geometry.block_size
    ledger = Ledger(geometry, b"f" * 16, max_sequences=1)
    start = SequenceBegin("s", 1, b"", pack_u32(range(tokens)), table, 0)
    ledger.apply(Begin(1, False, table, (start,), (), (), ()))
    ledger.apply(Commit(1, (("s", tokens),)))
    memory = np.zeros(geometry.num_blocks * geometry.block_bytes, np.uint8)
    store = ReplicaStore(memory, lease_ns=1)
    own = OwnKeep(store, ttl_ns=1, slice_bytes=at_once * geometry.block_bytes)
    session: Any = SimpleNamespace(ledger=ledger, pages=pages, incarnation=1, scan=None, closed=False)
    before = Control().calls("cuMemcpyBatchAsync")
    for _ in own.slices(session, lambda _: False, lambda: 1):
        pass
    replica = store.replicas.get("s")
    held = replica.blocks if replica is not None else []
    right = [
        memory[block.offset :][: block.nbytes].tobytes() == content()[:, position].tobytes()
        for position, block in enumerate(held)
    ]
    return {
        "tokens": replica.watermark if replica is not None else 0,
        "right": all(right),
        "used": store.used_bytes // geometry.block_bytes,
        "copies": Control().calls("cuMemcpyBatchAsync") - before,
    }


def close(name: str) -> None:
    """Without waiting."""
    opened[name].close()


def released(name: str) -> bool:
    """Wait until the engine's memory is let go."""
    return opened.pop(name).released.wait(20)


def fail(failures: str) -> None:
    """Inject errors."""
    Control().fail(failures)


def fail_next(call: str, code: int) -> None:
    """The next call of this entry point fails."""
    Control().fail(f"{call}:1:{code}")


def hold(after_bytes: int = 0) -> None:
    """The GPU stands still, once it has copied so much."""
    Control().hold(after_bytes)


def let_go() -> None:
    """And goes on."""
    Control().let_go()


def calls(entry_point: str) -> int:
    """How often it was called."""
    return Control().calls(entry_point)


def locked_buffers(name: str) -> int:
    """How many page-locked buffers are in use once a hundred more were used and forgotten."""
    for _ in range(100):
        opened[name].buffer(8192)[:] = 1
    opened[name].copy_block(0, opened[name].buffer(opened[name].geometry.block_bytes))
    return Control().count("registrations")


def settled(expected: dict[str, int]) -> dict[str, int]:
    """What is held, once it is what is expected, or after some seconds: memory is let go without being
    waited for."""
    return last_of(lambda: Control().counts(), lambda found: found == expected)


def register(encoded: bytes, descriptors: list[int]) -> None:
    """Take an engine in."""
    message = msgspec.msgpack.decode(encoded, type=Register)
    state["session"] = EngineSession(message, descriptors, os.getpid(), MonotonicClock(), max_sequences=8)


def drained() -> list[Any]:
    """Apply the journal: [tokens that may be shipped of each sequence, whether steps are awaited]."""
    session: EngineSession = state["session"]
    session.drain()
    found = {seq: sequence.shippable for seq, sequence in session.ledger.sequences.items()}
    return [found, session.awaiting]


def drained_until(seq: str, tokens: int) -> bool:
    """Apply the journal until so much may be shipped."""
    return last_of(lambda: drained()[0].get(seq) == tokens, bool)


def session_block(block: int) -> bytes:
    """A block out of the session's pages."""
    pages = state["session"].pages
    out = np.empty(pages.geometry.block_bytes, np.uint8)
    pages.copy_block(block, out)
    return out.tobytes()


def session_blocks(blocks: list[int]) -> str:
    """A digest of blocks out of the session's pages."""
    pages = state["session"].pages
    out = pages.buffer(len(blocks) * pages.geometry.block_bytes)
    for _ in pages.copy_blocks(blocks, out):
        pass
    return hashlib.blake2b(out).hexdigest()


def close_session() -> bool:
    """The engine is gone: let all of it go."""
    session = state.pop("session")
    session.close()
    released: bool = session.pages.released.wait(20)
    return released

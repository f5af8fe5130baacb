"""An engine on the driver's double, run in a child: exports like the pages suite's, and runs steps and
loads."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from typing import Any

import msgspec
import numpy as np

from conformance import pages_engine
from conformance.pages_engine import BLOCK_SIZE, LAYER_BYTES, LAYERS, STRIDES, state
from segue_core.lifeline import Lifeline
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.local import Register
from segue_core.ring import Ring
from segue_core.shared_memory import seal_size, sealable_memory
from segue_shim.plan import pack_u32
from support.cuda_double import Control
from support.cuda_process import WithDescriptors
from support.cuda_sleep import end, exchange, idle_until_registered, may_sleep, sleep, wake_up

__all__ = ["end", "exchange", "idle_until_registered", "may_sleep", "sleep", "wake_up"]

LENGTHS = {"s": 2}
"""Blocks of the sequence that `begin` announces."""


def export(kind: str) -> WithDescriptors:
    """See the pages suite."""
    return pages_engine.export(kind)


def refusal(kind: str) -> str:
    """Why memory of this kind is not exported."""
    try:
        pages_engine.export(kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def register(kind: str) -> WithDescriptors:
    """Everything that an engine registers with: the message and its descriptors."""
    geometry, memory = pages_engine.on_gpu(kind)
    ring = sealable_memory("journal")
    state["ring"] = Ring(ring, create=1 << 16)
    seal_size(ring)
    lifeline = state["lifeline"] = Lifeline()
    message = Register(PROTOCOL_VERSION, "a", 1, "m", b"f" * 16, geometry, timeline=True)
    timeline = state["side"].timeline_fd
    own = [ring, os.eventfd(0), os.dup(lifeline.fd), os.dup(timeline)]
    return WithDescriptors(msgspec.msgpack.encode(message), [*own, *memory])


def begin(step: int, computed: int) -> None:
    """Say that `step` begins with a sequence in two blocks, of which `computed` slots were computed
    before."""
    blocks = pack_u32(range(LENGTHS["s"]))
    ids = pack_u32(range(LENGTHS["s"] * BLOCK_SIZE))
    start = SequenceBegin("s", 1, b"", ids, blocks, computed)
    write(Begin(step, False, blocks, (start,), (), (), ()))


def commit(step: int, computed: int) -> None:
    """All kernels of `step` are queued; then the journal says so."""
    state["side"].mark(step)
    write(Commit(step, (("s", computed),)))


def write(record: Begin | Commit) -> None:
    """One journal record."""
    assert state["ring"].append(msgspec.msgpack.encode(record))


def rewrite(blocks: list[int], byte: int) -> None:
    """Queue a step's kernels: they fill these blocks with one byte."""
    from cuda.bindings import driver

    for number in blocks:
        for layer in range(LAYERS):
            at = state["start"] + layer * LAYER_BYTES + number * STRIDES[0]
            pages_engine.checked(driver.cuMemsetD8Async(at, byte, STRIDES[0], state["stream"]))


def hold(after_bytes: int = 0) -> None:
    """The GPU stands still, once it has written so much: what is queued stays queued."""
    Control().hold(after_bytes)


def let_go() -> None:
    """And goes on."""
    Control().let_go()
    state["cuda"].synchronize(state["stream"])


class PlainArena:
    """The replica arena as the loader knows it, mapped read only and without torch."""

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        fd = os.memfd_create("arena")
        os.write(fd, content)
        self._map = np.frombuffer(mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ), np.uint8)
        os.close(fd)
        self.address = int(self._map.ctypes.data)
        self.unlock: Any = None

    @property
    def locked(self) -> bool:
        return self.unlock is not None

    def lock(self, unlock: Any) -> None:
        self.unlock = unlock


def load_behind_a_write(content: bytes) -> bytes:
    """Load block 0 while the engine's stream still writes zeros to its first layer; what it holds in the
    end."""
    from cuda.bindings import driver

    zeros = int(pages_engine.checked(driver.cuMemHostAlloc(LAYER_BYTES, 0)))
    ctypes.memset(zeros, 0, LAYER_BYTES)
    pages_engine.checked(driver.cuMemcpyHtoDAsync(state["start"], zeros, LAYER_BYTES, state["stream"]))
    load(content, [0], [0])
    state["cuda"].synchronize(state["stream"])
    return block(0)


def load(content: bytes, blocks: list[int], extents: list[int]) -> list[Any]:
    """Load from an arena with this content; [page-locked?, registrations left]."""
    arena: Any = PlainArena(content)
    before = Control().count("registrations")
    loader = state["side"].loader
    loader.prepare(arena)
    loader.copy(arena, blocks, extents)
    locked = arena.locked
    if locked:
        arena.unlock()
    return [locked, Control().count("registrations") - before]


def load_many(blocks: list[int], seed: int) -> list[Any]:
    """Load blocks, each from its place in an arena of random bytes: [was it page-locked, digests of what all
    blocks hold right after it]."""
    nbytes = LAYERS * STRIDES[0]
    replica = np.random.default_rng(seed).integers(0, 256, pages_engine.BLOCKS * nbytes, dtype=np.uint8)
    locked, _ = load(replica.tobytes(), blocks, [number * nbytes for number in blocks])
    return [locked, [hashlib.blake2b(block(number)).hexdigest() for number in range(pages_engine.BLOCKS)]]


def join(socket: str, name: str, incarnation: int, kind: str) -> bool:
    """Register with the daemon at `socket`, as the shim of an engine does."""
    from segue_shim.exporter import Exporter
    from segue_shim.match_client import MatchClient

    pages_engine.on_gpu(kind)
    whose = {"engine": name, "incarnation": incarnation, "fingerprint": b"f" * 16}
    state["exporter"] = Exporter(socket, model="m", **whose)
    state["client"] = MatchClient(socket, block_size=BLOCK_SIZE, **whose)
    accepted: bool = state["exporter"].register_gpu(state["side"])
    return accepted


def run(ids: list[int], computed: int, seq: str = "s") -> None:
    """A step that computes so many tokens of a new sequence, in the first blocks."""
    from segue_shim.plan import StepPlan

    blocks = pack_u32(range(-(-computed // BLOCK_SIZE)))
    start = SequenceBegin(seq, 1, b"", pack_u32(ids), blocks, 0)
    state["exporter"].begin(StepPlan(blocks, (start,), computed=((seq, computed),), running=1))
    state["exporter"].commit()


def rejoin() -> None:
    """Hang up, and register with the same daemon again."""
    state["exporter"].suspend()
    state["exporter"].resume()
    idle_until_registered()


def match(ids: list[int], seq: str = "s") -> list[Any]:
    """What the daemon here holds: [tokens, extents, daemon, lease, deadline]."""
    client, limit = state["client"], len(ids) - 1
    found = client.match(seq=seq, epoch=2, salt=b"", token_ids=pack_u32(ids), computed=0, limit=limit)
    return [found.tokens, found.extents, client.daemon, found.lease, found.deadline_ns]


def take_over(ids: list[int], blocks: list[int], seq: str = "s") -> int:
    """Go on with the sequence from what the daemon here holds, in these blocks; the tokens that were
    loaded."""
    return load_matched(match(ids, seq), ids, blocks, seq)


def load_matched(matched: list[Any], ids: list[int], blocks: list[int], seq: str = "s") -> int:
    """The same from what `match` has found."""
    from segue_shim.plan import Load, Source, StepPlan, unpack_u64

    tokens, packed_extents, daemon, lease, deadline_ns = matched
    exporter, extents = state["exporter"], tuple(unpack_u64(packed_extents))
    source = Source(daemon, lease, deadline_ns, extents)
    load = Load(tokens, tuple(blocks[: len(extents)]), (source,))
    packed = pack_u32(load.block_ids)
    start = SequenceBegin(seq, 2, b"", pack_u32(ids), packed, 0)
    exporter.begin(StepPlan(packed, (start,), computed=((seq, tokens),), running=1))
    (result,) = exporter.load([load])
    exporter.commit(result.failed_blocks)
    loaded: int = result.loaded
    return loaded


def mappings() -> int:
    """Pieces of virtual memory that are mapped here."""
    return int(Control().count("mappings"))


def fail(failures: str) -> None:
    """Inject errors."""
    Control().fail(failures)


def block(number: int) -> bytes:
    """What a block holds now, over all layers."""
    from cuda.bindings import driver

    found = bytearray()
    for layer in range(LAYERS):
        part = np.empty(STRIDES[0], np.uint8)
        at = state["start"] + layer * LAYER_BYTES + number * STRIDES[0]
        pages_engine.checked(driver.cuMemcpyDtoH(part.ctypes.data, at, part.nbytes))
        found += part.tobytes()
    return bytes(found)

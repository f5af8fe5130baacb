"""An engine on a GPU says what it does before the GPU has done it: what counts when, and who looks."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_core.clock import MonotonicClock
from segue_core.geometry import Geometry, Region
from segue_core.lifeline import Lifeline
from segue_core.memory_handle import MemoryHandle
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.journal import Begin, Commit, SequenceBegin
from segue_core.messages.local import Refused, Register
from segue_core.ring import Ring
from segue_core.shared_memory import seal_size, sealable_memory
from segue_core.timeline import Timeline
from segue_daemon import engine as engine_module
from segue_daemon.arena import Bytes
from segue_daemon.completion import MAX_CLAIMS, HeldProgress
from segue_daemon.engine_host import EngineHost
from segue_daemon.kept import OwnKeep
from segue_daemon.pages import HostPages, PagesError
from segue_daemon.settings import DaemonSettings
from segue_daemon.store import ReplicaStore
from support.kept_host import Connection
from support.waiting import eventually


def begin(step: int, seq: str = "s", computed: int = 0, **more: Any) -> Begin:
    start = (SequenceBegin(seq, 1, b"", bytes(32), bytes(8), computed),)
    fields = {"reset": False, "assigned": b"", "begun": start, "updated": (), "paused": (), "ended": ()}
    return Begin(step, **(fields | more))


class Reader:
    """What a ledger would say is computed."""

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self.held = HeldProgress(lambda seq: self.computed.get(seq, 0))

    def take(self, record: Begin | Commit, complete: int) -> None:
        passed = self.held.take(record, complete)
        if isinstance(passed, Begin):
            for seq in (*passed.ended, *passed.paused, *(self.computed if passed.reset else ())):
                self.computed = {name: n for name, n in self.computed.items() if name != seq}
            self.computed |= {start.seq: start.computed for start in passed.begun}
        else:
            self.computed |= dict(passed.computed)

    def release(self, complete: int) -> None:
        commit = self.held.release(complete)
        self.computed |= dict(commit.computed) if commit is not None else {}


def test_a_claim_waits_for_its_step() -> None:
    """A peer never gets tokens that the kernels have yet to write."""
    reader = Reader()
    reader.take(begin(1), 0)
    reader.take(Commit(1, (("s", 3),)), 0)
    reader.take(Commit(2, (("s", 4),)), 0)
    assert reader.computed == {"s": 0} and reader.held
    reader.release(1)
    assert reader.computed == {"s": 3} and reader.held
    reader.release(2)
    assert reader.computed == {"s": 4} and not reader.held


ENDS = {
    "ended": {"begun": (), "ended": ("s",)},
    "paused": {"begun": (), "paused": ("s",)},
    "reset": {"begun": (), "reset": True},
    "begun again": {},
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_claim_on_blocks_that_were_lost_never_counts(end: dict[str, Any]) -> None:
    """What a step computed for an earlier table says nothing about the one that came after it."""
    reader = Reader()
    reader.take(begin(1), 0)
    reader.take(Commit(1, (("s", 4),)), 0)
    reader.take(begin(2, **end), 0)
    assert not reader.held
    reader.release(9)
    assert reader.computed.get("s", 0) == 0


def test_what_an_announcement_says_waits_for_the_step_before_it() -> None:
    """A daemon that was restarted hears of tokens that the GPU may still be at."""
    reader = Reader()
    reader.take(begin(5, computed=8), 3)
    assert reader.computed == {"s": 0}
    reader.release(4)
    assert reader.computed == {"s": 8}


def test_what_is_taken_back_is_taken_back_at_once() -> None:
    """Tokens that a failed load has voided are not shipped while the GPU goes on."""
    reader = Reader()
    reader.take(begin(1), 0)
    reader.take(Commit(1, (("s", 8),)), 1)
    reader.take(Commit(2, (("s", 12),)), 1)
    reader.take(Commit(3, (("s", 4),)), 1)
    assert reader.computed == {"s": 4}
    reader.release(2)
    assert reader.computed == {"s": 4}


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3 * MAX_CLAIMS))
def test_never_more_counts_than_complete_steps_have_computed(moves: list[tuple[int, bool]]) -> None:
    """However far an engine runs ahead, and however many of its claims are merged."""
    reader, complete, promised = Reader(), 0, {0: 0}
    reader.take(begin(1), 0)
    for step, (behind, look) in enumerate(moves, start=1):
        promised[step] = step
        reader.take(Commit(step, (("s", step),)), complete)
        if look:
            complete = max(complete, step - behind)
            reader.release(complete)
        assert reader.computed["s"] <= promised[complete]
    reader.release(len(moves))
    assert reader.computed["s"] == len(moves) and not reader.held


HANDLE = MemoryHandle("cuda_ipc", "GPU-" + "-".join("0" * n for n in (8, 4, 4, 4, 12)), 0, (64,), bytes(64))
GEOMETRY = Geometry(4, 4, (64,), (Region(0, 0, (4, 4), (16, 4), 4, ("block", "slot")),), (HANDLE,))


class Pages(HostPages):
    """Host memory in the place of a GPU's."""

    def copy_block(self, block: int, out: Bytes) -> None:
        if self.failure:
            raise PagesError(self.failure)
        super().copy_block(block, out)


class Bench:
    """An engine host with one registered engine, whose GPU is the test."""

    def __init__(self) -> None:
        settings, clock = DaemonSettings("a", "unused"), MonotonicClock()
        store = ReplicaStore(memoryview(bytearray(64)), lease_ns=1)  # type: ignore[arg-type]
        keep = OwnKeep(store, ttl_ns=0)
        self.host = EngineHost(settings, clock, (), keep, asyncio.ensure_future, lambda: None)
        self.timeline, self.lifeline = Timeline(), Lifeline()
        ring, memory = sealable_memory("journal"), sealable_memory("pages")
        os.ftruncate(memory, 64)
        self.journal = Ring(ring, create=1 << 12)
        seal_size(ring)
        self.message = Register(PROTOCOL_VERSION, "a", 1, "m", b"f" * 16, GEOMETRY, timeline=True)
        self.fds = [ring, os.eventfd(0), os.dup(self.lifeline.fd), os.dup(self.timeline.fd), memory]
        self.connection: Any = Connection()
        assert self.host.register(self.message, self.fds, self.connection) is None

    def shippable(self) -> int:
        session = self.host.session
        return session.ledger.sequences["s"].shippable if session is not None else 0


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engine_module, "open_pages", lambda geometry, fds: Pages(geometry, list(fds)))
    monkeypatch.setattr(Geometry, "fd_count", 1)
    made = Bench()
    yield made
    made.host.stop()


async def test_the_daemon_looks_again_until_the_gpu_is_there(bench: Bench) -> None:
    """A GPU rings no doorbell: its steps are noticed without one, and without a further record."""
    for record in (begin(1), Commit(1, (("s", 4),))):
        bench.journal.append(msgspec.msgpack.encode(record))
    bench.host.drain_and_sleep()
    assert bench.shippable() == 0
    bench.timeline.step = 1
    async with asyncio.timeout(20):
        while bench.shippable() != 4:  # noqa: ASYNC110  # the ledger has no event for it
            await asyncio.sleep(0)


async def test_an_engine_whose_memory_is_lost_is_let_go_and_may_come_back(bench: Bench) -> None:
    """Its daemon says why, reads nothing of it any more, and takes it in again."""
    session = bench.host.session
    assert session is not None
    session.pages.failure = "the GPU is lost"
    watch = asyncio.create_task(bench.host.watch_progress())
    try:
        await eventually(lambda: session.closed, "it is let go")
    finally:
        watch.cancel()
    assert bench.connection.told == [Refused("the GPU is lost", retry=True)]
    assert bench.host.status().state == "absent"


def test_gpu_memory_without_a_timeline_is_refused(bench_fds: list[int]) -> None:
    """What its steps have computed could not be known."""
    message = Register(PROTOCOL_VERSION, "a", 1, "m", b"f" * 16, GEOMETRY)
    with pytest.raises(engine_module.ProtocolError, match="timeline"):
        engine_module.EngineSession(message, bench_fds, 0, MonotonicClock(), max_sequences=1)


@pytest.fixture
def bench_fds() -> Iterator[list[int]]:
    fds = [os.eventfd(0) for _ in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_gpu_engine_at_a_daemon_without_the_extra_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon runs without cuda-python, and says what is missing once it is needed."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(engine_module.ProtocolError, match=r"segue-ha\[cuda\]"):
        engine_module.open_pages(GEOMETRY, ())

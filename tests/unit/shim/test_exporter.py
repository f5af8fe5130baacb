"""The exporter against a real ring, a real socket, and a daemon that comes, goes, refuses and hangs."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

import pytest

from segue_core import credentials
from segue_core.clock import MonotonicClock
from segue_core.framing import encode_frame
from segue_core.messages.journal import Begin, SequenceBegin, SequenceUpdate
from segue_core.messages.local import Fenced, Matched, Refused, Register
from segue_core.ring import Word
from segue_shim.exporter import Exporter
from segue_shim.loader import Arena
from segue_shim.match_client import MatchClient
from segue_shim.plan import Load, Source, StepPlan, pack_u32
from segue_shim.registrar import Registrar
from support.daemon_stub import DaemonStub, ids, wait_until
from support.kv_pages import BLOCK_SIZE, BLOCKS, FAST, kv_tensors

pytestmark = pytest.mark.timeout(30)


def register(exporter: Exporter) -> None:
    assert exporter.register_pages(kv_tensors(), num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def start(seq: str = "s", tokens: int = 6) -> SequenceBegin:
    return SequenceBegin(seq, 1, b"", pack_u32(range(tokens)), pack_u32([1, 2]), 0)


def step(exporter: Exporter, plan: StepPlan | None = None) -> None:
    exporter.begin(plan or StepPlan())
    exporter.commit()


def ready(exporter: Exporter, stub: DaemonStub, count: int = 1) -> None:
    stub.registered(count)
    wait_until(lambda: exporter.registered)


def test_a_registered_engine_writes_its_steps(exporter: Exporter, stub: DaemonStub) -> None:
    """What it computes reaches the daemon, and the header tells of progress."""
    register(exporter)
    ready(exporter, stub)
    registration = stub.registered()
    assert registration.message.engine == "a"
    plan = StepPlan(begun=(start(),), assigned=pack_u32([1, 2]), computed=(("s", 6),), running=2)
    exporter.begin(plan)
    ring = registration.ring
    assert (ring.get(Word.STEP_BEGUN), ring.get(Word.STEP_COMMITTED), ring.get(Word.RUNNING)) == (1, 0, 2)
    (begun,) = registration.ledger.drain()
    assert isinstance(begun, Begin) and begun.reset and ids(begun.assigned) == [1, 2]
    exporter.commit()
    assert ring.get(Word.STEP_COMMITTED) == 1
    assert abs(MonotonicClock().now_ns() - ring.get(Word.STEP_CHANGED_NS)) < 5e9
    registration.ledger.drain()
    assert registration.ledger.sequences["s"].computed == 6


def test_the_bell_rings_once_for_a_sleeping_daemon(exporter: Exporter, stub: DaemonStub) -> None:
    """An awake daemon costs no system call."""
    register(exporter)
    ready(exporter, stub)
    for _ in range(3):
        step(exporter, StepPlan(assigned=pack_u32([1])))
    registration = stub.registered()
    assert int.from_bytes(os.read(registration.doorbell, 8), "little") == 1
    registration.ring.set(Word.SLEEPING, 1)
    step(exporter, StepPlan(assigned=pack_u32([1])))
    assert int.from_bytes(os.read(registration.doorbell, 8), "little") == 1


def test_sequences_that_began_before_the_daemon_are_announced_whole(
    exporter: Exporter, socket_path: str
) -> None:
    """The engine ran for a while on its own."""
    register(exporter)
    step(exporter, StepPlan(begun=(start(),), computed=(("s", 6),)))
    step(exporter, StepPlan(updated=(SequenceUpdate("s", pack_u32([70]), b""),), computed=(("s", 7),)))
    stub = DaemonStub(socket_path)
    ready(exporter, stub)
    exporter.begin(StepPlan(updated=(SequenceUpdate("s", pack_u32([71]), b""),)))
    ledger = stub.registered().ledger
    ledger.drain()
    assert ledger.resets == 1
    assert ledger.sequences["s"].token_ids == [0, 1, 2, 3, 4, 5, 70, 71]
    assert ledger.sequences["s"].computed == 7
    stub.kill()


def test_a_snapshot_is_given_when_asked_for(exporter: Exporter, stub: DaemonStub) -> None:
    """The wish is cleared, so it is given once."""
    register(exporter)
    ready(exporter, stub)
    step(exporter, StepPlan(begun=(start(),), computed=(("s", 6),)))
    registration = stub.registered()
    registration.ledger.drain()
    registration.ring.set(Word.SNAPSHOT_WANTED, 1)
    step(exporter)
    step(exporter)
    registration.ledger.drain()
    assert registration.ledger.resets == 2 and registration.ledger.sequences["s"].computed == 6
    assert registration.ring.get(Word.SNAPSHOT_WANTED) == 0


def test_a_full_ring_drops_counts_and_recovers(exporter: Exporter, stub: DaemonStub) -> None:
    """A daemon that does not read costs nothing; when it reads again it knows all, and nothing wrong."""
    register(exporter)
    ready(exporter, stub)
    step(exporter, StepPlan(begun=(start(),)))
    for token in range(3000):
        update = SequenceUpdate("s", pack_u32([token]), b"")
        step(exporter, StepPlan(updated=(update,), assigned=pack_u32(range(3, 12)), computed=(("s", token),)))
    registration = stub.registered()
    assert registration.ring.get(Word.DROPPED) > 0
    registration.ledger.drain()
    step(exporter, StepPlan(computed=(("s", 3006),)))
    registration.ledger.drain()
    known = registration.ledger.sequences["s"]
    assert known.computed == 3006 and len(known.token_ids) == 3006
    assert not registration.ledger.problems


def test_a_killed_daemon_is_found_again_with_a_new_ring(
    exporter: Exporter, socket_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Three lives of the daemon; each begins with everything that is live."""
    caplog.set_level(logging.INFO, "segue_shim")
    register(exporter)
    step(exporter, StepPlan(begun=(start(),), computed=(("s", 6),)))
    for life in range(3):
        stub = DaemonStub(socket_path, incarnation=life + 1)
        ready(exporter, stub)
        step(exporter)
        ledger = stub.registered().ledger
        ledger.drain()
        assert ledger.resets == 1 and ledger.sequences["s"].computed == 6
        stub.kill()
        wait_until(lambda: not exporter.registered)
        step(exporter)
    assert caplog.text.count("lost segue-daemon") == 3
    assert caplog.text.count("registered with segue-daemon") == 3


def test_an_idle_engine_does_not_hoard_rings(exporter: Exporter, socket_path: str) -> None:
    """A daemon that restarts often beside an engine without requests leaves nothing behind."""
    register(exporter)
    before = 0
    for life in range(6):
        stub = DaemonStub(socket_path)
        ready(exporter, stub)
        if life == 1:
            before = len(os.listdir("/proc/self/fd"))
        stub.kill()
        wait_until(lambda: not exporter.registered)
        for registration in stub.registrations:
            for fd in registration.fds:
                os.close(fd)
        os.close(stub.arena_fd)
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Refused("another model", False), "another model"),
        (b"\x93garbage", "not a valid message"),
        (encode_frame(Matched(1, 1, 0, b"", 1, 1))[4:], "answered Matched"),
        (None, "TimeoutError"),
    ],
)
def test_a_daemon_that_does_not_register_is_reported_once(
    exporter: Exporter, socket_path: str, caplog: pytest.LogCaptureFixture, reply: object, said: str
) -> None:
    """Refusal, garbage, a wrong message, silence: the engine steps on at full speed."""
    stub = DaemonStub(socket_path, on_register=lambda message: reply)
    register(exporter)
    wait_until(lambda: said in caplog.text)
    if not isinstance(reply, Refused):
        wait_until(lambda: stub.accepted >= 3)
    began = time.perf_counter()
    for _ in range(100):
        step(exporter, StepPlan(running=1))
    assert time.perf_counter() - began < 0.5
    assert caplog.text.count(said) == 1 and not exporter.registered and not exporter.broken
    stub.kill()


def test_a_refusal_for_good_is_tried_again_slowly(exporter: Exporter, socket_path: str) -> None:
    """The daemon may be replaced by one that understands this engine; until then it is left in peace."""
    answers = [Refused("not this layout", False), True]
    asked: list[float] = []

    def answer(message: object) -> Refused | bool:
        asked.append(time.monotonic())
        return answers.pop(0)

    stub = DaemonStub(socket_path, on_register=answer)
    register(exporter)
    ready(exporter, stub)
    assert asked[1] - asked[0] >= 0.9 * exporter._options.retry_refused_ms / 1000
    stub.kill()


def test_a_refusal_for_now_is_tried_again(exporter: Exporter, socket_path: str) -> None:
    """For example while the daemon still lets a dead engine's memory go."""
    answers = [Refused("busy", True), Refused("busy", True), True]
    stub = DaemonStub(socket_path, on_register=lambda message: answers.pop(0))
    register(exporter)
    ready(exporter, stub)
    stub.kill()


def test_an_arena_smaller_than_announced_is_refused(exporter: Exporter, socket_path: str) -> None:
    """The engine must not map what is not there."""
    stub = DaemonStub(socket_path, announce_bytes=1 << 30)
    register(exporter)
    wait_until(lambda: stub.accepted >= 2)
    assert not exporter.registered
    stub.kill()


def test_without_a_daemon_one_line_says_what_to_do(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing socket: the engine runs, and the log is not flooded."""
    attempts = []
    attempt = Registrar._serve_once
    monkeypatch.setattr(Registrar, "_serve_once", lambda self: attempts.append(1) or attempt(self))
    register(exporter)
    wait_until(lambda: len(attempts) > 5)
    assert caplog.text.count("start it there") == 1


def test_an_unknown_layout_is_one_warning(exporter: Exporter, caplog: pytest.LogCaptureFixture) -> None:
    """And no thread, no socket, no shared memory."""
    assert not exporter.register_pages({}, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    step(exporter, StepPlan(begun=(start(),)))
    assert caplog.text.count("unprotected") == 1


def test_a_fenced_sequence_falls_silent(exporter: Exporter, stub: DaemonStub) -> None:
    """It went on elsewhere: nothing more is said about it here."""
    register(exporter)
    ready(exporter, stub)
    step(exporter, StepPlan(begun=(start(),), computed=(("s", 6),)))
    registration = stub.registered()
    registration.connection.sendall(encode_frame(Fenced("s", 2)))
    wait_until(lambda: exporter._fenced)
    registration.ledger.drain()
    step(exporter, StepPlan(updated=(SequenceUpdate("s", pack_u32([7]), b""),), computed=(("s", 7),)))
    assert registration.ledger.drain() == []


def load_of(stub: DaemonStub, **changes: int) -> Load:
    far = MonotonicClock().now_ns() + 10**10
    known = {"daemon": stub.incarnation, "lease": 3, "deadline_ns": far} | changes
    return Load(8, (2, 5), (Source(extents=(0, 4096), **known),))


def test_a_replica_is_loaded_into_the_pages(exporter: Exporter, stub: DaemonStub) -> None:
    """Bytes of the arena, in the engine's own tensors."""
    tensors = kv_tensors()
    assert exporter.register_pages(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    ready(exporter, stub)
    content = os.urandom(4096 + stub.registered().message.geometry.block_bytes)
    stub.arena[: len(content)] = content
    exporter.begin(StepPlan(assigned=pack_u32([2, 5])))
    (result,) = exporter.load([load_of(stub)])
    assert (result.loaded, result.failed_blocks) == (8, ())
    layer_bytes = tensors["layer.0"][2].numel() * 4
    assert tensors["layer.0"][2].numpy().tobytes() == content[:layer_bytes]
    assert tensors["layer.1"][5].numpy().tobytes() == content[4096 + layer_bytes : 4096 + 2 * layer_bytes]


@pytest.mark.parametrize("changes", [{"daemon": 999}, {"deadline_ns": 1}])
def test_a_load_under_a_dead_lease_has_failed(
    exporter: Exporter, stub: DaemonStub, changes: dict[str, int]
) -> None:
    """Another daemon's arena, or a copy finished too late: the blocks are reported, nothing is committed."""
    register(exporter)
    ready(exporter, stub)
    exporter.begin(StepPlan(begun=(start(),), computed=(("s", 6),)))
    (result,) = exporter.load([load_of(stub, **changes)])
    assert (result.loaded, result.failed_blocks) == (0, (2, 5))
    exporter.commit(result.failed_blocks)
    ledger = stub.registered().ledger
    ledger.drain()
    assert ledger.sequences["s"].computed == 0


def test_a_load_without_a_daemon_has_failed(exporter: Exporter, stub: DaemonStub) -> None:
    """Nothing was ever mapped."""
    (result,) = exporter.load([load_of(stub)])
    assert result.failed_blocks == (2, 5)


def test_a_bug_makes_the_engine_look_idle_not_dead(
    exporter: Exporter, stub: DaemonStub, caplog: pytest.LogCaptureFixture
) -> None:
    """One traceback; the connection stays, the daemon forgets the sequences and sees no stall."""
    register(exporter)
    ready(exporter, stub)
    step(exporter, StepPlan(begun=(start(),), running=1))
    exporter.begin(StepPlan(computed=(("s", "six"),), begun=("nonsense",)))  # type: ignore[arg-type]
    step(exporter, StepPlan(running=1))
    assert exporter.broken and not exporter.registered
    assert caplog.text.count("Traceback") == 1
    registration = stub.registered()
    registration.ledger.drain()
    assert registration.ledger.sequences == {} and registration.ring.get(Word.RUNNING) == 0
    registration.connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        registration.connection.recv(1)


def test_closing_hangs_up_at_once(exporter: Exporter, stub: DaemonStub) -> None:
    """A planned shutdown is the end of the connection, and of the thread."""
    register(exporter)
    ready(exporter, stub)
    began = time.perf_counter()
    exporter.close()
    assert time.perf_counter() - began < FAST.retry_max_ms / 1000 + 0.5
    assert stub.registered().connection.recv(1) == b""


def test_leaving_waits_for_a_daemon_that_was_still_opening_the_memory(
    exporter: Exporter, socket_path: str
) -> None:
    """Memory that goes must not be mapped anywhere: an answer that comes late is no reason to go."""
    asked, answer = threading.Event(), threading.Event()

    def on_register(_: Register) -> bool:
        asked.set()
        return answer.wait(20)

    stub = DaemonStub(socket_path, on_register=on_register)
    register(exporter)
    assert asked.wait(20)
    registrar = exporter._registrar
    assert registrar is not None
    left: list[bool] = []
    leaving = threading.Thread(target=lambda: left.append(registrar.leave(20)))
    leaving.start()
    wait_until(registrar._stopped.is_set)
    answer.set()
    connection = stub.registered().connection
    leaving.join(0.2)
    assert leaving.is_alive()
    connection.shutdown(socket.SHUT_RDWR)
    leaving.join(20)
    assert left == [True]
    stub.kill()


def test_leaving_does_not_wait_for_a_large_arena(
    exporter: Exporter, stub: DaemonStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching and page-locking it takes seconds: an engine that sleeps goes once the daemon has let go."""
    touching, go_on = threading.Event(), threading.Event()

    def prefault(_: Arena) -> None:
        touching.set()
        go_on.wait(20)

    monkeypatch.setattr(Arena, "prefault", prefault)
    register(exporter)
    assert touching.wait(20)
    registrar = exporter._registrar
    assert registrar is not None
    hung_up = stub.registered().connection
    leaving = threading.Timer(0.05, lambda: hung_up.shutdown(socket.SHUT_RDWR))
    leaving.start()
    assert registrar.leave(10)
    go_on.set()
    leaving.join()


def test_the_shim_looks_whom_it_talks_to(
    exporter: Exporter,
    stub: DaemonStub,
    socket_path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another user's socket where the daemon's should be gets neither memory nor questions."""
    monkeypatch.setattr(credentials, "other_end", lambda _: (19, 1001))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    client = MatchClient(
        socket_path, engine="a", incarnation=5, fingerprint=b"f" * 16, block_size=4, options=FAST
    )
    register(exporter)
    assert client.match(seq="s", epoch=2, salt=b"", token_ids=bytes(80), computed=0, limit=19) is None
    wait_until(lambda: caplog.text.count("user 1001 listens there") == 2)
    assert not stub.attached and not stub.registrations
    client.close()

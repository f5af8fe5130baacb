"""Asking for replicas: answers that fit are used, and no daemon can hold the scheduler up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator

import pytest

from segue_core.clock import ManualClock
from segue_core.framing import encode_frame
from segue_core.messages.local import Fenced, Match, Matched
from segue_shim.match_client import MatchClient
from segue_shim.options import ExporterOptions
from support.clocks import AdvancedClock
from support.daemon_stub import DaemonStub, wait_until
from support.kv_pages import FAST

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def clock() -> AdvancedClock:
    """Whose time the client's is."""
    return AdvancedClock()


@pytest.fixture
def client(socket_path: str, clock: AdvancedClock) -> Iterator[MatchClient]:
    """The scheduler's side, with a deadline of 100 ms and a pause of 50."""
    made = MatchClient(
        socket_path, engine="a", incarnation=5, fingerprint=b"f" * 16, block_size=4, options=FAST, clock=clock
    )
    yield made
    made.close()


def ask(client: MatchClient, *, computed: int = 0, limit: int = 19, tokens: int = 20) -> Matched | None:
    return client.match(
        seq="s", epoch=2, salt=b"", token_ids=bytes(4 * tokens), computed=computed, limit=limit
    )


def held(match: Match, tokens: int, first: int = 0, lease: int = 9) -> Matched:
    extents = array("Q", range(-(-tokens // 4) - first)).tobytes()
    return Matched(match.request, tokens, first, extents, lease, 1 << 62)


def let_the_pause_pass(clock: AdvancedClock) -> None:
    """After a failure nobody is asked for a while."""
    clock.advance_ms(FAST.match_pause_ms + 1)


def test_a_replica_is_found(client: MatchClient, stub: DaemonStub) -> None:
    """The daemon hears who asks and what for; the lease is given back with what it was worth."""
    stub.answer = lambda match: held(match, 19)
    matched = ask(client)
    assert matched is not None and matched.tokens == 19 and len(matched.extents) == 8 * 5
    assert (stub.attached[0].engine, stub.attached[0].incarnation) == ("a", 5)
    assert stub.matches[0].fingerprint == b"f" * 16 and client.daemon == stub.incarnation
    client.release(matched.lease, 19)
    wait_until(lambda: [(release.lease, release.loaded) for release in stub.releases] == [(9, 19)])


def test_an_answer_that_helps_nothing_is_given_back(client: MatchClient, stub: DaemonStub) -> None:
    """The engine's own prefix cache has as much."""
    stub.answer = lambda match: held(match, 8)
    assert ask(client, computed=8) is None
    wait_until(lambda: stub.releases)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda match: held(match, 20),
        lambda match: Matched(match.request, 12, 0, bytes(8), 9, 1),
        lambda match: held(match, 19, first=3),
        lambda match: Matched(match.request, 12, 1 << 40, b"", 9, 1),
        lambda match: b"\xff\xff\xff\xffxxxx",
        lambda match: b"\x03\x00\x00\x00\xc1\xc1\xc1",
    ],
)
def test_an_answer_that_contradicts_the_question_is_not_used(
    client: MatchClient, stub: DaemonStub, clock: AdvancedClock, wrong: object
) -> None:
    """Too many tokens, too few extents, blocks left out, frames that are none."""
    stub.answer = wrong  # type: ignore[assignment]
    assert ask(client) is None and client.failures == 1
    stub.answer = lambda match: held(match, 19)
    let_the_pause_pass(clock)
    assert ask(client) is not None


def test_late_answers_are_skipped_and_their_leases_given_back(
    client: MatchClient, stub: DaemonStub, clock: AdvancedClock
) -> None:
    """A reply to the last question must not be taken for one to this."""
    stub.answer = lambda match: None
    assert ask(client) is None
    late = held(stub.matches[0], 19, lease=4)
    stub.answer = lambda match: (
        encode_frame(late) + encode_frame(Fenced("x", 1)) + encode_frame(held(match, 11, lease=5))
    )
    let_the_pause_pass(clock)
    matched = ask(client)
    assert matched is not None and (matched.tokens, matched.lease) == (11, 5)
    wait_until(lambda: [release.lease for release in stub.releases] == [4])


def test_a_silent_daemon_costs_one_deadline_and_then_nothing_for_a_while(
    client: MatchClient, stub: DaemonStub, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundred resumed requests do not wait a hundred times."""
    began = time.perf_counter()
    assert ask(client) is None
    first = time.perf_counter() - began
    assert 0.09 < first < 0.4
    began = time.perf_counter()
    assert all(ask(client) is None for _ in range(100))
    assert time.perf_counter() - began < 0.05
    assert caplog.text.count("no answer within") == 1


def test_a_daemon_with_a_full_queue_cannot_hold_up_connecting(client: MatchClient, socket_path: str) -> None:
    """Connecting to a stopped daemon would block for ever without a deadline."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path)
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(socket_path)
        began = time.perf_counter()
        assert ask(client) is None
        assert time.perf_counter() - began < 0.4
        for one in waiting:
            one.close()


def test_a_stopped_daemon_cannot_hold_up_sending(socket_path: str) -> None:
    """Its socket buffer fills; the question is larger than that."""
    code = (
        "import socket,sys,time\n"
        "l=socket.socket(socket.AF_UNIX);l.bind(sys.argv[1]);l.listen(8)\n"
        "print('up',flush=True)\n"
        "c=[]\n"
        "while True: c.append(l.accept())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, socket_path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGSTOP)
        client = MatchClient(
            socket_path, engine="a", incarnation=5, fingerprint=b"f" * 16, block_size=4, options=FAST
        )
        began = time.perf_counter()
        assert ask(client, tokens=1_000_000) is None
        assert time.perf_counter() - began < 0.4
        client.close()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_restarted_daemon_is_asked_again_at_once(client: MatchClient, socket_path: str) -> None:
    """The old connection is found dead when it is used, and the question still answered."""
    stub = DaemonStub(socket_path)
    stub.answer = lambda match: held(match, 19)
    assert ask(client) is not None
    stub.kill()
    stub = DaemonStub(socket_path, incarnation=78)
    stub.answer = lambda match: held(match, 19)
    assert ask(client) is not None and client.daemon == 78
    stub.kill()


def test_an_absent_daemon_is_logged_once_an_outage(
    client: MatchClient, socket_path: str, clock: AdvancedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And found when it is there."""
    for _ in range(3):
        assert ask(client) is None
        let_the_pause_pass(clock)
    assert caplog.text.count("replicas cannot be asked for") == 1 and client.failures == 3
    stub = DaemonStub(socket_path)
    stub.answer = lambda match: held(match, 19)
    assert ask(client) is not None
    stub.kill()


def test_attempts_are_a_pause_apart(socket_path: str) -> None:
    """By the clock that was passed in."""
    clock = ManualClock(1)
    client = MatchClient(
        socket_path, engine="a", incarnation=5, fingerprint=b"f" * 16, block_size=4, options=FAST, clock=clock
    )
    for _ in range(5):
        ask(client)
    assert client.failures == 1
    clock.advance_ms(FAST.match_pause_ms + 1)
    ask(client)
    assert client.failures == 2


@pytest.mark.parametrize(
    "wrong",
    [{"match_timeout_ms": 0}, {"ring_bytes": 100}, {"retry_min_ms": 9_000}, {"match_pause_ms": 10**9}],
)
def test_limits_out_of_bounds_are_refused_by_name(wrong: dict[str, int]) -> None:
    """A typing error in an option must not become a hang."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ExporterOptions(**wrong)


def test_descriptors_that_come_along_are_closed(client: MatchClient, stub: DaemonStub) -> None:
    """The scheduler does not need the arena."""
    stub.answer = lambda match: held(match, 19)
    before = len(os.listdir("/proc/self/fd"))
    ask(client)
    assert len(os.listdir("/proc/self/fd")) <= before + 3

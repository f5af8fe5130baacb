"""A daemon that is mistreated: clear messages for people's mistakes, and garbage that changes nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
import zmq

from segue_core.framing import decode, encode_frame, send_with_fds
from segue_core.geometry import Geometry, Region
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import Attach, Refused, Register, ToEngine
from segue_core.messages.peer import (
    BULK_HEADER,
    BulkHello,
    Control,
    Delta,
    Hello,
    Part,
    PartKind,
    Welcome,
    bulk_head,
)
from segue_core.ring import HEADER_BYTES, Ring
from segue_core.shared_memory import seal_size, sealable_memory
from segue_shim.match_client import MatchClient
from support.daemons import DaemonProcess, DaemonSet
from support.light_engine import FINGERPRINT, LightEngine
from support.waiting import wait_for


@pytest.fixture
def pair() -> Iterator[DaemonSet]:
    daemons = DaemonSet("a", "b")
    try:
        yield daemons.start()
    finally:
        daemons.stop()


def run_daemon(config: DaemonProcess) -> subprocess.CompletedProcess[str]:
    config.path.write_text(yaml.safe_dump(config.config))
    command = [sys.executable, "-m", "segue_daemon", "--config", str(config.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_peoples_mistakes_get_one_clear_line_and_no_traceback(pair: DaemonSet) -> None:
    """A missing folder, a second daemon on one socket, a port in use, an unknown key."""
    a = pair["a"].config
    other = {**a, "name": "c", "http": {"port": 0}, "listen": {"control_port": 0}, "peers": []}
    cases = [
        ({**other, "socket": str(pair.folder / "none" / "none" / "x.sock")}, 1, ["does not exist", "mkdir"]),
        ({**other}, 1, ["another segue-daemon listens on"]),
        ({**other, "socket": str(pair.folder / "c.sock"), "listen": a["listen"]}, 1, ["already in use"]),
        ({**other, "socket": str(pair.folder / "c.sock"), "http": a["http"]}, 1, ["already in use"]),
        ({**other, "sokcet": "x"}, 2, ["unknown key `sokcet`"]),
        ({**other, "store": {"budget_bytes": 5}}, 2, ["`store.budget_bytes`"]),
    ]
    for config, status, says in cases:
        done = run_daemon(DaemonProcess(pair.folder, config))
        assert done.returncode == status, done.stderr
        assert all(part in done.stderr for part in says), done.stderr
        assert "Traceback" not in done.stderr
    assert pair["a"].get("/readyz")[0] == 503, "the daemon whose socket was wanted runs on"


def test_a_daemon_stops_cleanly_and_a_killed_ones_socket_is_taken_over(pair: DaemonSet) -> None:
    """SIGTERM: exit 0 and no socket file left; SIGKILL: the next start does not need a cleaning hand."""
    pair["a"].stop(signal.SIGKILL)
    pair["a"].start()
    assert pair["a"].stop() == 0
    assert not os.path.exists(pair["a"].socket)


def register_message(**changes: object) -> Register:
    geometry = Geometry(4, 2, (256,), (Region(0, 0, (4, 2, 16), (64, 32, 2), 2, ("block", "slot", "dim")),))
    good = {"version": PROTOCOL_VERSION, "engine": "x", "incarnation": 9, "model": "m"}
    return Register(**(good | {"fingerprint": b"f" * 16, "geometry": geometry} | changes))  # type: ignore[arg-type]


def reaching_outside() -> Geometry:
    return Geometry(4, 2, (256,), (Region(0, 192, (4, 9), (64, 2), 2, ("block", "dim")),))


def memfd(nbytes: int, name: str = "x") -> int:
    fd = sealable_memory(name)
    os.ftruncate(fd, nbytes)
    seal_size(fd)
    return fd


def bell() -> int:
    return os.eventfd(0)


def page() -> int:
    return memfd(4096)


def pages() -> int:
    return memfd(256, "kv-pages")


def ring() -> int:
    fd = sealable_memory("journal")
    Ring(fd, create=4096)
    seal_size(fd)
    return fd


def unsealed_ring() -> int:
    fd = os.memfd_create("journal")
    Ring(fd, create=4096)
    return fd


@pytest.mark.parametrize(
    ("message", "fds", "reason"),
    [
        (register_message(version=99), [ring, bell, page, pages], "protocol"),
        (register_message(), [ring, bell, page], "file descriptors"),
        (register_message(), [ring, bell, page, lambda: memfd(100)], "100 bytes"),
        (register_message(), [lambda: memfd(64), bell, page, pages], "ring"),
        (register_message(), [unsealed_ring, bell, page, pages], "could shrink"),
        (register_message(), [ring, page, page, pages], "no eventfd"),
        (register_message(fingerprint=b""), [ring, bell, page, pages], "16 bytes"),
        (register_message(geometry=reaching_outside()), [ring, bell, page, pages], "outside"),
    ],
    ids=["version", "missing", "short", "no ring", "not sealed", "no bell", "fingerprint", "geometry"],
)
def test_a_registration_that_cannot_be_is_refused_with_its_reason(
    pair: DaemonSet, message: Register, fds: list[object], reason: str
) -> None:
    """The engine's log says why it is unprotected; its memory is not held on to."""
    opened = [make() for make in fds]  # type: ignore[operator]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(pair["a"].socket)
        send_with_fds(connection, message, opened)
        (length,) = struct.unpack("<I", connection.recv(4))
        answer = decode(connection.recv(length), ToEngine, peer="daemon")
    assert isinstance(answer, Refused) and reason in answer.reason
    for fd in opened:
        os.close(fd)
    assert pair["a"].status()["engine"]["state"] == "absent"
    process = pair["a"].process
    assert process is not None
    assert "kv-pages" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_garbage_on_the_unix_socket_hurts_only_its_own_connection(pair: DaemonSet) -> None:
    """Frames of noise, of absurd lengths, cut short: the engine that is registered does not notice."""
    a = LightEngine(pair["a"].socket, "a", incarnation=1)
    wait_for(lambda: a.exporter.registered, "registered")
    rng = random.Random(1)
    before = pair.open_files("a")
    for number in range(60):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(pair["a"].socket)
            noise = rng.randbytes(rng.randrange(1, 400))
            if number % 3 == 0:
                noise = encode_frame(Attach(PROTOCOL_VERSION, "a", 1)) + noise
            elif number % 3 == 1:
                noise = struct.pack("<I", len(noise)) + noise
            connection.sendall(noise)
    a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "still replicated")
    wait_for(lambda: pair.open_files("a") <= before, "connections closed", timeout_s=20)
    a.close()


def test_a_garbage_journal_record_costs_a_moment_of_protection_and_nothing_else(pair: DaemonSet) -> None:
    """Noise in the journal: the daemon asks for everything anew and goes on."""
    a = LightEngine(pair["a"].socket, "a", incarnation=1)
    wait_for(lambda: a.exporter.registered, "registered")
    live = a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    channel = a.exporter._channel
    assert channel is not None
    channel.append(b"\xff\xfe this is no record")
    channel.append(msgspec.msgpack.encode(["C", 1, [["s", 1 << 40]]]))
    for token in range(5):
        live.ids.append(token)
        a.step()
    wait_for(lambda: pair["a"].status()["engine"]["journal_broken"] > 0, "noticed")

    def goes_on() -> bool:
        live.ids.append(3)
        a.step()
        return pair["b"].watermark("s") >= 25

    wait_for(goes_on, "protected again")
    # And bytes overwritten in place, as by a stray write.
    os.pwrite(journal_fd(), os.urandom(2048), HEADER_BYTES + 512)
    target = live.computed + 5
    wait_for(lambda: goes_on() and pair["b"].watermark("s") >= target, "and again")
    b = LightEngine(pair["b"].socket, "b", incarnation=1)
    wait_for(lambda: b.exporter.registered, "registered")
    wait_for(lambda: pair["b"].watermark("s") == live.computed, "caught up")
    assert b.resume("s", [*live.ids, 1], 2) == live.computed
    b.step()
    assert b.wrong_tokens("s") == []
    a.close()
    b.close()


def journal_fd() -> int:
    """A descriptor of this process's journal, found as the kernel knows it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:segue-journal" in os.readlink(f"/proc/self/fd/{name}"):
                return int(name)
        except OSError:
            continue
    raise AssertionError("no journal descriptor")


def dealer(pair: DaemonSet) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.linger = 0
    link.rcvtimeo = 5000
    link.connect(f"tcp://127.0.0.1:{pair['b'].config['listen']['control_port']}")
    return context, link


def test_garbage_from_a_peer_changes_nothing(pair: DaemonSet) -> None:
    """Noise on control and bulk, deltas without a greeting, wrong tickets, lying lengths."""
    a = LightEngine(pair["a"].socket, "a", incarnation=1)
    wait_for(lambda: a.exporter.registered, "registered")
    live = a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    context, link = dealer(pair)
    rng = random.Random(2)
    for _ in range(50):
        link.send(rng.randbytes(rng.randrange(200)))
    link.send(msgspec.msgpack.encode([["ping"] * 2000]))
    link.send(b"\x92\xa4ping" + b"\x91" * 5000)

    def greet() -> Welcome:
        link.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, "liar", 5)))
        welcome = decode(link.recv(), Control, peer="b")
        assert isinstance(welcome, Welcome)
        return welcome

    part = Part(0, PartKind.WHOLE, b"", 1024)
    delta = Delta(1, "s", 9, 1, b"f" * 16, b"", 8, 1024, 0, bytes(8), (part,), 0)
    wire = msgspec.msgpack.encode
    for make in (
        lambda _: rng.randbytes(300),
        lambda _: BULK_HEADER.pack(1 << 30, 1, 0) + b"x",
        lambda _: bulk_head(bytes(1 << 16), 0) + bytes(1 << 16),
        lambda welcome: bulk(wire(BulkHello(5, welcome.ticket + 1))),
        lambda _: bulk(wire(delta), bytes(1024)),
        lambda welcome: (
            bulk(wire(BulkHello(5, welcome.ticket))) + bulk_head(wire(delta), 1 << 50) + wire(delta)
        ),
        lambda welcome: bulk(wire(BulkHello(5, welcome.ticket))) + bulk(wire(delta), bytes(1024)),
    ):
        welcome = greet()
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", welcome.bulk_port))
            connection.sendall(make(welcome))
    wait_for(lambda: pair["b"].status()["store"]["corrupt"] == 1, "wrong checksum counted")
    assert pair["b"].watermark("s") == 20
    live.ids.append(1)
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 21, "the honest peer goes on")
    link.close()
    context.destroy()
    a.close()


def bulk(header: bytes, payload: bytes = b"") -> bytes:
    return bulk_head(header, len(payload)) + header + payload


def test_http_garbage_gets_a_4xx(pair: DaemonSet) -> None:
    """Bodies that make no sense are answered, not crashed upon."""
    a = pair["a"]
    assert a.get("/v1/sequences/s/promote", {"epoch": "x"})[0] == 400
    assert a.get("/v1/sequences/s/promote", {"epoch": 1, "wat": 1})[0] == 400
    assert a.get("/v1/sequences/s/promote", {"epoch": 0})[0] == 400
    assert a.get("/v1/sequences/s/promote", {"epoch": 1, "wait_ms": 10**9})[0] == 400
    assert a.get("/v1/sequences/unknown")[0] == 404
    assert a.get("/v1/nothing")[0] == 404
    assert a.get("/v1/sequences/s/promote", {"epoch": 1})[1]["watermark"] == 0
    status, text = a.get("/metrics")
    assert status == 200 and "segue_store_budget_bytes 1.6777216e+07" in text


def test_a_full_store_refuses_and_recovers() -> None:
    """More than the budget holds: some sequences are refused, none is damaged, and room is used again."""
    daemons = DaemonSet("a", "b", store={"budget_bytes": 1 << 20})
    try:
        daemons.start()
        a = LightEngine(daemons["a"].socket, "a", incarnation=1, num_blocks=1100)
        wait_for(lambda: a.exporter.registered, "registered")
        for number in range(10):
            a.start(f"s{number}", [number * 10_000 + i for i in range(800)])
        a.step()
        wait_for(lambda: daemons["b"].status()["store"]["refused"] > 0, "the store says no")
        store = daemons["b"].status()["store"]
        assert 0 < store["used_bytes"] <= store["budget_bytes"]
        whole = [n for n in range(10) if daemons["b"].watermark(f"s{n}") == 800]
        assert 0 < len(whole) < 10
        for number in whole:
            a.finish(f"s{number}")
        a.step()
        rest = set(range(10)) - set(whole)
        for number in sorted(rest)[:3]:
            wait_for(lambda n=number: daemons["b"].watermark(f"s{n}") == 800, f"s{number} gets room")
        b = LightEngine(daemons["b"].socket, "b", incarnation=1, num_blocks=200)
        wait_for(lambda: b.exporter.registered, "registered")
        name = f"s{min(rest)}"
        assert b.resume(name, [*a.live[name].ids, 1], 2) == 800
        b.step()
        assert b.wrong_tokens(name) == []
        a.close()
        b.close()
    finally:
        daemons.stop()


def test_a_question_that_makes_no_sense_costs_its_asker_only(pair: DaemonSet) -> None:
    """Token ids cut in half: that connection is closed with a reason, others are answered."""
    a = LightEngine(pair["a"].socket, "a", incarnation=1)
    b = LightEngine(pair["b"].socket, "b", incarnation=1)
    wait_for(lambda: a.exporter.registered and b.exporter.registered, "registered")
    a.start("s", list(range(20)))
    a.step()
    wait_for(lambda: pair["b"].watermark("s") == 20, "replicated")
    odd = MatchClient(pair["b"].socket, engine="b", incarnation=1, fingerprint=FINGERPRINT, block_size=8)
    assert odd.match(seq="s", epoch=2, salt=b"", token_ids=bytes(37), computed=0, limit=9) is None
    wait_for(lambda: "token ids are cut" in pair["b"].log.read_text(), "said why")
    assert b.resume("s", [*range(20), 1], 2) == 20
    a.close()
    b.close()
    odd.close()

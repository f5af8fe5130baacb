"""Daemons with keys: they find each other, and whoever has none of theirs gets nowhere and is told why."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
import zmq
from zmq.utils.monitor import parse_monitor_message

from segue_core.framing import decode
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import BulkHello, Control, Hello, Welcome, bulk_head
from segue_ctl.certificates import Authority
from segue_daemon.curve import FAILURES
from segue_daemon.gate import MAX_NEWCOMERS
from segue_daemon.tls import GREETED
from support.daemons import DaemonSet
from support.keys import EXPIRED, authority_of, copy_of, make_keys, with_certificate
from support.light_engine import LightEngine
from support.waiting import wait_for

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "cluster"


@pytest.fixture(scope="module")
def keys(folder: Path) -> Path:
    """Folders a, b, c (daemons' keys)."""
    return make_keys(folder, "a", "b", "c", token=False)


@pytest.fixture(scope="module")
def daemons(keys: Path) -> Iterator[DaemonSet]:
    """a and b have keys; c is told of the others, and they of it, but it has none, only a token."""
    running = DaemonSet("a", "b", "c")
    token = running.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    running["c"].config["security"] = {"token_file": str(token)}
    for name in "ab":
        running[name].config["security"] = {"dir": str(keys / name)}
    try:
        for daemon in running.daemons.values():
            daemon.start(ready=False)
        wait_for(lambda: all(d.get("/livez")[0] == 200 for d in running.daemons.values()), "all answer")
        wait_for(lambda: linked(running, "a", "b")["connected"], "a and b are linked")
        yield running
    finally:
        running.stop()


def ask(daemons: DaemonSet, name: str, path: str, *, method: str = "GET", shown: str = "") -> tuple[int, Any]:
    """Status and body of an answer to a request that shows a header of authorization."""
    connection = http.client.HTTPConnection("127.0.0.1", daemons[name].config["http"]["port"], timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Authorization": shown} if shown else {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def linked(daemons: DaemonSet, name: str, peer: str) -> dict[str, Any]:
    """The link of daemon `name` to `peer`, as its status shows it."""
    code, body = ask(daemons, name, "/status", shown=f"Bearer {TOKEN}")
    assert code == 200
    found: dict[str, Any] = next(p for p in json.loads(body)["peers"] if p["peer"] == peer)
    return found


def test_all_but_the_health_checks_needs_the_token(daemons: DaemonSet) -> None:
    """Who may not read what is on the engine may not fence or promote its sequences either."""
    paths = [("GET", path) for path in ("/status", "/metrics", "/v1/watch", "/v1/sequences/s")]
    paths += [("POST", "/v1/sequences/s/promote"), ("POST", "/v1/sequences/s/fence")]
    for method, path in paths:
        for shown in ("", TOKEN, f"Bearer {TOKEN}x", f"bearer{TOKEN}"):
            code, body = ask(daemons, "c", path, method=method, shown=shown)
            assert code == 401 and b"token" in body, path
    assert ask(daemons, "c", "/livez")[0] == 200 and ask(daemons, "c", "/readyz")[0] == 503
    assert ask(daemons, "c", "/v1/sequences/s", shown=f"Bearer {TOKEN}")[0] == 404
    promote = ask(daemons, "c", "/v1/sequences/s/promote", method="POST", shown=f"Bearer {TOKEN}")
    assert promote[0] == 400, "it is let through to where its body is looked at"


def test_what_one_engine_wrote_comes_through_curve_and_tls_to_the_other(daemons: DaemonSet) -> None:
    """Keys change nothing about replication: what is resumed is what was there, byte for byte."""
    a = LightEngine(daemons["a"].socket, "a", incarnation=1, num_blocks=300)
    b = LightEngine(daemons["b"].socket, "b", incarnation=1, num_blocks=300)
    wait_for(lambda: a.exporter.registered and b.exporter.registered, "registered")
    ids = [number * 7 % 5000 for number in range(1500)]  # 2 MB: many TLS records
    a.start("s", ids)
    a.step()
    wait_for(lambda: daemons["b"].watermark("s") == len(ids), "replicated")
    assert b.resume("s", [*ids, 1], 2) == len(ids)
    b.step()
    assert b.wrong_tokens("s") == []
    a.close()
    b.close()


def told(daemons: DaemonSet) -> dict[str, int]:
    """How often each has logged that a handshake failed."""
    return {d.name: d.log.read_text().count("handshake failed") for d in daemons.daemons.values()}


def test_one_side_without_keys_says_so_on_both_sides_and_only_once(daemons: DaemonSet) -> None:
    """A forgotten `security.dir` is found at once: no hanging, no plain text instead, no full log."""
    wait_for(lambda: "some" in linked(daemons, "c", "b")["detail"], "c says that b has keys")
    wait_for(lambda: "other side none" in linked(daemons, "a", "c")["detail"], "a says that c has none")
    assert not linked(daemons, "c", "b")["connected"] and not linked(daemons, "a", "c")["connected"]
    assert linked(daemons, "a", "b")["connected"], "those that have keys are not disturbed"
    wait_for(lambda: all(told(daemons).values()), "each has told that somebody else is different")
    assert told(daemons) == {"a": 1, "b": 1, "c": 1}, "and once only"


class Stranger:
    """A control client with some keys or none; `failure`: whether its handshake was refused."""

    def __init__(self, daemons: DaemonSet, keys: tuple[bytes, bytes] | None, server: bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 10_000
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys
            self.socket.curve_serverkey = server
        self.monitor = self.socket.get_monitor_socket(FAILURES)
        self.monitor.rcvtimeo = 10_000
        self.socket.connect(f"tcp://127.0.0.1:{daemons['b'].config['listen']['control_port']}")

    def hello(self, name: str, incarnation: int = 5) -> None:
        self.socket.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, name, incarnation)))

    def refused(self) -> int:
        """Why, if a reason is given: the other side may also have hung up before it was read."""
        while True:
            event = int(parse_monitor_message(self.monitor.recv_multipart())["event"])
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return event

    def welcome(self) -> Welcome:
        found = decode(self.socket.recv(), Control, peer="b")
        assert isinstance(found, Welcome)
        return found

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.context.destroy()


def pair_of(folder: Path) -> tuple[bytes, bytes]:
    secret = (folder / "daemon.curve").read_bytes().strip()
    return zmq.curve_public(secret), secret


def test_control_is_closed_to_unknown_keys_and_to_none(daemons: DaemonSet, keys: Path) -> None:
    """Whoever is not in `peers` is not heard; the log names the key and does not fill up."""
    server = pair_of(keys / "b")[0]
    unknown = zmq.curve_keypair()
    for pair, event in (
        (unknown, zmq.EVENT_HANDSHAKE_FAILED_AUTH),
        (None, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    ):
        for _ in range(2):
            with Stranger(daemons, pair, server) as stranger:
                stranger.hello("a")
                assert stranger.refused() == event
    log = daemons["b"].log.read_text()
    assert log.count(unknown[0].decode()) == 1 and "not known there" not in log
    assert linked(daemons, "a", "b")["connected"]


def bulk_hello(welcome: Welcome, incarnation: int = 5) -> bytes:
    header = msgspec.msgpack.encode(BulkHello(5, welcome.ticket))
    return bulk_head(header, 0) + header


def client(folder: Path | None, *, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """A TLS client that trusts anybody and shows the certificate in `folder`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    if folder is not None:
        context.load_cert_chain(folder / "daemon.crt", folder / "daemon.key")
    return context


def try_bulk(port: int, context: ssl.SSLContext | None, first: bytes) -> bytes | str:
    """What the daemon answers to the first frame on a bulk connection, or why there is none."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        try:
            if context is not None:
                connection = stack.enter_context(context.wrap_socket(connection))
            connection.sendall(first)
            return connection.recv(100)
        except ssl.SSLError as error:
            return error.reason or "TLS"
        except ConnectionError:
            return b""


def test_the_key_the_name_the_ticket_and_the_certificate_must_be_one_daemons(
    daemons: DaemonSet, folder: Path, keys: Path, tmp_path: Path
) -> None:
    """A daemon of the cluster cannot speak for another one, nor a stranger for any: not with a stolen ticket
    and not with a certificate that is old, of another CA, or of another name."""
    with Stranger(daemons, pair_of(keys / "c"), pair_of(keys / "b")[0]) as link:
        link.hello("a")
        link.hello("c")
        welcome = link.welcome()  # of the second hello: there was no answer to the first
        assert "the key is that of 'c', the name said is 'a'" in daemons["b"].log.read_text()
        port, hello = welcome.bulk_port, bulk_hello(welcome)
        foreign = with_certificate(copy_of(keys / "c", tmp_path / "foreign"), "c", Authority.make(9))
        expired = with_certificate(
            copy_of(keys / "c", tmp_path / "expired"), "c", authority_of(folder), days=EXPIRED
        )
        old = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
        cases: list[tuple[ssl.SSLContext | None, bytes | str]] = [
            (None, b""),  # plain text to the TLS port
            (client(None), "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
            (client(foreign), "TLSV1_ALERT_UNKNOWN_CA"),
            (client(expired), old),
            (client(keys / "c", version=ssl.TLSVersion.TLSv1_2), "TLSV1_ALERT_PROTOCOL_VERSION"),
            (client(keys / "a"), b""),  # one of ours, with a ticket that is not his
            (client(keys / "c"), GREETED),
        ]
        wait_for(
            lambda: try_bulk(port, client(expired), hello) == "SSLV3_ALERT_CERTIFICATE_EXPIRED", "expired"
        )
        assert [try_bulk(port, context, hello) for context, _ in cases] == [answer for _, answer in cases]
        assert "the ticket is that of 'c', the certificate of a" in daemons["b"].log.read_text()


def test_half_handshakes_are_bounded_and_keep_nobody_out(daemons: DaemonSet, keys: Path) -> None:
    """Connections that say nothing, or half of something: the oldest go, and a peer gets in meanwhile."""
    with Stranger(daemons, pair_of(keys / "c"), pair_of(keys / "b")[0]) as link:
        link.hello("c", 6)
        welcome = link.welcome()
        idle = [
            socket.create_connection(("127.0.0.1", welcome.bulk_port), 10) for _ in range(MAX_NEWCOMERS + 6)
        ]
        for number, connection in enumerate(idle):
            connection.sendall(b"\x16\x03\x01\x02\x00" if number % 2 else b"")  # the start of a TLS record
        header = msgspec.msgpack.encode(BulkHello(6, welcome.ticket))
        first = bulk_head(header, 0) + header
        assert try_bulk(welcome.bulk_port, client(keys / "c"), first) == GREETED
        assert idle[0].recv(1) == b"", "the oldest was let go"
        for connection in idle:
            connection.close()
        assert linked(daemons, "a", "b")["connected"]


def test_a_daemon_beyond_loopback_without_keys_does_not_start(keys: Path, tmp_path: Path) -> None:
    """`--check` and the start itself say what is missing and how to get it; nothing listens."""
    config = {"name": "a", "socket": str(tmp_path / "a.sock"), "listen": {"host": "0.0.0.0"}}
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "segue_daemon", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "`listen.host`" in done.stderr and "seguectl keygen" in done.stderr
    assert "security.insecure: true" in done.stderr and "Traceback" not in done.stderr

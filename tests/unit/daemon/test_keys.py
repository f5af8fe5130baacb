"""A daemon's keys: what is wrong with them is said at start, and the door holds whatever stands before it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from segue_core.clock import MonotonicClock
from segue_core.errors import ConfigError, ProtocolError
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.peer import Hello
from segue_core.security import SecuritySettings
from segue_ctl import keygen
from segue_ctl.certificates import Authority
from segue_daemon import gate
from segue_daemon.curve import DOMAIN, zap_answer
from segue_daemon.dial import Peer, control_socket, greet
from segue_daemon.gate import Gate, Hush
from segue_daemon.keys import load_keys, load_protection
from segue_daemon.settings import DaemonSettings, GroupSettings, HttpSettings, ListenSettings, PeerSettings
from segue_daemon.supervise import Tasks
from segue_daemon.tls import SecureReceiver, SecureSender, client_context, server_context
from support.keys import EXPIRED, authority_of, copy_of, make_keys, with_certificate


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "cluster"
    make_keys(folder, "a", "b")
    return folder


@pytest.fixture
def own(cluster: Path, tmp_path: Path) -> Path:
    """A copy of the folder of daemon a."""
    return copy_of(cluster / "daemons" / "a", tmp_path / "a")


def swap(name: str, other: str) -> Callable[[Path, Path], object]:
    return lambda own, cluster: (own / name).write_bytes((cluster / "daemons" / other).read_bytes())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda own, _: (own / "daemon.key").unlink(), r"cannot read .*daemon.key"),
        (lambda own, _: (own / "daemon.key").chmod(0o644), r"others can get at .*daemon.key"),
        (lambda own, _: (own / "daemon.curve").chmod(0o604), r"others can get at .*daemon.curve"),
        (lambda own, _: (own / "daemon.curve").write_text("x" * 39), r"holds no CURVE key"),
        (lambda own, _: (own / "ca.crt").write_text("no"), r"cannot use .*ca.crt"),
        (lambda own, _: (own / "peers/b.curve").unlink(), r"cannot read .*b.curve"),
        (lambda own, _: (own / "peers/b.curve").chmod(0o666), r"others can write .*b.curve"),
        (lambda own, _: (own / "ca.crt").chmod(0o620), r"others can write .*ca.crt"),
        (swap("daemon.curve", "b/daemon.curve"), r"is not the key of 'a'"),
        (swap("peers/b.curve", "a/peers/a.curve"), r"peer 'b' is this daemon's own"),
        (swap("daemon.key", "b/daemon.key"), r"daemon.crt with daemon.key"),
        (lambda own, cluster: with_certificate(own, "b", authority_of(cluster)), r"is for b, not for 'a'"),
        (lambda own, _: with_certificate(own, "a", Authority.make(9)), r"peers would refuse .*issuer"),
        (lambda own, cluster: with_certificate(own, "a", authority_of(cluster), EXPIRED), r"has expired"),
    ],
)
def test_keys_that_peers_would_refuse_are_refused_at_start(
    spoil: Callable[[Path, Path], object], says: str, own: Path, cluster: Path
) -> None:
    """Missing, readable by others, of another daemon, of another CA: one line says which file it is."""
    assert load_keys(own, "a", ["b"]).name == "a"
    spoil(own, cluster)
    with pytest.raises(ConfigError, match=says):
        load_keys(own, "a", ["b"])


def test_a_daemon_that_is_added_is_known_without_a_restart(own: Path, cluster: Path) -> None:
    """Its public key is copied into `peers`; one that is taken away is not known any more."""
    keys = load_keys(own, "a")
    public, _ = zmq.curve_keypair()
    assert keys.owner(public, now_s=0.0) is None
    (own / "peers" / "c.curve").write_bytes(public)
    (own / "peers" / "b.curve").unlink()
    (own / "peers" / "d.curve").write_bytes(b"garbage")
    assert keys.owner(public, now_s=0.5) is None, "looked at once in a while only"
    assert keys.owner(public, now_s=2.0) == "c"
    b = (cluster / "daemons" / "b" / "peers" / "b.curve").read_bytes().strip()
    assert keys.owner(b, now_s=2.0) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"http": HttpSettings(host="0.0.0.0")}, "http.host"),
        ({"listen": ListenSettings(host="10.0.0.1")}, "listen.host"),
        ({"peers": (PeerSettings("b", "10.0.0.2:7201"),)}, r"peers\[\].control of b"),
        ({"group": GroupSettings(rank=1, ranks=2, leader="10.0.0.2:7201")}, "group.leader"),
    ],
)
def test_what_other_hosts_can_reach_needs_keys(changes: dict[str, object], key: str, own: Path) -> None:
    """Refused without keys, taken with them; `insecure: true` opens it and says so."""
    bare = DaemonSettings(name="a", socket="x", **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"`{key}`.*keygen"):
        load_protection(bare)

    def with_security(security: SecuritySettings) -> DaemonSettings:
        return DaemonSettings(name="a", socket="x", security=security, **changes)  # type: ignore[arg-type]

    assert len(load_protection(with_security(SecuritySettings(insecure=True))).openings) == 1
    protected = load_protection(with_security(SecuritySettings(dir=str(own))))
    assert protected.keys is not None and protected.tokens and not protected.openings


def test_libzmq_is_told_who_a_key_belongs_to_and_nothing_else_passes() -> None:
    """Whatever is asked, there is an answer, and it is yes for a known CURVE key only."""
    public, known = bytes(range(32)), {z85.encode(bytes(range(32))): "a"}
    good = [b"1.0", b"7", DOMAIN, b"10.0.0.1", b"id", b"CURVE", public]
    assert zap_answer(good, known.get)[0] == [b"1.0", b"7", b"200", b"OK", b"a", b""]
    for place, value in (
        (0, b"2.0"),
        (2, b"other"),
        (5, b"NULL"),
        (5, b"PLAIN"),
        (6, bytes(32)),
        (6, public[:31]),
    ):
        answer, why = zap_answer([*good[:place], value, *good[place + 1 :]], known.get)
        assert answer[2] == b"400" and answer[4] == b"" and why
    for frames in ([], good[:4], [*good, b"more"]):
        assert zap_answer(frames, known.get)[0][2] == b"400"


async def meet(server: Path, client: Path, expected: str) -> frozenset[str]:
    """A writer that expects `expected` meets a receiver; the names that the receiver sees."""
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    sender = SecureSender(one, client_context(client))
    receiver = SecureReceiver(other, server_context(server))
    try:
        async with asyncio.timeout(10):
            accepting = asyncio.create_task(receiver.handshake())
            try:
                await sender.handshake(expected)
            finally:
                sender.close() if not accepting.done() else None
                await asyncio.gather(accepting, return_exceptions=True)
            return receiver.names
    finally:
        sender.close()
        receiver.close()


async def test_a_writer_ships_only_to_the_peer_that_it_means(cluster: Path, own: Path) -> None:
    """A daemon of the cluster that answers in another's place gets no data, nor does one of another CA."""
    daemons = cluster / "daemons"
    with pytest.raises(ProtocolError, match="peer c shows a certificate of b"):
        await meet(daemons / "b", daemons / "a", "c")
    with_certificate(own, "b", Authority.make(9))
    with pytest.raises(ProtocolError, match="certificate not accepted"):
        await meet(own, daemons / "a", "b")


async def test_a_public_key_that_is_out_of_date_is_said_and_not_waited_for(cluster: Path, own: Path) -> None:
    """After `keygen --force` a peer may still have the old one: the link's status says what to look at."""
    b = load_keys(cluster / "daemons" / "b", "b")
    (own / "peers" / "b.curve").write_bytes(zmq.curve_keypair()[0])
    a, context, tasks = load_keys(own, "a"), zmq.asyncio.Context(), Tasks()
    door, server = Gate(b, context, MonotonicClock(), tasks), context.socket(zmq.ROUTER)
    door.guard(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    control = control_socket(context, a, "b")
    try:
        with pytest.raises(ProtocolError, match="another one than the file in `peers`"):
            hello = Hello(PROTOCOL_VERSION, "a", 1)
            await greet(control, hello, Peer("b", f"127.0.0.1:{port}", 30, a))
    finally:
        await tasks.end()
        door.close()
        context.destroy(linger=0)


async def test_who_does_not_show_who_he_is_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a deadline; and at once if many others come, the one that stood there longest first."""
    context = zmq.asyncio.Context()
    door = Gate(None, context, MonotonicClock(), Tasks())
    monkeypatch.setattr(gate, "MAX_NEWCOMERS", 2)
    ended: list[int] = []

    async def stand(number: int) -> None:
        try:
            async with door.newcomer("x"):
                await asyncio.Event().wait()
        except TimeoutError:
            ended.append(number)

    tasks = [asyncio.create_task(stand(number)) for number in range(4)]
    async with asyncio.timeout(4):  # less than the deadline
        while len(ended) < 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert ended == [0, 1]
    monkeypatch.setattr(gate, "NEWCOMER_S", 0.01)
    await stand(4)
    assert ended[-1] == 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.term()


def test_strangers_do_not_fill_the_log() -> None:
    """The same reason once a minute, and a bounded number of different ones."""
    hush = Hush()
    assert hush.is_news("10.0.0.1", "garbage", 0) and not hush.is_news("10.0.0.1", "garbage", 1)
    assert hush.is_news("10.0.0.2", "garbage", 2)
    assert sum(hush.is_news("10.0.0.3", f"header of {n} bytes", 3) for n in range(1000)) < 100
    assert hush.is_news("10.0.0.1", "garbage", int(61e9))


def test_made_keys_are_what_a_daemon_wants(tmp_path: Path) -> None:
    """Also for the longest and oddest names that the configuration allows."""
    names = ["x" * 64, "A_b-c.d", "10.0.0.1", "_"]
    keygen.make(tmp_path / "k", names)
    for name in names:
        assert (
            load_keys(tmp_path / "k" / "daemons" / name, name, [n for n in names if n != name]).name == name
        )

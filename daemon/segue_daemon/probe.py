"""The daemon's part of `seguectl doctor`: can its peers be reached, and do they take this daemon for itself?

    python -m segue_daemon.probe --config daemon.yaml

Uses the settings, keys and sockets of the daemon itself, beside it or instead of it. Invariant: peers notice
nothing. The greeting has version 0, which no release speaks: it is answered like any, and takes nobody's
place; the connection for replicas ends after its handshake.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import ssl
import sys
import time
from pathlib import Path

import msgspec
import zmq.asyncio

from segue_core.errors import ConfigError, SegueError
from segue_core.framing import decode
from segue_core.messages.peer import Control, Ping, Pong, Welcome
from segue_core.messages.probe import PEERS_AT_ONCE, Doing, PeerFound, PeersFound, say
from segue_core.settings import load_settings
from segue_daemon.dial import Peer, control_socket, greet, hello_of
from segue_daemon.keys import Keys, load_protection
from segue_daemon.settings import DaemonSettings
from segue_daemon.tls import SecureSender, rehearse
from segue_daemon.wire import encode

ASKING_VERSION = 0
"""Of a greeting that only asks: see `Receiver._greet`."""
DAY_S = 86_400


async def look(settings: DaemonSettings, keys: Keys | None) -> PeersFound:
    """Ask all peers, some at a time."""
    context = zmq.asyncio.Context()
    turns = asyncio.Semaphore(PEERS_AT_ONCE)
    wanted = [(peer.name, peer.control, False) for peer in settings.peers]
    if settings.group.leader:
        wanted.append((settings.name, settings.group.leader, True))

    async def ask(name: str, address: str, leader: bool) -> PeerFound:
        found = PeerFound(name, address, leader, encrypted=keys is not None)
        peer = Peer(name, address, settings.timeouts.peer_ms / 1000, keys)
        async with turns:
            return await _ask(found, peer, settings, context)

    try:
        found = await asyncio.gather(*(ask(*one) for one in wanted))
    finally:
        context.destroy(linger=0)
    return PeersFound(tuple(found), None if keys is None else _days_left(keys))


async def _ask(
    found: PeerFound, peer: Peer, settings: DaemonSettings, context: zmq.asyncio.Context
) -> PeerFound:
    """`found`, with what this peer says."""
    reached = "control"
    try:
        await _connect(peer.address, peer.peer_s)  # ZeroMQ would not say that nobody listens
        control = control_socket(context, peer.keys, peer.name)
        try:
            welcome = await _greet(control, peer, settings, leader=found.leader)
            control_ms = await _round_trip(control, peer)
        finally:
            control.close()
        found = msgspec.structs.replace(found, control_ms=control_ms)
        if not found.leader:  # ranks of one engine send each other no replicas
            reached = "bulk"
            await _try_bulk(welcome, peer)
            found = msgspec.structs.replace(found, bulk=True)
    except TimeoutError:
        hint = "is it running, is the address right, does a firewall stand between?"
        error = f"{reached}: no answer within {peer.peer_s:g} s"
        return msgspec.structs.replace(found, error=error, hint=hint)
    except SegueError as error:
        return msgspec.structs.replace(found, error=error.args[0], hint=error.hint)
    except OSError as error:
        hint = "let this port through to that host" if reached == "bulk" else ""
        said = os.strerror(error.errno) if error.errno else error.strerror or type(error).__name__
        return msgspec.structs.replace(found, error=f"{reached}: {said}", hint=hint)
    return found


async def _connect(address: str, timeout_s: float) -> None:
    """Raise OSError unless somebody listens there."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(host, int(port))
    writer.close()


async def _greet(
    control: zmq.asyncio.Socket, peer: Peer, settings: DaemonSettings, *, leader: bool
) -> Welcome:
    """Where `peer` takes replicas. A leader is of another rank than this daemon, a peer of the same."""
    hello = hello_of(settings, 0, ("", ""))
    rank = 0 if leader else hello.rank
    return await greet(control, msgspec.structs.replace(hello, version=ASKING_VERSION, rank=rank), peer)


async def _round_trip(control: zmq.asyncio.Socket, peer: Peer) -> float:
    """Milliseconds that a question takes on the connection as it stands now."""
    begun_ns = time.monotonic_ns()
    async with asyncio.timeout(peer.peer_s):
        await control.send(encode(Ping(1)))
        while not isinstance(decode(await control.recv(), Control, peer=peer.name), Pong):
            continue
    return round((time.monotonic_ns() - begun_ns) / 1e6, 3)


async def _try_bulk(welcome: Welcome, peer: Peer) -> None:
    """Open the connection for replicas until both sides know each other. Raises OSError, ProtocolError."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    opened: socket.socket | SecureSender = connection
    try:
        async with asyncio.timeout(peer.peer_s):
            address = (peer.address.rpartition(":")[0], welcome.bulk_port)
            await asyncio.get_running_loop().sock_connect(connection, address)
            if peer.keys is None:
                return
            other = connection.dup()
            try:
                opened = secured = SecureSender(connection, peer.keys.client)
                await secured.handshake(peer.name)
                # Whether this side's certificate is refused shows only after the handshake. Nothing more is
                # said: the peer then hangs up, or says why it does.
                other.shutdown(socket.SHUT_WR)
                await secured.read_byte()
            finally:
                other.close()
    finally:
        opened.close()


def _days_left(keys: Keys) -> int:
    """How long this daemon's certificate is still valid."""
    shown = rehearse(keys.server, keys.client)
    return int((ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()) // DAY_S)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m segue_daemon.probe", description="For seguectl doctor.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(arguments.config, DaemonSettings, prefix="SEGUE_DAEMON")
        keys = load_protection(settings).keys
    except ConfigError as error:
        say(PeersFound(error=error.args[0], hint=error.hint))
        return 0
    say(Doing(f"asking {len(settings.peers)} peers"))
    say(asyncio.run(look(settings, keys)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

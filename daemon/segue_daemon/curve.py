"""CURVE on the control channel: options of its sockets, who is let in (ZAP, RFC 27), why a handshake failed.

libzmq asks over `inproc://zeromq.zap.01` about each client's key; the name that is answered comes with every
message of that client (`User-Id`). Without a handler libzmq would let everybody in: `zap_enforce_domain`
makes that nobody. Holds no policy but this: a client is let in if its public key is known, under the name it
is known by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from segue_core.errors import ProtocolError
from segue_daemon.keys import Keys

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"segue"
HANDSHAKE_MS = 5_000
MAX_HANGUPS = 5
HANGS_UP = "the other side hangs up in the handshake"
HANGS_UP_ON_KEYS = f"{HANGS_UP}: its key may be another one than the file in `peers` says"
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WRONG_SERVER_KEY = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
_OTHER_MECHANISM = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


def secure_server(control: zmq.asyncio.Socket, keys: Keys) -> None:
    """Only clients that `serve_zap` lets in. Call before it is bound."""
    control.curve_server = True
    control.curve_secretkey = keys.curve_secret
    control.zap_domain = DOMAIN
    control.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    control.handshake_ivl = HANDSHAKE_MS


def secure_client(control: zmq.asyncio.Socket, keys: Keys, peer: str) -> None:
    """Connect to `peer` and nobody else. Raises ConfigError if its key is not there."""
    control.curve_serverkey = keys.public_key(peer)
    control.curve_publickey = keys.curve_public
    control.curve_secretkey = keys.curve_secret


def zap_answer(frames: list[bytes], owner: Callable[[bytes], str | None]) -> tuple[list[bytes], str]:
    """The answer to one question of libzmq, and why it is a refusal (empty: let in).

    `frames`: version, request id, domain, address, routing id, mechanism, 32 bytes of public key; the answer:
    version, request id, status, text, user id, metadata.
    """
    number, problem, name = b"", "", None
    if len(frames) < 6 or frames[0] != ZAP_VERSION:
        problem = "a question that is not ZAP 1.0"
    else:
        number, domain, mechanism = frames[1], frames[2], frames[5]
        if domain != DOMAIN or mechanism != b"CURVE" or len(frames) != 7 or len(frames[6]) != 32:
            problem = f"not CURVE but {mechanism[:16]!r}"
        else:
            public = z85.encode(frames[6])
            name = owner(public)
            problem = "" if name else f"unknown public key {public.decode()}"
    status, text = (b"400", b"unknown key") if name is None else (b"200", b"OK")
    return [ZAP_VERSION, number, status, text, (name or "").encode(), b""], problem


async def serve_zap(
    zap: zmq.asyncio.Socket, owner: Callable[[bytes], str | None], refused: Callable[[str, str], None]
) -> None:
    """Answer for ever on a ROUTER bound to `ZAP_ADDRESS`. `refused(address, why)` hears of each refusal."""
    while True:
        envelope, _, *frames = await zap.recv_multipart()
        answer, problem = zap_answer(frames, owner)
        if problem:
            refused(frames[3].decode(errors="replace") if len(frames) > 3 else "?", problem)
        await zap.send_multipart([envelope, b"", *answer])


def proven_name(frame: zmq.Frame) -> str:
    """Whose key the connection has that `frame` came over. Raises ProtocolError if there is none."""
    try:
        return str(frame.get("User-Id"))
    except (zmq.ZMQError, KeyError) as error:
        raise ProtocolError("control: a message without a key") from error


def failure(event: int, value: int, *, secured: bool) -> str:
    """Why a handshake failed, for people; empty: the other side hung up, for whatever reason. `secured`: this
    side has keys."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "this daemon's public key is not known there: copy it into its folder `peers`"
    if value == _OTHER_MECHANISM:
        here, there = ("keys", "none") if secured else ("no keys", "some")
        return f"this daemon has {here} (security.dir), the other side {there}"
    if value == _WRONG_SERVER_KEY:
        return "the other side has another public key for this daemon"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return ""
    return f"broken handshake ({value:#x})"


class Monitor:
    """Hears of failed handshakes of one socket. Closed before its socket, else descriptors leak."""

    def __init__(self, control: zmq.asyncio.Socket, *, secured: bool, listens: bool = False) -> None:
        """`secured`: it has keys. `listens`: others connect to it."""
        self._control = control
        self._secured = secured
        self._listens = listens
        self._monitor = control.get_monitor_socket(FAILURES)

    async def failure(self) -> str:
        """The next failure that is worth saying. Which side closes first is a race: who hangs up without a
        reason may have one the next time, or he does it again and again."""
        hangups = 0
        while self._listens or hangups < MAX_HANGUPS:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if self._listens and event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                continue  # `serve_zap` has said whom it refused
            if problem := failure(event["event"], event["value"], secured=self._secured):
                return problem
            hangups += 1
        return HANGS_UP_ON_KEYS if self._secured else HANGS_UP

    def close(self) -> None:
        """Stop. Nobody may be waiting on it."""
        self._control.disable_monitor()
        self._monitor.close(linger=0)


async def answer_or_failure(answer: asyncio.Task[bytes], monitor: Monitor, *, peer: str) -> bytes:
    """What `answer` brings, unless the handshake fails before. Raises ProtocolError then."""
    failing = asyncio.create_task(monitor.failure())
    try:
        await asyncio.wait((answer, failing), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ProtocolError(f"control to peer {peer}: {failing.result()}")
        return answer.result()
    finally:
        for task in (answer, failing):
            task.cancel()
        await asyncio.gather(answer, failing, return_exceptions=True)

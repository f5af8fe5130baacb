"""The door of the receiver: who may come in on control and on bulk, and how many may stand in it.

Owns the keys' part of the peer channel's receiving side (CURVE and its ZAP handler, TLS), the bound on
connections that have not shown yet who they are, and what is logged of strangers. Invariants: with keys,
nothing is taken from anybody who has not proven his name, on both channels the same one; never plain text
instead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import zmq
import zmq.asyncio

from segue_core.clock import Clock
from segue_core.errors import ProtocolError
from segue_daemon.curve import ZAP_ADDRESS, Monitor, proven_name, secure_server, serve_zap
from segue_daemon.keys import Keys
from segue_daemon.supervise import Tasks, supervise
from segue_daemon.tls import GREETED, SecureReceiver
from segue_daemon.wire import CONTROL_UNREAD_BYTES

log = structlog.get_logger()

NEWCOMER_S = 5.0
"""Within this a bulk connection has shown a ticket (and before that, its certificate)."""
MAX_NEWCOMERS = 64
"""Bulk connections that have not; when there are more, the oldest goes: a peer needs a moment only."""
MAX_CONTROL_BYTES = 1 << 20
MAX_ANSWERS = 10_000
"""Answers that one peer has not read."""
KEEPALIVE_S = 30
KEEPALIVE_PROBES = 4
"""So often a silent control connection's host is asked whether it is there: its daemon may be stopped."""
HUSH_S = 60.0
MAX_HUSHED = 64


class Hush:
    """Says what is new: the same thing once in `HUSH_S`, and at most `MAX_HUSHED` things."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], int] = {}

    def is_news(self, address: str, what: str, now_ns: int) -> bool:
        """Whether to say it now."""
        old_ns = now_ns - int(HUSH_S * 1e9)
        while self._said and next(iter(self._said.values())) < old_ns:
            del self._said[next(iter(self._said))]
        if (address, what) in self._said or len(self._said) >= MAX_HUSHED:
            return False
        self._said[address, what] = now_ns
        return True


def control_router(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    """The receiver's control socket, not bound yet."""
    control = context.socket(zmq.ROUTER)
    control.linger = 0
    control.router_mandatory = True
    control.maxmsgsize = MAX_CONTROL_BYTES
    control.sndhwm, control.rcvhwm = MAX_ANSWERS, CONTROL_UNREAD_BYTES // MAX_CONTROL_BYTES
    control.tcp_keepalive = 1  # a host that is gone would leave its connection here for good
    control.tcp_keepalive_idle = control.tcp_keepalive_intvl = KEEPALIVE_S
    control.tcp_keepalive_cnt = KEEPALIVE_PROBES
    return control


class Gate:
    """The door of one receiver. Without keys everybody may come in."""

    def __init__(self, keys: Keys | None, context: zmq.asyncio.Context, clock: Clock, tasks: Tasks) -> None:
        self._keys = keys
        self._context = context
        self._clock = clock
        self._tasks = tasks
        self._zap: zmq.asyncio.Socket | None = None
        self._monitor: Monitor | None = None
        self._hush = Hush()
        self._newcomers: dict[asyncio.Timeout, str] = {}

    def guard(self, control: zmq.asyncio.Socket) -> None:
        """Watch over the control socket. Call before it is bound."""
        keys = self._keys
        if keys is not None:
            zap = self._zap = self._context.socket(zmq.ROUTER)
            zap.linger = 0
            zap.bind(ZAP_ADDRESS)
            secure_server(control, keys)
            self._tasks.spawn(supervise("zap", lambda: serve_zap(zap, self._owner, self._refused)))
        self._monitor = Monitor(control, secured=keys is not None, listens=True)
        self._tasks.spawn(supervise("handshakes", self._hear_failures))

    def close(self) -> None:
        """Stop watching. The tasks have ended, and control is still open."""
        if self._monitor is not None:
            self._monitor.close()
        if self._zap is not None:
            self._zap.close()

    # -- control ------------------------------------------------------------------------------

    def _owner(self, public: bytes) -> str | None:
        assert self._keys is not None
        return self._keys.owner(public, self._clock.now_ns() / 1e9)

    def _refused(self, address: str, why: str) -> None:
        self.say("control connection refused", address, why)

    async def _hear_failures(self) -> None:
        assert self._monitor is not None
        while True:
            self.say("control handshake failed", "not known", await self._monitor.failure())

    def check_name(self, name: str, frame: zmq.Frame) -> None:
        """Raise ProtocolError unless the control message in `frame` came from the daemon `name`."""
        if self._keys is not None and (proven := proven_name(frame)) != name:
            raise ProtocolError(f"control: the key is that of {proven!r}, the name said is {name!r}")

    # -- bulk ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def newcomer(self, peer: str) -> AsyncIterator[None]:
        """While a bulk connection has not shown who it is. Raises TimeoutError if that takes too long, or if
        too many others come meanwhile."""
        async with asyncio.timeout(NEWCOMER_S) as patience:
            if len(self._newcomers) >= MAX_NEWCOMERS:
                oldest = next(iter(self._newcomers))
                self._newcomers.pop(oldest)
                oldest.reschedule(asyncio.get_running_loop().time())
            self._newcomers[patience] = peer
            try:
                yield
            finally:
                self._newcomers.pop(patience, None)

    async def admit(self, connection: socket.socket) -> socket.socket | SecureReceiver:
        """The connection to read from: under TLS if there are keys. Raises ProtocolError."""
        if self._keys is None:
            return connection
        secured = SecureReceiver(connection, self._keys.server)
        await secured.handshake()
        return secured

    async def take(self, connection: socket.socket | SecureReceiver, name: str) -> None:
        """The connection showed the ticket of `name`: it may stay if its certificate is that of `name` too.
        Raises ProtocolError."""
        if isinstance(connection, SecureReceiver):
            if name not in connection.names:
                shown = ", ".join(sorted(connection.names)) or "nobody"
                raise ProtocolError(f"the ticket is that of {name!r}, the certificate of {shown}")
            await connection.sendall(GREETED)

    def say(self, event: str, address: str, why: str) -> None:
        """Log what a stranger did, once in a while: strangers may be many."""
        if self._hush.is_news(address, why, self._clock.now_ns()):
            log.warning(event, peer=address, reason=why)

"""Keeps the engine registered with the daemon beside it: connects, registers, listens, and starts again.

A daemon thread with deadlines of its own; the engine never waits for it. Invariant: each registration
brings a new ring, so that no daemon ever reads a record that was meant for another.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from segue_core.credentials import check_server
from segue_core.errors import ProtocolError
from segue_core.framing import MAX_FDS, close_fds, decode, encode_frame, recv_with_fds, send_with_fds
from segue_core.lifeline import Lifeline
from segue_core.messages.local import (
    MAX_DETAIL_CHARS,
    Fenced,
    Refused,
    Register,
    Registered,
    Tier,
    TierMapped,
    ToEngine,
)
from segue_core.shared_memory import read_only
from segue_shim.channel import Channel
from segue_shim.cuda_driver import CudaCallError
from segue_shim.cuda_side import CudaSide
from segue_shim.loader import Arena
from segue_shim.options import ExporterOptions

logger = logging.getLogger("segue_shim")

PEER = "segue-daemon"
MAX_REPLY_BYTES = 1 << 16
GPU_REPLY_TIMEOUT_S = 45.0
"""A daemon may take so long to open memory on a GPU: above its own deadlines for that."""


class Listener(NamedTuple):
    """Who is told, from the registrar's thread: `up` takes the channel over, `down` gives it up."""

    up: Callable[[Channel], None]
    down: Callable[[], None]
    fenced: Callable[[str, int], None]


class RefusedError(Exception):
    """The daemon said no; `retry`: it may say yes later."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class Registrar:
    """Registers `message` with `page_fds` at `socket_path` for as long as the engine lives."""

    def __init__(
        self,
        socket_path: str,
        message: Register,
        page_fds: tuple[int, ...],
        listener: Listener,
        options: ExporterOptions,
        gpu: CudaSide | None = None,
    ) -> None:
        """`gpu`: where the pages are, if they are not host memory with `page_fds`."""
        self._gpu = gpu
        self._path = socket_path
        self._message = message
        self._page_fds = page_fds
        self._listener = listener
        self._options = options
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._absent = (
            f"no segue-daemon at {socket_path}: start it there; until then the engine runs unprotected"
        )
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="segue-registrar", daemon=True)

    def start(self) -> None:
        """Begin trying, at once and until `close`."""
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Hang up and stop; safe to call twice."""
        self._hang_up(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def leave(self, timeout_s: float) -> bool:
        """Hang up, and wait until the daemon has let go of everything; False if it did not in time. What the
        thread still does on this side, page-locking a large arena, is not waited for."""
        self._stopped.set()  # no other connection comes after the one that is watched
        watched: socket.socket | None = None
        with self._lock, contextlib.suppress(OSError):  # without a descriptor the thread says when
            watched = self._connection.dup() if self._connection is not None else None
        self._hang_up(socket.SHUT_WR)
        if watched is None:
            if self._thread.is_alive():
                self._thread.join(timeout_s)
            left = not self._thread.is_alive()
        else:
            with watched:
                left = _closed_within(watched, timeout_s)
                _discard_unread(watched)
        self.close(0.0)
        return left

    def _hang_up(self, how: int) -> None:
        self._stopped.set()
        with self._lock:
            if self._connection is not None:
                # An error means that it was gone already.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(how)

    def _run(self) -> None:
        pause_ms = self._options.retry_min_ms
        while not self._stopped.is_set():
            try:
                registered = self._serve_once()
            except RefusedError as refusal:
                self._warn(f"segue-daemon at {self._path} refuses this engine: {refusal}")
                registered = False
                if not refusal.retry:
                    pause_ms = self._options.retry_refused_ms
            except (FileNotFoundError, ConnectionRefusedError):
                self._warn(self._absent)
                registered = False
            except (OSError, ProtocolError) as error:
                self._warn(f"segue-daemon at {self._path} does not register this engine: {error!r}")
                registered = False
            except Exception:
                logger.exception("segue: the registrar failed; the engine runs on, unprotected")
                registered = False
                pause_ms = self._options.retry_refused_ms
            if registered:
                pause_ms = self._options.retry_min_ms
            self._stopped.wait(pause_ms / 1000)
            pause_ms = min(2 * pause_ms, self._options.retry_max_ms)

    def _serve_once(self) -> bool:
        """One connection from beginning to end. True once it had been registered.

        This thread holds the lifeline meanwhile: if the process is killed, the daemon knows at once.
        """
        lifeline = Lifeline()
        lifeline.hold()
        try:
            return self._converse(lifeline)
        finally:
            lifeline.let_go()

    def _converse(self, lifeline: Lifeline) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            with self._lock:
                self._connection = connection
            try:
                channel = self._register(connection, lifeline)
                if self._stopped.is_set():
                    channel.close()
                    return True
                self._trouble = ""
                logger.info("segue: registered with segue-daemon at %s", self._path)
                arena = channel.arena
                self._listener.up(channel)
                try:
                    if arena is not None:
                        arena.prefault()
                        if self._gpu is not None:
                            self._gpu.loader.prepare(arena)
                    self._listen(connection, arena)
                finally:
                    if not self._stopped.is_set():  # else whoever stopped it has given the channel up
                        self._listener.down()
                        logger.warning(
                            "segue: lost segue-daemon at %s: unprotected till it is back", self._path
                        )
                        self._trouble = self._absent
                    if arena is not None:
                        arena.drop_tier()  # before the next one comes: an idle engine keeps its channel
                return True
            finally:
                with self._lock:
                    self._connection = None

    def _register(self, connection: socket.socket, lifeline: Lifeline) -> Channel:
        """Raises OSError, ProtocolError or RefusedError; TimeoutError is an OSError."""
        connection.settimeout(self._options.connect_timeout_ms / 1000)
        connection.connect(self._path)
        check_server(connection)
        channel = Channel(self._options.ring_bytes)
        try:
            gpu = self._gpu
            pages = [read_only(fd) for fd in (self._page_fds if gpu is None else (gpu.timeline_fd,))]
            try:
                fds = [channel.ring_fd, channel.doorbell_fd, lifeline.fd, *pages]
                with self._lock:  # whoever has stopped this may close the memory's descriptors
                    if self._stopped.is_set():
                        raise ConnectionAbortedError("no longer wanted")
                    fds += gpu.memory_fds if gpu is not None else ()
                    send_with_fds(connection, self._message, fds)
            finally:
                close_fds(pages)
            reply_s = self._options.reply_timeout_ms / 1000
            connection.settimeout(max(reply_s, GPU_REPLY_TIMEOUT_S) if gpu is not None else reply_s)
            channel.arena = self._receive_arena(connection)
        except BaseException:
            channel.close()
            raise
        return channel

    def _receive_arena(self, connection: socket.socket) -> Arena:
        body, fds = recv_with_fds(connection, peer=PEER, limit=MAX_REPLY_BYTES)
        try:
            if not body:
                raise ProtocolError(f"{PEER}: hung up without an answer")
            reply = decode(body, ToEngine, peer=PEER)
            if isinstance(reply, Refused):
                raise RefusedError(reply.reason, reply.retry)
            if not isinstance(reply, Registered) or len(fds) != 1:
                raise ProtocolError(f"{PEER}: answered {type(reply).__name__} with {len(fds)} descriptors")
            return Arena(fds[0], reply.arena_bytes, reply.incarnation)
        finally:
            close_fds(fds)

    def _listen(self, connection: socket.socket, arena: Arena | None) -> None:
        """Until the daemon hangs up, which it does once it has let go."""
        connection.settimeout(None)
        while True:
            try:
                body, fds = recv_with_fds(connection, peer=PEER, limit=MAX_REPLY_BYTES)
            except ConnectionError:
                return
            try:
                if not body:
                    return
                message = decode(body, ToEngine, peer=PEER)
                if isinstance(message, Fenced):
                    self._listener.fenced(message.seq, message.epoch)
                elif isinstance(message, Refused):
                    raise RefusedError(message.reason, message.retry)
                elif isinstance(message, Tier) and arena is not None:
                    self._take_tier(message, fds, arena)
            finally:
                close_fds(fds)

    def _take_tier(self, message: Tier, fds: list[int], arena: Arena) -> None:
        """The daemon has GPU memory with copies of blocks, or none any more."""
        arena.drop_tier()
        if self._stopped.is_set() or self._gpu is None or not message.nbytes or len(fds) != 1:
            return
        try:
            arena.put_tier(self._gpu.loader.map_tier(fds[0], message.number, message.nbytes))
        except CudaCallError as error:
            logger.info("segue: the daemon's GPU tier cannot be mapped: %s: %s", error.call, error.name)
            self.tell(TierMapped(message.number, f"{error.call}: {error.name}"))
        except Exception as error:  # the registration is worth more than the tier
            logger.exception("segue: the daemon's GPU tier cannot be mapped")
            self.tell(TierMapped(message.number, repr(error)[:MAX_DETAIL_CHARS]))
        else:
            self.tell(TierMapped(message.number))

    def tell(self, message: TierMapped) -> None:
        """Say something to the daemon, from any thread. Waits for nobody: if it does not read, it misses
        this."""
        frame, connection = encode_frame(message), self._connection
        with contextlib.suppress(OSError):
            if connection is not None and connection.send(frame, socket.MSG_DONTWAIT) < len(frame):
                connection.shutdown(socket.SHUT_RDWR)  # half a frame is none

    def _warn(self, trouble: str) -> None:
        """Log a state once, not every attempt that finds it unchanged."""
        if trouble != self._trouble and not self._stopped.is_set():
            self._trouble = trouble
            logger.warning("segue: %s", trouble)


def _closed_within(connection: socket.socket, timeout_s: float) -> bool:
    """Wait until the other side of a connection that was hung up here has hung up, too."""
    poll = select.poll()
    poll.register(connection, 0)  # the end is told in any case
    return bool(poll.poll(timeout_s * 1000))


def _discard_unread(connection: socket.socket) -> None:
    """A descriptor that nobody has taken out of it keeps memory as long as the connection is open."""
    space = socket.CMSG_SPACE(MAX_FDS * 4)
    with contextlib.suppress(OSError):
        while True:
            data, ancillary, _, _ = connection.recvmsg(1 << 16, space, socket.MSG_DONTWAIT)
            for _, _, payload in ancillary:
                close_fds(list(memoryview(payload).cast("i")))
            if not data:
                return

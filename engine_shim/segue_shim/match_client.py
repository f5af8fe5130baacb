"""Asks the daemon of one rank what KV it holds for a request: the scheduler's side of the local channel.

A question and its answer are two calls, so that the daemons of a group work on it at the same time (see
`match_group`). Owned by the scheduler's thread. Invariant: no call takes longer than its deadline, and none
raises; a daemon that is absent, slow or talks nonsense holds nothing.
"""

from __future__ import annotations

import logging
import socket

from segue_core.clock import Clock, MonotonicClock
from segue_core.credentials import check_server
from segue_core.errors import ProtocolError
from segue_core.framing import LENGTH, close_fds, decode, encode_frame
from segue_core.messages import PROTOCOL_VERSION
from segue_core.messages.local import Attach, Match, Matched, Refused, Registered, Release, ToDaemon, ToEngine
from segue_shim.options import ExporterOptions

logger = logging.getLogger("segue_shim")

PEER = "segue-daemon"
MAX_REPLY_BYTES = 16 << 20
RELEASE_TIMEOUT_NS = 5_000_000


class MatchClient:
    """A lazy connection. `failures` counts calls that got no answer; `daemon` is whose answers these are."""

    def __init__(
        self,
        socket_path: str,
        *,
        engine: str,
        incarnation: int,
        fingerprint: bytes,
        block_size: int,
        rank: int = 0,
        ranks: int = 1,
        options: ExporterOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._path = socket_path
        self._attach = Attach(version=PROTOCOL_VERSION, engine=engine, incarnation=incarnation)
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._rank = rank
        self._ranks = ranks
        self._options = options or ExporterOptions()
        self._clock = clock or MonotonicClock()
        self._connection: socket.socket | None = None
        self._buffer = bytearray()
        self._request = 0
        self._question: Match | None = None
        self._fresh = False
        self._quiet_until_ns = 0
        self._outage = False
        self.daemon = 0
        self.failures = 0

    def match(
        self, *, seq: str, epoch: int, salt: bytes, token_ids: bytes, computed: int, limit: int
    ) -> Matched | None:
        """What the daemon holds of `token_ids` beyond `computed`, at most `limit` tokens; None: nothing.

        The answer's lease must be released.
        """
        now = self._clock.now_ns()
        deadline = now + self._options.match_timeout_ms * 1_000_000
        if self.quiet(now) or not self.ask(
            deadline,
            seq=seq,
            epoch=epoch,
            salt=salt,
            token_ids=token_ids,
            computed=computed,
            limit=limit,
        ):
            return None
        return self.answer(deadline)

    def quiet(self, now_ns: int) -> bool:
        """Whether it is not to be asked now, because it failed a moment ago."""
        return now_ns < self._quiet_until_ns

    def ask(
        self, deadline: int, *, seq: str, epoch: int, salt: bytes, token_ids: bytes, computed: int, limit: int
    ) -> bool:
        """Send the question; False: the daemon cannot be reached. True: `answer` must be called next."""
        self._request += 1
        self._question = Match(
            request=self._request,
            seq=seq,
            epoch=epoch,
            fingerprint=self._fingerprint,
            salt=salt,
            token_ids=token_ids,
            computed=computed,
            limit=limit,
            rank=self._rank,
            ranks=self._ranks,
        )
        self._fresh = self._connection is None
        try:
            self._put(self._question, deadline)
        except (OSError, ProtocolError) as error:
            self._give_up(error)
            return False
        return True

    def answer(self, deadline: int) -> Matched | None:
        """The answer to the question that was asked last; None: nothing is held, or none came in time."""
        question, self._question = self._question, None
        assert question is not None
        try:
            matched = self._get(question, deadline)
        except (OSError, ProtocolError) as error:
            self._give_up(error)
            return None
        if self._outage:
            self._outage = False
            logger.info("segue: segue-daemon answers again")
        if matched.tokens <= question.computed:
            self.release(matched.lease, 0)
            return None
        return matched

    def release(self, lease: int, loaded: int) -> None:
        """`lease` is over, `loaded` tokens were used. If the daemon does not listen: leases end anyway."""
        if self._connection is None or not lease:
            return
        try:
            self._send(Release(lease=lease, loaded=loaded), self._clock.now_ns() + RELEASE_TIMEOUT_NS)
        except OSError:
            self.close()

    def close(self) -> None:
        """Hang up; the next `match` connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._buffer.clear()

    def _put(self, question: Match, deadline: int) -> None:
        if self._connection is None:
            self._connect(deadline)
        try:
            self._send(question, deadline)
        except OSError as error:
            self._connect_anew(error, deadline)
            self._send(question, deadline)

    def _get(self, question: Match, deadline: int) -> Matched:
        try:
            return self._receive_answer(question, deadline)
        except OSError as error:
            self._connect_anew(error, deadline)
            self._send(question, deadline)
            return self._receive_answer(question, deadline)

    def _connect_anew(self, error: OSError, deadline: int) -> None:
        """A daemon that was restarted is found out by using the old connection; else raises `error`."""
        if self._fresh or isinstance(error, TimeoutError):
            raise error
        self.close()
        self._fresh = True
        self._connect(deadline)

    def _give_up(self, error: OSError | ProtocolError) -> None:
        if isinstance(error, TimeoutError):
            # The answer may still come: it is skipped then. Only a frame cut in half ends the connection.
            self._failed(f"no answer within {self._options.match_timeout_ms} ms")
        else:
            self.close()
            self._failed(repr(error))

    def _receive_answer(self, question: Match, deadline: int) -> Matched:
        while True:
            reply = decode(self._receive(deadline), ToEngine, peer=PEER)
            if isinstance(reply, Refused):
                raise ProtocolError(f"{PEER}: {reply.reason}")
            if not isinstance(reply, Matched):
                continue
            if reply.request == question.request:
                return self._checked(reply, question)
            self.release(reply.lease, 0)

    def _checked(self, reply: Matched, question: Match) -> Matched:
        """An answer that contradicts the question or itself is not used."""
        if reply.tokens <= question.computed:
            return reply
        first, block = reply.first_block, self._block_size
        blocks = -(-reply.tokens // block) - first
        if (
            reply.tokens > question.limit
            or not 0 <= first <= question.computed // block
            or len(reply.extents) != 8 * blocks
        ):
            raise ProtocolError(
                f"{PEER}: matched: {reply.tokens} tokens of {question.limit} in {len(reply.extents)} bytes"
                f" of extents from block {first}"
            )
        return reply

    def _connect(self, deadline: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(self._remaining_s(deadline))
            connection.connect(self._path)
            check_server(connection)
            self._connection = connection
            self._send(self._attach, deadline)
            reply = decode(self._receive(deadline), ToEngine, peer=PEER)
        except BaseException:
            self.close()
            connection.close()
            raise
        if isinstance(reply, Refused):
            raise ProtocolError(f"{PEER}: {reply.reason}")
        if not isinstance(reply, Registered):
            raise ProtocolError(f"{PEER}: answered {type(reply).__name__} to attach")
        self.daemon = reply.incarnation

    def _send(self, message: ToDaemon, deadline: int) -> None:
        assert self._connection is not None
        self._connection.settimeout(self._remaining_s(deadline))
        try:
            self._connection.sendall(encode_frame(message))
        except TimeoutError as error:
            # Perhaps half a frame has gone out.
            raise ConnectionAbortedError("the daemon does not read") from error

    def _receive(self, deadline: int) -> bytes:
        """One frame's body; what else has arrived stays in the buffer."""
        assert self._connection is not None
        while True:
            if len(self._buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer)
                if length > MAX_REPLY_BYTES:
                    raise ProtocolError(
                        f"{PEER}: frame of {length} bytes is over the limit of {MAX_REPLY_BYTES}"
                    )
                end = LENGTH.size + length
                if len(self._buffer) >= end:
                    body = bytes(self._buffer[LENGTH.size : end])
                    del self._buffer[:end]
                    return body
            self._connection.settimeout(self._remaining_s(deadline))
            # The arena's descriptor comes along; the worker has one of its own.
            chunk, fds, _, _ = socket.recv_fds(self._connection, 1 << 16, 4)
            close_fds(list(fds))
            if not chunk:
                raise ConnectionResetError("the daemon hung up")
            self._buffer += chunk

    def _remaining_s(self, deadline: int) -> float:
        remaining = deadline - self._clock.now_ns()
        if remaining <= 0:
            raise TimeoutError
        return remaining / 1e9

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self._quiet_until_ns = self._clock.now_ns() + self._options.match_pause_ms * 1_000_000
        if not self._outage:
            self._outage = True
            logger.warning(
                "segue: replicas cannot be asked for at %s, computing instead: %s", self._path, reason
            )

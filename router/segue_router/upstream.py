"""One attempt: one request to one engine, from the connection to the last byte.

Owns the connection and turns whatever happens to it into an UpstreamFailure with its cause. It can be
given up from outside (`doom`) at any moment it waits for the engine. It never looks into events and
never decides what happens next. Invariant: after `close` nothing of it keeps the engine generating.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp
from yarl import URL

from segue_router.engine_client import is_refusal
from segue_router.errors import Cause, UpstreamFailure
from segue_router.health import Wait
from segue_router.sse import SseSplitter

T = TypeVar("T")


def now_ms() -> float:
    """Monotonic milliseconds."""
    return time.monotonic() * 1000


class Attempt:
    """See the module. `whole`: the answer is expected in one piece.

    `count`: tokens (prompt and output) it has brought, by the name of each sequence it carries; only what
    is counted there can be compared with what the engine's daemon knows. `behind_since_ms`: since when
    the daemon knows of more, in the present silence.
    """

    def __init__(
        self, *, max_event_bytes: int, whole: bool = False, count: Callable[[], dict[str, int]] = dict
    ) -> None:
        self.response: aiohttp.ClientResponse | None = None
        self.last_byte_ms: float | None = None
        self.streaming = False
        self._count = count
        self.behind_since_ms: float | None = None
        self.asked_ms = float("-inf")
        self._whole = whole
        self._splitter = SseSplitter(max_event_bytes)
        self._doom: UpstreamFailure | None = None
        self._heard_out = False
        self._timeout: asyncio.Timeout | None = None
        self._reading = False
        self._silent_since_ms = now_ms()
        self._without_event = False

    @property
    def delivered(self) -> dict[str, int]:
        """See the class; empty before the first token."""
        return self._count() if self.streaming else {}

    @property
    def wait(self) -> Wait | None:
        """How it waits for its engine; None while it does not (a slow client is not a stall)."""
        if self._timeout is None and not self._reading:
            return None
        return Wait(
            self._silent_since_ms,
            first_token=not self.streaming,
            whole=self._whole,
            behind_since_ms=self.behind_since_ms,
        )

    def forgive(self, since_ms: float) -> None:
        """Count silence from `since_ms` only: before that, the observer itself was not running."""
        self._silent_since_ms = max(self._silent_since_ms, since_ms)
        self.behind_since_ms = None

    def doom(self, cause: Cause, detail: str) -> None:
        """Give it up: whoever waits for the engine gets the failure, now or at the next wait."""
        if self._doom is None:
            self._doom = UpstreamFailure(cause, detail)
            if self._reading and self.response is not None:
                self.response.content.set_exception(self._doom)  # nothing is buffered there: it waits
            elif self._timeout is not None and not self._timeout.expired():
                self._timeout.reschedule(asyncio.get_running_loop().time())

    async def open(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str | URL,
        *,
        body: bytes,
        headers: Mapping[str, str],
        connect_ms: int,
    ) -> aiohttp.ClientResponse:
        """Send the request; returns once the engine's headers are there. Raises UpstreamFailure."""
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect_ms / 1000)
        self.response = await self._wait_for(
            session.request(
                method, url, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
            )
        )
        self.last_byte_ms = now_ms()
        return self.response

    async def read(self) -> list[bytes]:
        """The payloads of the events that the next bytes complete; maybe none. Raises UpstreamFailure."""
        if self._splitter.broken:
            raise UpstreamFailure("malformed_event", self._splitter.broken)
        chunk = await self.read_bytes()
        if not chunk:
            where = "inside an event" if self._splitter.unfinished else "without a finish"
            raise UpstreamFailure("stream_eof", f"the stream ended {where}")
        payloads = self._splitter.feed(chunk)
        self._without_event = not payloads
        return payloads

    async def read_bytes(self) -> bytes:
        """Whatever arrives next; empty at the end. Raises UpstreamFailure.

        No time-out of asyncio's here: this runs once a token, and `doom` wakes the reader itself.
        """
        assert self.response is not None
        content = self.response.content
        self._begin_wait()
        self._reading = True
        try:
            if self._doom is not None:
                chunk = b"" if self._heard_out else content.read_nowait()
                self._heard_out = True
                if chunk:
                    return chunk  # what came before it was given up counts; what comes now does not
                raise self._doom
            chunk = await content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._doom is not None:
                raise self._doom from None
            raise UpstreamFailure("stream_eof", f"{type(error).__name__}: {error}") from error
        finally:
            self._reading = False
        self.last_byte_ms = now_ms()
        return chunk

    async def read_all(self, limit: int) -> bytes:
        """The rest of the answer, at most `limit` bytes. Raises UpstreamFailure."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.read_bytes():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise UpstreamFailure("malformed_event", f"the answer is larger than {limit} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Cut the connection: the engine aborts what it was generating (a stopped one when it wakes)."""
        if self.response is not None:
            self.response.close()

    def _begin_wait(self) -> None:
        if not self._without_event:  # bytes that complete no event (comments, say) are no progress
            self._silent_since_ms = now_ms()
            self.behind_since_ms = None

    async def _wait_for(self, coming: Awaitable[T]) -> T:
        self._begin_wait()
        try:
            async with asyncio.timeout(None) as self._timeout:
                if self._doom is not None:
                    self._timeout.reschedule(0)
                return await coming
        except aiohttp.ClientConnectorError as error:
            raise UpstreamFailure("connect", f"cannot connect: {error}", refused=is_refusal(error)) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamFailure("connect", "no connection in time") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._doom is not None:
                raise self._doom from None
            raise UpstreamFailure("stream_eof", f"{type(error).__name__}: {error}") from error
        finally:
            self._timeout = None

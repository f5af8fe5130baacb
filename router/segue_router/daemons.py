"""The daemons as the router asks them, over HTTP.

Every call has a deadline, and a daemon that cannot be reached raises nothing: it costs recomputation, never
an answer. Only `promote` raises, when somebody else has gone on with the sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import aiohttp
import msgspec
import structlog

from segue_core.messages.status import EngineStatus, Promoted, PromoteRequest, SequenceStatus
from segue_router.engine_client import MAX_ANSWER_BYTES, UNREADABLE, at_most
from segue_router.health import DAEMON_SILENCE_MS

log = structlog.get_logger()

REACH = (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, ValueError, RecursionError)
"""Everything that can go wrong with a daemon's answer; msgspec.ValidationError is a DecodeError."""

SETTLE_S = 1.0
"""How long a router that stops waits for fences that are under way."""


class Superseded(Exception):
    """Somebody holds the same or a higher epoch at this daemon."""


class DaemonClient(Protocol):
    """The daemon beside an engine, or those beside its ranks (`group_client`)."""

    async def sequence(self, seq: str, timeout_ms: int) -> SequenceStatus | None:
        """What it holds of `seq`; None: nothing, or no answer in time."""
        ...

    async def promote(self, seq: str, request: PromoteRequest, timeout_ms: int) -> Promoted | None:
        """Fence older writers there and wait for the last tokens. Raises Superseded; None: no answer."""
        ...

    async def fence(self, seq: str, epoch: int, timeout_ms: int) -> bool:
        """Tell it that writers of `seq` below `epoch` are over; returns whether it took that."""
        ...

    def watch(self) -> AsyncIterator[EngineStatus]:
        """Its engine's state, at once on each change and as heartbeat. May end; is then called again."""
        ...


class HttpDaemon:
    """The daemon of rank `rank` of `ranks`, by HTTP. `url` is its base URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str, rank: int = 0, ranks: int = 1) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._rank = rank
        self._ranks = ranks
        self._misplaced = False
        self._complaint = ""

    async def sequence(self, seq: str, timeout_ms: int) -> SequenceStatus | None:
        """What it holds of `seq`; None: nothing, or no answer in time."""
        try:
            async with self._session.get(
                f"{self._url}/v1/sequences/{seq}", timeout=_total(timeout_ms)
            ) as response:
                if response.status != 200:
                    return None
                return msgspec.json.decode(await at_most(response, MAX_ANSWER_BYTES), type=SequenceStatus)
        except REACH:
            return None

    async def promote(self, seq: str, request: PromoteRequest, timeout_ms: int) -> Promoted | None:
        """Fence older writers there and wait for the last tokens. Raises Superseded; None: no answer."""
        try:
            async with self._session.post(
                f"{self._url}/v1/sequences/{seq}/promote",
                data=msgspec.json.encode(request),
                headers={"Content-Type": "application/json"},
                timeout=_total(request.wait_ms + timeout_ms),
            ) as response:
                if response.status == 409:
                    raise Superseded
                if response.status != 200:
                    return None
                return msgspec.json.decode(await at_most(response, MAX_ANSWER_BYTES), type=Promoted)
        except REACH:
            return None

    async def fence(self, seq: str, epoch: int, timeout_ms: int) -> bool:
        """Tell it that writers of `seq` below `epoch` are over; returns whether it took that."""
        try:
            async with self._session.post(
                f"{self._url}/v1/sequences/{seq}/fence",
                data=msgspec.json.encode({"epoch": epoch}),
                headers={"Content-Type": "application/json"},
                timeout=_total(timeout_ms),
            ) as response:
                return response.status < 300
        except REACH:
            return False

    async def watch(self) -> AsyncIterator[EngineStatus]:
        """Its engine's state, at once on each change and as heartbeat. Ends when the daemon goes silent."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=DAEMON_SILENCE_MS / 1000, sock_read=DAEMON_SILENCE_MS / 1000
        )
        try:
            async with self._session.get(f"{self._url}/v1/watch", timeout=timeout) as response:
                if response.status != 200:
                    self._complain(_refusal(response.status))
                    return
                while (line := await response.content.readline()).endswith(b"\n"):  # else it was cut
                    status = self._checked(msgspec.json.decode(line, type=EngineStatus))
                    self._complaint = ""
                    yield status
        except aiohttp.ClientSSLError as error:
            self._complain(f"no TLS with it: {error}")
        except UNREADABLE as error:
            self._complain(f"it says what cannot be read: {error}; run one Segue release everywhere")
        except REACH:
            return

    def _complain(self, problem: str) -> None:
        """Say once what only a person can mend."""
        if problem and problem != self._complaint:
            log.warning(
                "a daemon gives no answers; its engine counts as unprotected",
                daemon=self._url,
                reason=problem,
            )
        self._complaint = problem or self._complaint

    def _checked(self, status: EngineStatus) -> EngineStatus:
        """A daemon of another rank than the configuration says speaks for no engine."""
        misplaced = status.state != "absent" and (status.rank, status.ranks) != (self._rank, self._ranks)
        if misplaced and not self._misplaced:
            log.warning(
                "a daemon is of another rank than configured; its engine counts as unprotected",
                daemon=self._url,
                found=f"rank {status.rank} of {status.ranks}",
                configured=f"rank {self._rank} of {self._ranks}",
                hint="engines[].daemons: the URLs of the daemons of all ranks, in rank order",
            )
        self._misplaced = misplaced
        if not misplaced:
            return status
        detail = f"its daemon is of rank {status.rank} of {status.ranks}"
        return EngineStatus(status.engine, "absent", detail=detail)


def _refusal(status: int) -> str:
    if status == 401:
        return "it wants the cluster's token: set security.dir or security.token_file here"
    return f"it answers {status}" if status != 503 else ""


def _total(milliseconds: int) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=milliseconds / 1000)


async def settle(tasks: set[asyncio.Task[bool]]) -> None:
    """Let what was started beside the answers (fencing) come to its end; cancel what takes too long."""
    if not tasks:
        return
    _, late = await asyncio.wait(tuple(tasks), timeout=SETTLE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)

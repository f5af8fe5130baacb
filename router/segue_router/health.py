"""An engine's health: a pure state machine, and the rule that tells a silent stream from a dead one.

    up       serves.
    suspect  failed once without proof of death; used only if nothing better is there.
    down     refused, its process ended, or stands still; used when all are down (suspect yourself first).

Invariants: a client's error never changes a state; an engine that was down comes back only through a good
answer to a probe, and where its daemon watches it, only while the daemon says that it runs. (A daemon that
knows of a dead engine only does not watch the one that was started after it without the shim.)
Progress decides, not politeness. Times are monotonic milliseconds, passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from segue_core.messages.status import EngineStatus

State = Literal["up", "suspect", "down"]
DAEMON_SILENCE_MS = 1_000
"""A daemon not heard for so long (five heartbeats) says nothing about its engine any more."""
HOLD_MS = 500
MAX_HOLD_MS = 30_000
"""An engine that stalled is kept out for HOLD_MS, doubled each time, until it produces tokens again."""


class EngineHealth:
    """Events in, a state out. `recoveries` counts how often the engine came back."""

    def __init__(self) -> None:
        self.state: State = "down"
        self.detail = "not seen yet"
        self.failures = 0
        self.recoveries = 0
        self.probed_ok_ms = float("-inf")
        self._stalls = 0
        self._hold_until_ms = float("-inf")
        self._daemon: EngineStatus | None = None
        self._daemon_ms = float("-inf")
        self._dead_ms = float("-inf")
        self._outlived = False
        """An engine serves there of which the daemon, that knows a dead one only, does not know."""

    def daemon(self, now_ms: float) -> EngineStatus | None:
        """What the daemon says, if it was heard lately and watches the engine at all."""
        fresh = now_ms - self._daemon_ms <= DAEMON_SILENCE_MS
        if self._daemon is None or not fresh or self._daemon.state == "absent" or self._outlived:
            return None
        return self._daemon

    @property
    def daemon_state(self) -> str:
        return self._daemon.state if self._daemon else ""

    @property
    def last_status(self) -> EngineStatus | None:
        """The last that was heard from the daemon, however old."""
        return self._daemon

    def token(self) -> None:
        """A stream of this engine advanced."""
        self._stalls = 0
        if self.state == "suspect":
            self._become("up", "")

    def reset(self, detail: str) -> None:
        """A connection broke, or an answer failed, without proof that the process is gone."""
        self.failures += 1
        if self.state == "up":
            self._become("suspect", detail)

    def refused(self, detail: str) -> None:
        """Nothing listens there."""
        self.failures += 1
        self._become("down", detail)

    def stalled(self, now_ms: float) -> None:
        """A stream was given up because neither it nor its engine made progress.

        All streams of one stall count once: those that follow while the engine is held out change nothing.
        """
        self.failures += 1
        if now_ms < self._hold_until_ms:
            return
        self._hold_until_ms = now_ms + min(HOLD_MS << min(self._stalls, 10), MAX_HOLD_MS)
        self._stalls += 1
        self._become("down", "no progress")

    def probe_ok(self, now_ms: float, *, began_ms: float) -> None:
        """`/health` and `/v1/models` answered well to a probe that began at `began_ms`."""
        self.probed_ok_ms = now_ms
        known_dead = self._daemon is not None and self._daemon.state == "dead"
        if known_dead and began_ms > self._dead_ms + HOLD_MS:
            self._outlived = True
        daemon = self.daemon(now_ms)
        if daemon is not None and daemon.state != "running":
            self._become("down", f"its daemon says: {daemon.state}")
        elif now_ms >= self._hold_until_ms:
            self._become("up", "")

    def probe_failed(self, now_ms: float, detail: str, *, refused: bool, progressed_ms: float) -> None:
        """A probe failed. `progressed_ms`: when a stream of this engine last advanced."""
        if refused:
            if self.state != "down":
                self.failures += 1
            self._become("down", detail)
            return
        daemon = self.daemon(now_ms)
        working = daemon is not None and daemon.running > 0 and daemon.progress_age_ms < DAEMON_SILENCE_MS
        if working or now_ms - progressed_ms < DAEMON_SILENCE_MS:
            return
        self._become("suspect" if self.state == "up" else "down", detail)

    def daemon_said(self, status: EngineStatus, now_ms: float) -> bool:
        """Take a daemon's word; returns whether the life that streams were started in has ended."""
        before = self._daemon
        self._daemon, self._daemon_ms = status, now_ms
        ended = before is not None and before.state in ("running", "stalled")
        if status.state == "dead":
            if before is None or (before.state, before.incarnation) != ("dead", status.incarnation):
                self._dead_ms, self._outlived = now_ms, False
                self._become("down", "its daemon says: dead")
            return ended
        self._outlived = False
        if status.state == "stalled":
            self._become("down", "its daemon says: stalled")
        if before is None or not ended or not before.incarnation or not status.incarnation:
            return False
        return before.incarnation != status.incarnation

    def _become(self, state: State, detail: str) -> None:
        if state == "up" and self.state == "down":
            self.recoveries += 1
        self.state, self.detail = state, detail


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream that is waiting for its engine. `whole`: an answer that comes in one piece at its end."""

    silent_since_ms: float
    first_token: bool
    whole: bool = False


def is_stalled(
    wait: Wait,
    health: EngineHealth,
    *,
    progressed_ms: float,
    now_ms: float,
    stall_ms: int,
    first_token_ms: int,
) -> bool:
    """Whether to give the stream up. `progressed_ms`: when any stream of this engine last advanced.

    A daemon that says "stalled" is believed at once; one that says the engine progresses is believed too,
    up to `first_token_ms`. Without one, a stream that has begun is given up when it and every other stream
    of the engine stood still for `stall_ms`; one that waits for its first token may be in prefill, unless
    probes found the engine down.
    """
    silent_ms = now_ms - wait.silent_since_ms
    daemon = health.daemon(now_ms)
    if daemon is not None:
        if daemon.state != "running":
            return True
        idle = daemon.running == 0 and not wait.first_token and not wait.whole
        if silent_ms >= stall_ms and (daemon.progress_age_ms >= stall_ms or idle):
            return True
        return silent_ms >= first_token_ms and not wait.whole
    if wait.whole:
        return silent_ms >= first_token_ms and health.state == "down"
    if silent_ms >= first_token_ms or (silent_ms >= stall_ms and health.state == "down"):
        return True
    return not wait.first_token and silent_ms >= stall_ms and now_ms - progressed_ms >= stall_ms


def stands_still(health: EngineHealth, *, progressed_ms: float, now_ms: float, stall_ms: int) -> bool:
    """Whether the engine of a stream that was given up makes no progress with others' either."""
    if now_ms - progressed_ms < stall_ms:
        return False
    daemon = health.daemon(now_ms)
    if daemon is None or daemon.state != "running":
        return True
    return daemon.running == 0 or daemon.progress_age_ms >= stall_ms

"""An engine's health: a pure state machine, and the rules that tell a silent stream from a dead one.

    up       serves.
    suspect  failed once without proof of death; used only if nothing better is there.
    down     refused, its process ended, or stands still; used when all are down (suspect yourself first).

Invariants: a client's error never changes a state; an engine that was down comes back only through a good
answer to a probe, and where its daemon watches it, only while the daemon says that it runs. (A daemon that
knows of a dead engine only does not watch the one that was started after it without the shim.)
Progress decides, not politeness. The observer suspects itself first: what it saw across a pause of its own,
or of all engines at once, proves nothing for a while. Times are monotonic milliseconds, passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from segue_core.messages.status import EngineStatus, Exact

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
        self.outlived = False
        """An engine serves there of which the daemon, that knows a dead one only, does not know."""
        self.abilities: tuple[Exact, ...] = ()
        """What the engine continued exactly when its daemon last knew one: a daemon that was started again
        knows none until the engine has registered anew."""

    def daemon(self, now_ms: float) -> EngineStatus | None:
        """What the daemon says, if it was heard lately and watches the engine at all."""
        fresh = now_ms - self._daemon_ms <= DAEMON_SILENCE_MS
        if self._daemon is None or not fresh or self._daemon.state == "absent" or self.outlived:
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
            self.outlived = True
        daemon = self.daemon(now_ms)
        if daemon is not None and daemon.state != "running":
            self._become("down", f"its daemon says: {daemon.state}")
        elif now_ms >= self._hold_until_ms:
            self._become("up", "")

    def probe_failed(
        self, now_ms: float, detail: str, *, refused: bool, progressed_ms: float, doubtful: bool = False
    ) -> None:
        """A probe failed. `progressed_ms`: when a stream of this engine last advanced.

        `doubtful`: it may be the observer's own fault, and is a suspicion at most.
        """
        if refused:
            if self.state != "down":
                self.failures += 1
            self._become("down", detail)
            return
        daemon = self.daemon(now_ms)
        working = daemon is not None and daemon.running > 0 and daemon.progress_age_ms < DAEMON_SILENCE_MS
        if working or now_ms - progressed_ms < DAEMON_SILENCE_MS:
            return
        if self.state == "up":
            self._become("suspect", detail)
        elif not doubtful:
            self._become("down", detail)

    def daemon_said(self, status: EngineStatus, now_ms: float) -> bool:
        """Take a daemon's word; returns whether the life that streams were started in has ended."""
        before = self._daemon
        self._daemon, self._daemon_ms = status, now_ms
        ended = before is not None and before.state in ("running", "stalled")
        if status.state != "absent":
            self.abilities = status.exact
        if status.state == "dead":
            if before is None or (before.state, before.incarnation) != ("dead", status.incarnation):
                self._dead_ms, self.outlived = now_ms, False
                self._become("down", "its daemon says: dead")
            return ended
        self.outlived = False
        if status.state == "stalled":
            self._become("down", "its daemon says: stalled")
        if before is None or not ended or not before.incarnation or not status.incarnation:
            return False
        return before.incarnation != status.incarnation

    def _become(self, state: State, detail: str) -> None:
        if state == "up" and self.state == "down":
            self.recoveries += 1
        self.state, self.detail = state, detail


class Observer:
    """Whether the router itself can be trusted: it may have been paused, or cut off from everybody.

    `pause_ms`: a beat this late is a pause. Probes of all engines that fall silent within `together_ms` are
    taken for its own fault, but for no longer than `patience_ms`: then they are believed.
    """

    def __init__(self, *, beat_ms: float, pause_ms: float, together_ms: float, patience_ms: float) -> None:
        self._beat_ms = beat_ms
        self._pause_ms = pause_ms
        self._together_ms = together_ms
        self._patience_ms = patience_ms
        self._last_ms: float | None = None
        self._woke_ms = float("-inf")
        self._silent: dict[str, float | None] = {}

    def beat(self, now_ms: float) -> float:
        """To be called every `beat_ms`; returns how long the router stood still before it (0: it did not)."""
        late_ms = self._late_ms(now_ms)
        self._last_ms = now_ms
        if late_ms <= self._pause_ms:
            return 0.0
        self._woke_ms = now_ms
        return late_ms

    def slept(self, since_ms: float, now_ms: float) -> bool:
        """Whether it stood still at some time since `since_ms`, noticed by a beat or not yet."""
        return self._woke_ms >= since_ms or self._late_ms(now_ms) > self._pause_ms

    def probed(self, engine: str, now_ms: float, *, silent: bool) -> None:
        """A probe of `engine` ended. `silent`: nothing at all came back."""
        since = self._silent.get(engine)
        self._silent[engine] = (now_ms if since is None else since) if silent else None

    def doubts(self, now_ms: float) -> bool:
        """Whether all engines (two or more) fell silent at once, a short while ago."""
        times = [since for since in self._silent.values() if since is not None]
        if len(times) < 2 or len(times) < len(self._silent):
            return False
        return max(times) - min(times) <= self._together_ms and now_ms - max(times) <= self._patience_ms

    def _late_ms(self, now_ms: float) -> float:
        return 0.0 if self._last_ms is None else now_ms - self._last_ms - self._beat_ms


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream that is waiting for its engine. `whole`: an answer that comes in one piece at its end.

    `behind_since_ms`: since when the engine's daemon knows of tokens that it has not brought.
    """

    silent_since_ms: float
    first_token: bool
    whole: bool = False
    behind_since_ms: float | None = None


def should_ask(wait: Wait, *, asked_ms: float, now_ms: float, stall_ms: int) -> bool:
    """Whether to ask the engine's daemon how far it is with a silent stream. `asked_ms`: the last time."""
    if wait.first_token or wait.whole or wait.behind_since_ms is not None:
        return False
    return min(now_ms - wait.silent_since_ms, now_ms - asked_ms) >= stall_ms / 2


def is_behind(delivered: Mapping[str, int], known: Mapping[str, int]) -> bool:
    """Whether the engine has produced more of a sequence than its stream brought. Not known: it has not."""
    return any(known.get(seq, 0) > tokens for seq, tokens in delivered.items())


def is_stalled(
    wait: Wait,
    health: EngineHealth,
    *,
    progressed_ms: float,
    now_ms: float,
    stall_ms: int,
    lone_stall_ms: int,
    first_token_ms: int,
) -> bool:
    """Whether to give the stream up. `progressed_ms`: when any stream of this engine last advanced.

    A daemon that says "stalled" is believed at once; one that says the engine progresses is believed too,
    up to `first_token_ms`: the sequence may wait in the engine. But tokens that the daemon has known for a
    while and the stream did not bring got stuck on the way. Without a daemon, a stream that has begun is
    given up when it and every other stream of the engine stood still for `stall_ms`, or it alone for
    `lone_stall_ms`; one that waits for its first token may be in prefill, unless the engine was found down.
    """
    silent_ms = now_ms - wait.silent_since_ms
    daemon = health.daemon(now_ms)
    if daemon is not None:
        if daemon.state != "running":
            return True
        idle = daemon.running == 0 and not wait.first_token and not wait.whole
        stuck = wait.behind_since_ms is not None and now_ms - wait.behind_since_ms >= stall_ms / 2
        if silent_ms >= stall_ms and (daemon.progress_age_ms >= stall_ms or idle or stuck):
            return True
        return silent_ms >= first_token_ms and not wait.whole
    if wait.whole:
        return silent_ms >= first_token_ms and health.state == "down"
    if silent_ms >= first_token_ms or (silent_ms >= stall_ms and health.state == "down"):
        return True
    if wait.first_token:
        return False
    return silent_ms >= stall_ms and (now_ms - progressed_ms >= stall_ms or silent_ms >= lone_stall_ms)


def stands_still(health: EngineHealth, *, progressed_ms: float, now_ms: float, stall_ms: int) -> bool:
    """Whether the engine of a stream that was given up makes no progress with others' either."""
    if now_ms - progressed_ms < stall_ms:
        return False
    daemon = health.daemon(now_ms)
    if daemon is None or daemon.state != "running":
        return True
    return daemon.running == 0 or daemon.progress_age_ms >= stall_ms

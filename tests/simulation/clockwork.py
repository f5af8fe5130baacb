"""Virtual time: one queue of events, processes that can be killed, stopped and continued, and the trace.

Invariants: the order of events follows from the seed alone; a dead process runs nothing that was meant for
its earlier life; a stopped one runs nothing until it is continued, and then all of it in order.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from segue_core.messages.peer import Ack, Delta, End, Nack

MS = 1_000_000
TRACE_LINES = 40
EVENT_NS = 1_000
"""What any event takes: no two happen at one instant."""
MAX_EVENTS = 60_000
"""A run that takes more does not come to rest: that is a failure too."""


class Violation(AssertionError):
    """An invariant does not hold."""


class Killed(Exception):
    """The running process was killed in the middle of what it did."""


class Process:
    """Something that lives on a host: a daemon, an engine, the router."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.incarnation = 0
        self.alive = False
        self.stopped = False
        self.backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def boot(self) -> None:
        """A new life."""
        raise NotImplementedError

    def crash(self) -> None:
        """SIGKILL."""
        raise NotImplementedError


class VirtualClock:
    """`segue_core.clock.Clock` that stands still between events."""

    def __init__(self, start_ns: int) -> None:
        self.now = start_ns

    def now_ns(self) -> int:
        return self.now


class Clockwork:
    """The queue, the clock, the dice and the trace."""

    def __init__(self, seed: int, *, loud: bool = False) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock(1_000 * MS)
        self.trace: deque[tuple[int, str, tuple[Any, ...]]] = deque(maxlen=TRACE_LINES)
        self.events = 0
        self._loud = loud
        self._queue: list[tuple[int, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    @property
    def now(self) -> int:
        """Nanoseconds."""
        return self.clock.now

    def say(self, text: str, *values: Any) -> None:
        """One line of the trace; `text` is formatted when somebody reads it."""
        self.trace.append((self.now, text, values))
        if self._loud:
            print(line_of(self.trace[-1]))

    def after(self, delay_ns: int, process: Process | None, run: Callable[..., None], *values: Any) -> None:
        """Run something in `process`, unless that has died by then. None: in no process."""
        life = process.life if process is not None else 0
        heapq.heappush(
            self._queue, (self.clock.now + delay_ns, next(self._order), process, life, run, values)
        )

    def between(self, low_ms: float, high_ms: float) -> int:
        """A random delay in nanoseconds."""
        return int(self.rng.uniform(low_ms, high_ms) * MS)

    def chance(self, probability: float) -> bool:
        """Throw the dice."""
        return probability > 0 and self.rng.random() < probability

    def run_until(self, until_ns: int, after_each: Callable[[], None]) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until_ns:
            at, _, process, life, run, values = heapq.heappop(self._queue)
            earliest = self.clock.now + EVENT_NS
            self.clock.now = at if at > earliest else earliest
            self.events += 1
            if self.events > MAX_EVENTS:
                raise Violation(f"no rest after {MAX_EVENTS} events")
            self.run_in(process, life, run, *values)
            after_each()
        self.clock.now = max(self.clock.now, until_ns)

    def run_in(self, process: Process | None, life: int, run: Callable[..., None], *values: Any) -> None:
        """Run something in `process` now, later if it is stopped, never if it has died."""
        if process is not None:
            if not process.alive or process.life != life:
                return
            if process.stopped:
                process.backlog.append((run, values))
                return
        with contextlib.suppress(Killed):
            run(*values)

    def wake(self, process: Process) -> None:
        """Continue a stopped process: what waited for it happens now, in order."""
        process.stopped = False
        waiting, process.backlog = process.backlog, deque()
        for run, values in waiting:
            self.after(0, process, run, *values)


def line_of(entry: tuple[int, str, tuple[Any, ...]]) -> str:
    """A trace line as text."""
    at, text, values = entry
    return f"{at / MS:10.3f} ms  {text.format(*map(_brief, values))}"


def _brief(value: Any) -> Any:
    """Messages in one short line."""
    if isinstance(value, Delta):
        upto = value.base + len(value.token_ids) // 4
        kinds = ",".join(part.kind.name for part in value.parts)
        who = f"{value.seq} epoch {value.epoch} of {value.incarnation}"
        return f"#{value.number} {who} [{value.base},{upto}) {kinds}"
    if isinstance(value, Ack):
        return f"ack #{value.number} {value.seq} epoch {value.epoch} watermark {value.watermark}"
    if isinstance(value, Nack):
        where = f"#{value.number} {value.seq} epoch {value.epoch} watermark {value.watermark}"
        return f"{value.reason.name} {where}"
    if isinstance(value, End):
        return f"end {value.seq} epoch {value.epoch} of {value.incarnation}"
    return value

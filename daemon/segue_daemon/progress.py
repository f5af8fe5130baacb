"""Is the engine alive, or does it only look so? Pure: samples in, a verdict out.

Progress decides, not politeness. An engine with work makes progress when its step counter moves or,
inside one long step (a prefill on a CPU), while its process burns CPU time. Idle is not dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segue_core.messages.status import EngineState

PAUSE_NS = 1_000_000_000
"""A gap between two samples from which on the observer suspects itself."""


@dataclass(frozen=True)
class Sample:
    """What was seen at `now_ns`: step numbers, sequences being worked on, CPU time of the process."""

    now_ns: int
    step_begun: int
    step_committed: int
    running: int
    cpu_ticks: int
    """Clock ticks of CPU used so far; -1 if unknown."""


class ProgressJudge:
    """Judges one life of an engine."""

    def __init__(self, *, stall_ms: int, step_ms: int) -> None:
        self._stall_ns = stall_ms * 1_000_000
        self._step_ns = step_ms * 1_000_000
        self._last: Sample | None = None
        self._moved_ns = 0
        self._stepped_ns = 0

    def judge(self, sample: Sample) -> tuple[EngineState, int]:
        """(running or stalled, milliseconds without progress; 0 when idle)."""
        last = self._last
        self._last = sample
        if last is not None and sample.now_ns - last.now_ns > PAUSE_NS:
            # Nobody looked for a while: this process was paused itself, and perhaps the whole host.
            self._moved_ns += sample.now_ns - last.now_ns
            self._stepped_ns += sample.now_ns - last.now_ns
        stepped = last is None or (sample.step_begun, sample.step_committed) != (
            last.step_begun,
            last.step_committed,
        )
        woke = last is not None and not last.running and sample.running
        if stepped or woke or not sample.running:
            self._stepped_ns = self._moved_ns = sample.now_ns
        elif last is not None and sample.cpu_ticks > last.cpu_ticks:
            self._moved_ns = sample.now_ns
        if not sample.running:
            return "running", 0
        age_ns = sample.now_ns - self._moved_ns
        if sample.now_ns - self._stepped_ns > self._step_ns:
            age_ns = sample.now_ns - self._stepped_ns
        return ("stalled" if age_ns >= self._stall_ns else "running"), age_ns // 1_000_000


def cpu_ticks(pid: int) -> int:
    """User and system CPU time of process `pid` in clock ticks, all threads; -1 if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return -1

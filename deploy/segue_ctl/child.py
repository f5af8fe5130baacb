"""One process of a local cluster: its own session, its own cores, its own log file.

Signals go to its whole process group. Nothing that was started outlives this process: each group is on
the warden's list from its first moment until it has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from segue_ctl.process_groups import (
    end_groups,
    remove_shared_memory,
    shared_memory,
    signal_group,
    wait_gone,
)
from segue_ctl.warden import Warden

_GRACE_S = 5.0
_TAIL_BYTES = 8_192


class Child:
    """A process that can be started again after it has ended. `name` is for people and the log's name."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_file: Path,
        warden: Warden,
        env: Mapping[str, str] | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._argv = list(argv)
        self._warden = warden
        self._env = dict(env) if env is not None else None
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._group_ended = True
        self._leftovers: set[Path] = set()

    @property
    def pid(self) -> int:
        """Pid of the leader, which is also the group's id; 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def needs_finish(self) -> bool:
        """Whether a group was started that has not been finished; only then may its id be used."""
        return not self._group_ended

    def start(self) -> None:
        """Start it. It must not be running."""
        assert self._group_ended, f"{self.name}: started twice without finish()"
        before = os.sched_getaffinity(0)
        with self.log_file.open("ab") as log:
            try:
                if self._cpus:
                    os.sched_setaffinity(0, self._cpus)  # inherited; cheaper than running code after fork
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
            finally:
                os.sched_setaffinity(0, before)
        self._group_ended = False
        self._warden.watch(self._process.pid)

    def note_shared_memory(self) -> None:
        """Remember what it has mapped, for the clean-up after a SIGKILL. Call once it is up."""
        if self.needs_finish:
            self._leftovers |= shared_memory(self.pid)

    def kill(self) -> int:
        """SIGKILL to the group, without waiting; returns the monotonic time of the call in ns."""
        self.note_shared_memory()
        return self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to the group; returns the monotonic time of the call in ns."""
        assert self.needs_finish, f"{self.name}: not running"
        at_ns = time.monotonic_ns()
        signal_group(self.pid, number)
        return at_ns

    def finish(self, *, grace_s: float = _GRACE_S) -> None:
        """Make sure that no process of the group is left and clean up after it."""
        finish_all([self], grace_s=grace_s)

    def reap(self) -> None:
        """Collect a group that has been ended."""
        if self._process is None or self._group_ended:
            return
        self._process.wait(timeout=_GRACE_S)
        wait_gone([self.pid], timeout_s=_GRACE_S)
        remove_shared_memory(self._leftovers)
        self._leftovers.clear()
        self._group_ended = True
        self._warden.forget(self.pid)

    def ended(self) -> str:
        """How it ended, in words; empty while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return ""
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def finish_all(children: Sequence[Child], *, grace_s: float = _GRACE_S) -> None:
    """End several at once, so that their shut-downs overlap."""
    started = [child for child in children if child.needs_finish]
    end_groups([child.pid for child in started], grace_s=grace_s)
    for child in started:
        child.reap()

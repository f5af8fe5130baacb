"""Ends what a launcher started once the launcher is gone, even if it was killed with SIGKILL.

A small process at the other end of a pipe. Lines on its standard input name process groups (`+PGID`,
`-PGID`) and the run folder (`=PATH`); end of file means that the launcher is gone. Then every group still
on the list is ended and the folder removed. After a clean stop the list is empty and nothing happens.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from segue_ctl.process_groups import end_groups

_GRACE_S = 3.0


class Warden:
    """The launcher's side: starts the process and tells it what there is to end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "segue_ctl.warden"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the launcher's business
            text=True,
            bufsize=1,
        )

    def watch(self, pgid: int) -> None:
        """End this group if the launcher dies."""
        self._tell(f"+{pgid}")

    def forget(self, pgid: int) -> None:
        """The group has ended; its number may soon belong to somebody else."""
        self._tell(f"-{pgid}")

    def remove_folder(self, folder: Path | None) -> None:
        """Remove `folder` if the launcher dies (None: no longer)."""
        self._tell(f"={folder or ''}")

    def close(self) -> None:
        """Let it finish."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(timeout=30)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # without its warden the launcher works on
            self._process.stdin.write(line + "\n")


def main(source: TextIO = sys.stdin) -> int:
    """`python -m segue_ctl.warden`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes when its launcher goes, not before
    groups: set[int] = set()
    folder = ""
    for raw in source:
        line = raw.strip()
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
        elif line.startswith("="):
            folder = line[1:]
    if groups:
        end_groups(groups, grace_s=_GRACE_S)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

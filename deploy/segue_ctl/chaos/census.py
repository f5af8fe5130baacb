"""What processes hold: open files by kind, the most memory they ever had, replicas. For finding leaks.

Reads /proc (Linux) and the daemons' `/status`. It judges nothing but growth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from segue_core.messages.status import DaemonStatus

Files = dict[str, Counter[str]]
"""Of each process by name: how many descriptors of each kind."""
_NUMBER = re.compile(r"\[?\d+\]?")


def open_files(pid: int) -> Counter[str]:
    """Descriptors of a process by what they are: `socket`, `memfd:segue-arena`, `pipe`, ...

    Files on disk are one kind. A process that is gone has none.
    """
    kinds: Counter[str] = Counter()
    for link in _entries(Path(f"/proc/{pid}/fd")):
        try:
            target = str(link.readlink())
        except OSError:
            continue  # closed meanwhile
        target = target.removesuffix(" (deleted)").removeprefix("/")
        if target.startswith(("socket:", "pipe:", "memfd:", "anon_inode:")):
            kinds[_NUMBER.sub("", target).rstrip(":")] += 1
        else:
            kinds["file"] += 1
    return kinds


def high_water_bytes(pid: int) -> int:
    """The most memory that was ever resident in a process; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def grown(before: Files, after: Files) -> Files:
    """What there is more of, by process; nothing is set off against anything else."""
    more = {name: now - before.get(name, Counter()) for name, now in after.items()}
    return {name: kinds for name, kinds in more.items() if kinds}


def total(files: Files) -> int:
    """All of them together."""
    return sum(kinds.total() for kinds in files.values())


def held(statuses: Iterable[DaemonStatus]) -> int:
    """Replicas and leases that daemons hold."""
    return sum(status.store.replicas + status.store.leases for status in statuses)


def words(files: Mapping[str, Counter[str]]) -> str:
    """For people."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        for name, kinds in sorted(files.items())
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []

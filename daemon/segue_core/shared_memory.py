"""Memory that is handed to another process: sealed against shrinking, passed read only where it is only read.

A process that maps a file which its owner then truncates is killed by SIGBUS. Seals rule that out for
what Segue makes itself; a descriptor opened read only cannot be mapped for writing.
"""

from __future__ import annotations

import fcntl
import os

from segue_core.errors import ProtocolError

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealable_memory(name: str) -> int:
    """A new anonymous memory file, to be sized and then sealed with `seal_size`."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_size(fd: int) -> None:
    """From now on nobody can change the size of `fd`."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE)


def check_sealed(fd: int, what: str) -> None:
    """Raise ProtocolError unless the size of `fd` is sealed."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"{what} is not an anonymous memory file") from error
    if seals & FIXED_SIZE != FIXED_SIZE:
        raise ProtocolError(f"{what} could shrink while it is mapped: its size is not sealed")


def read_only(fd: int) -> int:
    """A new descriptor of the same memory that can only be read. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

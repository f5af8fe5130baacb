"""The test double of the CUDA driver (tests/cuda/double): build it, say how it behaves, look into it.

Never loads it into the process of the tests: its errors stick to the process, as CUDA's do. Children get it
through `Settings.environment`, and ask and steer it with a `Control` of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from support import real_driver

SOURCES = Path(__file__).resolve().parents[1] / "cuda" / "double"
LIBRARY = "libcuda.so.1"
COMPILER = "gcc"
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wmissing-prototypes", "-pthread"]
# What `Control.counts` tells: how many of each the process holds now.
COUNTED = (
    "allocations",
    "contexts",
    "device_bytes",
    "double_opens",
    "events",
    "handles",
    "host_allocations",
    "import_opens",
    "imports",
    "mappings",
    "pending",
    "pinned_bytes",
    "registrations",
    "reservations",
    "streams",
)


def sources() -> list[Path]:
    """The double's C files, without the program that tries it on its own."""
    return sorted(set(SOURCES.glob("*.c")) - {SOURCES / "stress.c"})


def compile_with(flags: Sequence[str], files: Sequence[Path], output: Path) -> None:
    """Compile; a failure shows what the compiler said."""
    command = [COMPILER, *FLAGS, *flags, "-o", str(output), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def required() -> Path:
    """Where the built double lies; without a compiler the test is skipped."""
    import pytest  # children that only steer the double do without

    found = folder()
    if found is None:
        pytest.skip(f"the CUDA double is built with {COMPILER}, which is not installed")
    return found


def folder() -> Path | None:
    """A folder that holds the double as `libcuda.so.1`, built once in this process and removed at its end.

    None where there is no compiler."""
    if shutil.which(COMPILER) is None:
        return None
    made = Path(tempfile.mkdtemp(prefix="segue-cuda-double-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"]
    compile_with(flags, sources(), made / LIBRARY)
    return made


@dataclass(frozen=True)
class Settings:
    """How the double behaves in a process. tests/cuda/double/README.md says what each one means."""

    devices: int = 1
    visible: str | None = None
    memory_mb: int = 1024
    pinned_mb: int = 1024
    operation_us: int = 0
    megabytes_per_s: int = 0
    strict: bool = True
    driver_version: int = 13000
    orphan_memory: Literal["keep", "lose"] = "keep"
    orphan_event: Literal["hang", "done", "fail"] = "hang"
    lacks: tuple[Literal["ipc", "vmm_fd", "read_only_register"], ...] = ()
    failures: str = ""

    def environment(self, library_folder: Path) -> dict[str, str]:
        """The environment of a child process that finds the double where it looks for the driver; where the
        real one was asked for (`real_driver`), that of this process, whatever the settings."""
        if real_driver.wanted():
            return dict(os.environ)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        if self.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.visible
        if self.failures:
            environment["CUDA_DOUBLE_FAIL"] = self.failures
        return environment | {
            "LD_LIBRARY_PATH": str(library_folder),
            "CUDA_DOUBLE_DEVICES": str(self.devices),
            "CUDA_DOUBLE_MEM_MB": str(self.memory_mb),
            "CUDA_DOUBLE_PINNED_MB": str(self.pinned_mb),
            "CUDA_DOUBLE_OP_US": str(self.operation_us),
            "CUDA_DOUBLE_MBPS": str(self.megabytes_per_s),
            "CUDA_DOUBLE_STRICT": str(int(self.strict)),
            "CUDA_DOUBLE_DRIVER": str(self.driver_version),
            "CUDA_DOUBLE_ORPHAN": self.orphan_memory,
            "CUDA_DOUBLE_ORPHAN_EVENT": self.orphan_event,
            "CUDA_DOUBLE_LACKS": ",".join(self.lacks),
        }


def device_uuid(device: int) -> uuid.UUID:
    """The UUID of a device of the double, by its physical number."""
    return uuid.UUID(bytes=bytes((0x5E + 17 * i + 101 * device) % 256 for i in range(16)))


class Control:
    """Asks and steers the double that is loaded in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._library.cuda_double_calls.restype = ctypes.c_long
        self._library.cuda_double_count.restype = ctypes.c_long
        self._library.cuda_double_hold.argtypes = [ctypes.c_long]
        self._library.cuda_double_hold.restype = None

    def fail(self, failures: str) -> None:
        """Inject errors from now on: `entry point:nth call:code[:late]`, separated by commas; "" for none."""
        assert self._library.cuda_double_fail(failures.encode()) == 0, f"cannot be read: {failures}"

    def hold(self, after_bytes: int = 0) -> None:
        """Let this process's streams move so many bytes more, then stand still until `let_go`."""
        self._library.cuda_double_hold(after_bytes)

    def let_go(self) -> None:
        """Let the streams work again."""
        self._library.cuda_double_hold(-1)

    def calls(self, entry_point: str = "*") -> int:
        """How often an entry point was called in this process, refused calls included; "*": all of them."""
        return int(self._library.cuda_double_calls(entry_point.encode()))

    def count(self, what: str) -> int:
        """How many of something (see COUNTED) this process holds now."""
        number = int(self._library.cuda_double_count(what.encode()))
        assert number >= 0, f"the double does not count {what}"
        return number

    def counts(self) -> dict[str, int]:
        """All that is held now and is not nothing: equal before and after means that nothing leaked."""
        return {what: number for what in COUNTED if (number := self.count(what))}

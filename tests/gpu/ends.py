"""Starts the processes of a stage, and ends them with it. The driver is the real one, or the double."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.cuda_process import CudaProcess

HERE = Path(__file__).parent
ENGINE, DAEMON, TORCH = HERE / "engine_end.py", HERE / "daemon_end.py", HERE / "torch_end.py"


@dataclass(frozen=True)
class Bench:
    """What all stages share. `library`: where the double lies, or unused; `mib`: size of the KV memory;
    `seconds`: how long each speed is measured."""

    library: Path
    double: bool
    mib: int
    seconds: float

    @contextlib.contextmanager
    def process(self, program: Path, **variables: str) -> Iterator[CudaProcess]:
        """A child with the functions of `program`; killed at the end."""
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            child = CudaProcess(self.library, program)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        try:
            yield child
        finally:
            child.kill()

    @contextlib.contextmanager
    def engine(self) -> Iterator[CudaProcess]:
        """An engine with its context."""
        with self.process(ENGINE) as child:
            child.call("begin")
            yield child

    @contextlib.contextmanager
    def pair(self) -> Iterator[tuple[CudaProcess, CudaProcess]]:
        """(engine, daemon)."""
        with self.engine() as engine, self.process(DAEMON) as daemon:
            yield engine, daemon

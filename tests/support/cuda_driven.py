"""A process of the CUDA double whose driver calls a test writes one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cuda_double import Settings
from support.cuda_process import CudaProcess

ACTOR = Path(__file__).with_name("cuda_actor.py")
OK = "CUDA_SUCCESS"


class Driven(CudaProcess):
    """A child that does what `support/cuda_actor.py` can do; `stream` is its own once it has begun."""

    def __init__(self, library_folder: Path, settings: Settings | None = None) -> None:
        super().__init__(library_folder, ACTOR, settings)
        self.stream = 0

    def begin(self, ordinal: int = 0) -> Driven:
        """Initialise, with the primary context of a device and a stream."""
        self.stream = self.ok("start", ordinal)
        return self

    def ok(self, function: str, *arguments: Any, descriptors: list[int] | None = None) -> Any:
        """The value of a function that makes a driver call, which must succeed."""
        error, *values = self.call(function, *arguments, descriptors=descriptors)
        assert error == OK, f"{function}{arguments}: {error}"
        return None if not values else values[0] if len(values) == 1 else values

    def cu(self, name: str, *arguments: Any) -> Any:
        """What a driver call returns, which must succeed."""
        return self.ok("cu", name, *arguments)

    def error(self, name: str, *arguments: Any) -> str:
        """What a driver call answers: CUDA_SUCCESS or an error's name."""
        return str(self.call("cu", name, *arguments)[0])

    def held(self) -> dict[str, int]:
        """What the process holds: objects of the driver, open descriptors, mappings of device memory."""
        folder = Path(f"/proc/{self.process.pid}")
        mapped = (folder / "maps").read_text().count("memfd:cuda-double")
        descriptors = len(list((folder / "fd").iterdir()))
        return self.call("counts") | {"descriptors": descriptors, "mapped": mapped}

    def pinned(self, size: int) -> int:
        """Pinned host memory: its address."""
        return int(self.cu("cuMemHostAlloc", size, 0))

    def filled(self, byte: int, size: int) -> int:
        """Device memory full of one byte: its address."""
        memory = int(self.cu("cuMemAlloc", size))
        self.cu("cuMemsetD8Async", memory, byte, size, self.stream)
        self.cu("cuStreamSynchronize", self.stream)
        return memory


StartProcess = Callable[..., Driven]

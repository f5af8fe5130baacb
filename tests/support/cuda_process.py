"""A child process with the CUDA double in place of the driver, whose functions a test calls by name.

The child runs the functions of one Python file in its main thread, one at a time. Values travel as
MessagePack, descriptors beside them; an exception there is an `ActorError` here. Run as a module, this is
the child.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from support.cuda_double import Settings

TESTS = Path(__file__).resolve().parents[1]
ANSWER_S = 30.0
MAX_MESSAGE_BYTES = 1 << 17
MAX_DESCRIPTORS = 64


class ActorError(Exception):
    """A function in the child raised; the text is its traceback."""


class WithDescriptors:
    """A child's answer that carries descriptors; they are closed in the child once sent."""

    def __init__(self, value: Any, descriptors: list[int]) -> None:
        self.value = value
        self.descriptors = descriptors


class CudaProcess:
    """A child that has `program`'s functions and the double in `library_folder`."""

    def __init__(self, library_folder: Path, program: Path, settings: Settings | None = None) -> None:
        environment = (settings or Settings()).environment(library_folder)
        environment["PYTHONPATH"] = str(TESTS)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.cuda_process", str(program), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()

    def call(self, function: str, *arguments: Any, descriptors: list[int] | None = None) -> Any:
        """What the child's function returns; `descriptors` go to it as a keyword and are closed here."""
        value, received = self.call_for_descriptors(function, *arguments, descriptors=descriptors)
        assert not received, f"{function} sent descriptors that nobody takes"
        return value

    def call_for_descriptors(
        self, function: str, *arguments: Any, descriptors: list[int] | None = None
    ) -> tuple[Any, list[int]]:
        """The same with the descriptors that came with the answer, which are the caller's to close."""
        self.start(function, *arguments, descriptors=descriptors)
        return self.answer()

    def start(self, function: str, *arguments: Any, descriptors: list[int] | None = None) -> None:
        """Begin a call without waiting for its answer."""
        sent = descriptors or []
        socket.send_fds(self._socket, [msgspec.msgpack.encode([function, list(arguments)])], sent)
        for fd in sent:
            os.close(fd)

    def answer(self) -> tuple[Any, list[int]]:
        """The answer to the call that was started."""
        message, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            raise ActorError(f"the process is gone, exit status {self.process.wait(ANSWER_S)}")
        failed, value = msgspec.msgpack.decode(message)
        if failed:
            raise ActorError(value)
        return value, descriptors

    def expect_no_answer(self, wait_s: float = 0.1) -> None:
        """The call that was started does not end by itself."""
        readable, _, _ = select.select([self._socket], [], [], wait_s)
        assert not readable, f"it ended: {self.answer()}"

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead; safe to call twice."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ANSWER_S)
        self._socket.close()


Start = Callable[..., CudaProcess]
"""`start(program, **settings)`: an engine or a daemon with the double's settings."""


def perform(
    function: Callable[..., Any], arguments: list[Any], received: list[int]
) -> tuple[bytes, list[int]]:
    """Call it; the answer as a message, and the descriptors that go with it."""
    try:
        value = function(*arguments, descriptors=received) if received else function(*arguments)
    except Exception:
        return msgspec.msgpack.encode([True, traceback.format_exc()]), []
    if isinstance(value, WithDescriptors):
        return msgspec.msgpack.encode([False, value.value]), value.descriptors
    return msgspec.msgpack.encode([False, value]), []


def serve(program: str, connection: socket.socket) -> None:
    """Answer calls until the parent is gone."""
    functions = runpy.run_path(program, run_name=Path(program).stem)
    while True:
        message, received, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return
        name, arguments = msgspec.msgpack.decode(message)
        answer, descriptors = perform(functions[name], arguments, received)
        socket.send_fds(connection, [answer], descriptors)
        for fd in descriptors:
            os.close(fd)


if __name__ == "__main__":
    from support import cuda_process  # the module that programs know, not this one under its second name

    cuda_process.serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))

"""A daemon whose driver hangs while it opens an engine's GPU memory: the double beneath a real daemon."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from segue_core.framing import close_fds, decode, recv_with_fds, send_with_fds
from segue_core.messages.local import Refused, Register, ToEngine
from support.cuda_double import Settings
from support.cuda_process import CudaProcess
from support.daemons import DaemonProcess, DaemonSet
from support.waiting import wait_for

ENGINE = Path(__file__).parent / "gpu_engine.py"
TIMES = 20


@pytest.fixture
def daemons(library_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonSet]:
    """One daemon whose first IPC handle is never opened."""
    settings = Settings(failures="cuIpcOpenMemHandle:1:hang")
    for name, value in settings.environment(library_folder).items():
        monkeypatch.setenv(name, value)
    made = DaemonSet("a")
    yield made
    made.stop()


def ask(daemon: DaemonProcess, engine: CudaProcess) -> socket.socket:
    """Ask the daemon to take the engine in."""
    message, fds = engine.call_for_descriptors("register", "cuda_ipc")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(daemon.socket)
    send_with_fds(connection, msgspec.msgpack.decode(message, type=Register), fds)
    close_fds(fds)
    return connection


def test_a_driver_that_hangs_while_memory_is_opened_holds_nobody_up(
    daemons: DaemonSet, library_folder: Path
) -> None:
    """The daemon goes on serving, tells other engines to try again, and stops when it is told to."""
    daemon = daemons.start()["a"]
    engine = CudaProcess(library_folder, ENGINE)
    try:
        with ask(daemon, engine):
            wait_for(lambda: "opening an engine's memory" in daemon.log.read_text(), "it is being opened")
            for _ in range(TIMES):
                assert daemon.status()["engine"]["state"] == "absent"
            with ask(daemon, engine) as second:
                body, _ = recv_with_fds(second, peer="daemon", limit=1 << 16)
                answer = decode(body, ToEngine, peer="daemon")
                assert isinstance(answer, Refused) and answer.retry and "being opened" in answer.reason
            assert daemon.stop() == 0
    finally:
        engine.kill()

"""The unix socket and its folder: no other user of the host gets at the engine's memory through them."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

import pytest

from segue_core.credentials import check_client, check_server
from segue_core.errors import ProtocolError, StartupError
from segue_daemon.local import LocalServer, own_folder


def test_a_folder_that_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """Its parent must be there: a whole path that is missing is a typing error."""
    before = os.umask(0o277)
    try:
        own_folder(tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    with pytest.raises(StartupError, match=r"does not exist.*mkdir -p -m 700"):
        own_folder(tmp_path / "none" / "run")


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o750, 0o777])
def test_a_folder_that_others_may_enter_is_refused(mode: int, tmp_path: Path) -> None:
    """They could put a socket of their own in place of the daemon's."""
    tmp_path.chmod(mode)
    with pytest.raises(StartupError, match=rf"other users may use the folder .*{mode:04o}.*chmod 700"):
        own_folder(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could do the same."""
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    if tmp_path.stat().st_uid == 0:
        monkeypatch.setattr(Path, "stat", lambda _: os.stat_result((0o40700, 0, 0, 0, 1234, 0, 0, 0, 0, 0)))
    with pytest.raises(StartupError, match="belongs to user"):
        own_folder(tmp_path)


async def test_the_socket_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    """0600, from its first moment."""
    before = os.umask(0)
    server = LocalServer(tmp_path / "d.sock", handler=None)  # type: ignore[arg-type]
    try:
        await server.start()
        assert stat.S_IMODE((tmp_path / "d.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)
        await server.stop()


class From(socket.socket):
    """A connection whose other end the kernel names as it is told."""

    peer = (0, 0, 0)

    def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:  # type: ignore[override]
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", *self.peer)


def test_only_this_user_and_root_may_connect() -> None:
    """Whoever else has got hold of the socket is sent away by name."""
    with From(socket.AF_UNIX) as connection:
        connection.peer = (17, os.geteuid(), 0)
        assert check_client(connection) == 17
        connection.peer = (18, 0, 0)
        assert check_client(connection) == 18
        connection.peer = (19, os.geteuid() + 1, os.getegid())
        with pytest.raises(ProtocolError, match=rf"process 19 of user {os.geteuid() + 1} may not connect"):
            check_client(connection)


def test_an_engine_shows_its_memory_to_no_other_users_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever puts a socket where the daemon's should be, while that is away, gets nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with From(socket.AF_UNIX) as connection:
        for connection.peer in ((17, 1000, 0), (18, 0, 0)):
            check_server(connection)
        connection.peer = (19, 1001, 1000)
        with pytest.raises(ProtocolError, match=r"user 1001 listens there.*neither this user \(1000\)"):
            check_server(connection)

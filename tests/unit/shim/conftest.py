"""Shared pieces of the shim's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from segue_shim.exporter import Exporter
from support.daemon_stub import DaemonStub
from support.kv_pages import FAST


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    """Where the daemon of this test lives."""
    return str(tmp_path / "d.sock")


@pytest.fixture
def exporter(socket_path: str) -> Iterator[Exporter]:
    """An engine's exporter, not registered yet."""
    made = Exporter(socket_path, engine="a", model="m", fingerprint=b"f" * 16, incarnation=5, options=FAST)
    yield made
    made.close()


@pytest.fixture
def stub(socket_path: str) -> Iterator[DaemonStub]:
    """A daemon that accepts everything."""
    made = DaemonStub(socket_path)
    yield made
    made.kill()

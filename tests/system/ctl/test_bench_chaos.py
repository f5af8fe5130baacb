"""`seguectl bench chaos` for real, but short: what it finds, and that it would find something."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from segue_ctl import bench_chaos
from segue_ctl.chaos.plan import WEIGHTS
from segue_ctl.chaos.wires import Wire
from segue_ctl.cli import main
from segue_ctl.commands import console_script

DEFECTIVE = Path(__file__).with_name("defective_toy.py")
DEADLINE_S = 280.0
SMALL = ("--engines", "2", "--streams", "8", "--step-ms", "10", "--minutes", "2", "--quiet", "--json", "-")
SHORT = {"engine_kill", "engine_stop", "engine_cut", "daemon_stop", "peer_cut", "watch_cut"}
"""Of a killed daemon's replicas peers keep some for a minute: too long for a test."""


def only(kinds: set[str]) -> list[str]:
    """The options that leave all other kinds of faults out."""
    return [each for kind in sorted(WEIGHTS.keys() - kinds) for each in ("--without", kind)]


MUST_BE_ZERO = (
    "lost_tokens",
    "repeated_tokens",
    "unequal_streams",
    "failed_streams",
    "leaked_fds",
    "leaked_replicas",
)


@pytest.mark.timeout(300)
def test_a_storm_leaves_no_trace() -> None:
    """Engines killed, stopped and cut off under load: no answer shows it, and nothing stays behind."""
    options = ("--failovers", "8", "--seed", "11", *SMALL, *only(SHORT))
    command = [console_script("seguectl"), "bench", "chaos", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert {name: figures[name] for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0), done.stderr
    assert figures["failovers"] >= 8 and figures["streams"] >= 8, done.stderr
    assert figures["kv_loads"] and figures["verified_kv_bytes"] and not figures["left_behind"]
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
def test_a_storm_finds_engines_that_go_on_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines that skip a token, say one twice or forget a byte of KV when they take over: all is counted."""
    real = bench_chaos.run
    monkeypatch.setattr(bench_chaos, "run", lambda args: real(args, program=(str(DEFECTIVE),)))
    status = main(["bench", "chaos", "--failovers", "6", "--seed", "2", *SMALL, *only({"engine_kill"})])
    figures = json.loads(capsys.readouterr().out)
    assert figures["lost_tokens"] and figures["repeated_tokens"]
    assert figures["unequal_streams"] >= 3
    assert status == 1


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (("--engines", "1"), "--engines"),
        (("--failovers", "0"), "--failovers"),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    option: tuple[str, str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the option, before anything is started."""
    assert main(["bench", "chaos", *option]) == 2
    assert what in capsys.readouterr().err


@asynccontextmanager
async def wired() -> AsyncIterator[tuple[Wire, asyncio.StreamReader, asyncio.StreamWriter, int]]:
    """A connection over a wire to a server that echoes; the port of the wire."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    front = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = front.sockets[0].getsockname()[1]
    front.close()
    await front.wait_closed()
    wire = Wire("w")
    await wire.listen("127.0.0.1", port, "127.0.0.1", server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            yield wire, reader, writer, port
    finally:
        writer.close()
        await wire.close()
        server.close()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> bytes:
    writer.write(word)
    return await reader.readexactly(len(word))


async def test_a_wire_passes_on_and_a_cut_resets() -> None:
    """What ran over it is reset, and so is what comes while it is cut; afterwards it works again."""
    async with wired() as (wire, reader, writer, port):
        assert await said(reader, writer, b"one") == b"one"
        wire.hurt("cut")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        with pytest.raises(ConnectionResetError):
            late, _ = await asyncio.open_connection("127.0.0.1", port)
            await late.readexactly(1)
        wire.hurt("")
        reader, second = await asyncio.open_connection("127.0.0.1", port)
        assert await said(reader, second, b"two") == b"two"
        second.close()


@pytest.mark.parametrize("harm", ["hole", "slow"])
async def test_a_wire_loses_nothing(harm: Any) -> None:
    """What goes into a hole comes out once it has healed, in order; a slow wire is late."""
    async with wired() as (wire, reader, writer, _):
        wire.hurt(harm)
        writer.write(b"held ")
        await writer.drain()
        writer.write(b"back")
        if harm == "hole":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.readexactly(1)
            wire.hurt("")
        assert await reader.readexactly(9) == b"held back"

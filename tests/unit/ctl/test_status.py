"""`seguectl status` against small servers: exit status, tables, JSON."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from segue_core.messages.status import (
    CopiesStatus,
    DaemonStatus,
    EngineStatus,
    PeerStatus,
    RouterEngine,
    RouterStatus,
    StoreStatus,
)
from segue_ctl.cli import main
from segue_ctl.status import DEFAULT_URL
from segue_router.settings import ListenSettings

Serve = Callable[[Any], str]


def router(ready: bool = True) -> RouterStatus:
    """A router with one engine."""
    engine = RouterEngine(
        "a", "http://127.0.0.1:1", "m", "up" if ready else "down", 2, daemon_state="running"
    )
    return RouterStatus("0.1.0", ready, (engine,), 2, 1, 1, 0)


def daemon(ready: bool = True) -> DaemonStatus:
    """A daemon with one peer."""
    return DaemonStatus(
        "a",
        "0.1.0",
        7,
        ready,
        EngineStatus("a", "running", pid=42, sequences=3),
        (PeerStatus("b", "127.0.0.1:7202", True, lag_tokens=5),),
        StoreStatus(1 << 30, 1 << 20, 0, 2, 0, 0),
    )


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers whose /status is the given body, in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(body: Any) -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(body), content_type="application/json")

        app = web.Application()
        app.router.add_get("/status", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    yield lambda body: asyncio.run_coroutine_threadsafe(start(body), loop).result(10)
    asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_without_arguments_the_router_on_this_host_is_asked() -> None:
    """At the address where a router listens unless its configuration says otherwise."""
    listen = ListenSettings()
    assert f"http://{listen.host}:{listen.port}" == DEFAULT_URL


def test_ready_processes_are_shown_and_give_status_0(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which of the two it is shows in the JSON; no option is needed."""
    assert main(["status", serve(router()), serve(daemon())]) == 0
    out = capsys.readouterr().out
    assert "router http://127.0.0.1" in out and "daemon a http://127.0.0.1" in out
    assert "LAG TOKENS" in out and "replicas" in out and "\x1b" not in out


def test_a_daemon_shows_how_well_it_protects_in_a_terminals_width(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lag, copies, room, what was given up and fenced, and where each peer is; long names do not break the
    table, and a link that is down says why."""
    peers = (
        PeerStatus(
            "p" * 64,
            "10.11.12.13:7202",
            True,
            sequences=20_000,
            lag_tokens=123_456,
            lag_ms=98_765.4,
            lag_p99_ms=4321.0,
            throttled_ms=65_000,
            sent_bytes=1 << 45,
            free_bytes=1 << 40,
            host="h" * 64,
            zone="z" * 64,
        ),
        PeerStatus("c", "127.0.0.1:7203", False, detail="no answer in time", host="host-c", zone="rack-1"),
    )
    body = msgspec.structs.replace(
        daemon(),
        peers=peers,
        engine=EngineStatus("a", "running", pid=42, sequences=3, fenced=1),
        store=StoreStatus(
            1 << 30,
            1 << 20,
            0,
            2,
            0,
            0,
            own_replicas=1,
            room_bytes=5 << 20,
            poisoned_blocks=7,
            tier_bytes=2 << 20,
            tier_used_bytes=1 << 20,
            tier_blocks=8,
            tier_hits=4,
        ),
        copies=CopiesStatus(wanted=3, placed=3, achieved=2),
    )
    assert main(["status", serve(body)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120, out
    for said in (
        "3, of which 1 fenced",
        "wanted 3, achieved 2",
        "2 (1 of this host's engine)",
        "room 5.0 MiB",
        "poisoned 7",
        "8 blocks in 1.0 of 2.0 MiB, hits 4",
    ):
        assert said in out, out
    assert all(
        said in out for said in ("123456", "98765.4", "4321.0", "65.0", "host-c/rack-1", "pppp…", "hhh…")
    )
    assert "c (127.0.0.1:7203): no answer in time" in out


@pytest.mark.parametrize("body", [router(ready=False), daemon(ready=False)])
def test_a_process_that_is_not_ready_gives_status_3(
    body: Any, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script can act on the exit status alone."""
    assert main(["status", serve(body)]) == 3
    assert "not ready" in capsys.readouterr().out


def test_nothing_there_gives_status_3_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An operator sees which address does not answer and why, not a traceback."""
    assert main(["status", "127.0.0.1:9"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "seguectl: http://127.0.0.1:9: cannot connect: Connection refused\n"


def test_another_service_is_not_taken_for_segue(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong port is told as such."""
    assert main(["status", serve({"hello": 1})]) == 3
    assert "not a Segue status endpoint" in capsys.readouterr().err


def test_json_has_the_documented_shape(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs find kind, readiness and the endpoint's own fields under each URL."""
    url = serve(daemon())
    assert main(["status", "--json", url, "http://127.0.0.1:9"]) == 3
    body = json.loads(capsys.readouterr().out)
    assert body[url]["kind"] == "daemon" and body[url]["ready"] is True
    assert body[url]["status"]["peers"][0]["lag_tokens"] == 5
    assert body["http://127.0.0.1:9"]["kind"] == "unreachable" and body["http://127.0.0.1:9"]["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "ftp://x"],
        ["status", "http://[::1"],
        ["status", "http://x:99999999"],
        ["status", "--watch", "0"],
    ],
)
def test_bad_arguments_give_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A usage mistake is one line on standard error."""
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1

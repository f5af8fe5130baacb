"""`seguectl drain` against a small server: what it prints, and what its exit status tells a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from segue_core.messages.status import DrainProgress, ErrorBody
from segue_ctl.cli import main

BUSY = DrainProgress("a", active=2, moved=3, staying=1, done=False)
EMPTY = DrainProgress("a", active=0, moved=5, staying=0, done=True)
LATE = DrainProgress("a", active=1, moved=4, staying=1, done=False, detail="not empty within 9 s")


class Servers:
    """Starts routers that answer every POST with given lines; `asked`: the queries of all of them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.runners: list[web.AppRunner] = []

    async def __call__(self, *lines: msgspec.Struct, status: int = 200) -> str:
        async def answer(http: web.Request) -> web.Response:
            self.asked.append(dict(http.query))
            return web.Response(status=status, body=b"".join(msgspec.json.encode(x) + b"\n" for x in lines))

        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app)
        self.runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def serve() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    for runner in servers.runners:
        await runner.cleanup()


async def seguectl(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_an_empty_engine_gives_status_0(serve: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each change, and none where nothing changed."""
    url = await serve(BUSY, BUSY, EMPTY)
    assert await seguectl("drain", "a", "--router", url, "--timeout", "1.5") == 0
    assert capsys.readouterr().out == "a: 2 left (1 cannot move), 3 moved\na: empty, 5 moved\n"
    assert serve.asked == [{"engine": "a", "timeout_ms": "1500"}]


async def test_an_engine_that_is_not_empty_in_time_gives_status_1(
    serve: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what is left."""
    assert await seguectl("drain", "a", "--router", await serve(BUSY, LATE)) == 1
    assert "1 left (1 cannot move), 4 moved: not empty within 9 s" in capsys.readouterr().out


async def test_json_is_the_routers_own_lines(serve: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get each of them."""
    assert await seguectl("drain", "a", "--json", "--router", await serve(BUSY, BUSY, EMPTY)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["active"] for line in lines] == [2, 2, 0]
    assert lines[-1] == msgspec.to_builtins(EMPTY)


@pytest.mark.parametrize("verb", ["drain", "undrain"])
async def test_an_unknown_engine_gives_status_2_and_names_the_known_ones(
    verb: str, serve: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing mistake is no failure of the router."""
    url = await serve(ErrorBody("no engine is called 'x'", hint="engines: a, b"), status=404)
    assert await seguectl(verb, "x", "--router", url) == 2
    assert capsys.readouterr().err == "seguectl: no engine is called 'x' (engines: a, b)\n"


@pytest.mark.parametrize("verb", ["drain", "undrain"])
async def test_no_router_gives_status_3(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says where nothing answers."""
    assert await seguectl(verb, "a", "--router", "http://127.0.0.1:9") == 3
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "Connection refused" in captured.err


async def test_an_answer_that_ends_too_early_gives_status_3(
    serve: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router went away: nobody may take the engine for empty."""
    assert await seguectl("drain", "a", "--router", await serve(BUSY)) == 3
    assert "ended too early" in capsys.readouterr().err


async def test_another_service_is_not_taken_for_a_router(
    serve: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong port is told as such."""
    assert await seguectl("drain", "a", "--router", await serve(ErrorBody("x"))) == 3
    assert "not a Segue router" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "1e9"])
async def test_a_deadline_that_is_none_gives_status_2(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage mistake is one line."""
    assert await seguectl("drain", "a", f"--timeout={seconds}") == 2
    assert capsys.readouterr().err.count("\n") == 1

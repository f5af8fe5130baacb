"""The router's token: what needs it, what does not, and that daemons are shown it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from yarl import URL

from segue_core.errors import ConfigError, StartupError
from segue_core.messages.status import EngineStatus, RouterStatus
from segue_core.security import read_tokens
from segue_core.service import guarded, json_response, start_http
from segue_ctl.cli import main
from segue_daemon.tls import web_context
from segue_router.access import load_access
from segue_router.app import running_router
from segue_router.daemons import HttpDaemon
from segue_router.settings import RouterSettings
from support.keys import make_keys
from system.router.harness import Stage, eventually


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(stack)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cluster's keys."""
    return make_keys(tmp_path_factory.mktemp("keys") / "cluster", "a").parent


async def test_orders_and_status_need_the_token_and_answers_do_not(stage: Stage, keys: Path) -> None:
    """Clients bring their own keys, which go to the engine; whoever may drain shows the cluster's token."""
    router = await stage.router([await stage.engine()], security={"dir": str(keys / "router")})
    headers = read_tokens(keys / "router" / "token", "x").headers
    paths = [("GET", "/status"), ("GET", "/metrics"), ("GET", "/v1/segue/requests/x")]
    paths += [("POST", "/drain?engine=a&wait=false"), ("POST", "/undrain?engine=a")]
    for method, path in paths:
        for shown in ({}, {"Authorization": "Bearer " + "x" * 43}, {"Authorization": "Basic eDp5"}):
            async with router.session.request(method, router.url + path, headers=shown) as answer:
                assert answer.status == 401, path
                assert "token" in (await answer.json())["error"]
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        async with router.session.request(method, router.url + path, headers=headers) as answer:
            assert answer.status in (200, 404), path
    assert not router.context.registry["a"].draining
    for path in ("/livez", "/readyz", "/health", "/v1/models"):
        assert (await router.get(path))[0] == 200
    body = {"model": "fake", "prompt": "x", "max_tokens": 2, "stream": True}
    answer = await router.ask("/v1/completions", body)
    assert answer.status == 200 and answer.done


class SafeDaemon:
    """A daemon that wants the token, over TLS with the cluster's certificate."""

    def __init__(self, keys: Path) -> None:
        self.keys = keys
        self.watched = 0

    async def start(self, stack: AsyncExitStack) -> str:
        own = self.keys / "daemons" / "a"
        app = web.Application()
        app.router.add_get("/v1/watch", guarded(self._watch, read_tokens(own / "token", "x")))
        runner, port = await start_http(app, "127.0.0.1", 0, what="http", tls=web_context(own))
        stack.push_async_callback(runner.cleanup)
        return f"https://127.0.0.1:{port}"

    async def _watch(self, http: web.Request) -> web.Response:
        self.watched += 1
        return web.Response(body=msgspec.json.encode(EngineStatus("e", "running", incarnation=1)) + b"\n")


async def test_a_daemon_that_wants_token_and_tls_is_heard_and_no_other(
    stage: Stage, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router with the cluster's folder gets in; without it, or with another cluster's, it says why not."""
    other = make_keys(tmp_path / "other", "a").parent
    wrong_token = tmp_path / "token"
    wrong_token.write_text("y" * 20)
    wrong_token.chmod(0o600)
    daemon = SafeDaemon(keys)
    url, engine = await daemon.start(stage.stack), await stage.engine()

    async def router_with(**security: str) -> None:
        await stage.router([engine], engine={"daemon": url}, security=security)

    said = ""

    def has_said(text: str) -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return text in said

    folder = str(keys / "router")
    await router_with(dir=folder, token_file=str(wrong_token))
    await eventually(lambda: has_said("wants the cluster's token"), "the token is refused")
    await router_with(dir=str(other / "router"))
    await eventually(lambda: has_said("no TLS with it"), "the certificate is refused")
    assert daemon.watched == 0
    await router_with(dir=folder)
    await eventually(lambda: daemon.watched, "heard")


def test_a_router_beyond_loopback_needs_a_token(keys: Path) -> None:
    """Else whoever can ask could also drain; and a daemon on another host would refuse it."""
    engine = {"name": "a", "url": "http://10.0.0.1:9000"}
    cases = [({"host": "0.0.0.0"}, engine), ({}, engine | {"daemon": "http://10.0.0.1:7101"})]
    for listen, entry in cases:
        tree = {"engines": [entry], "listen": listen}
        with pytest.raises(ConfigError, match=r"`(listen.host|engines\[\].daemon of a)`.*no token.*keygen"):
            load_access(msgspec.convert(tree, RouterSettings))
        opened = load_access(msgspec.convert(tree | {"security": {"insecure": True}}, RouterSettings))
        assert len(opened.openings) == 1
        safe = tree | {"security": {"dir": str(keys / "router")}}
        assert not load_access(msgspec.convert(safe, RouterSettings)).openings


async def test_seguectl_speaks_https_with_the_clusters_ca(
    stage: Stage, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with no other; it says that it is the certificate, and which option helps."""
    app, own = web.Application(), keys / "daemons" / "a"

    async def status(_: web.Request) -> web.Response:
        return json_response(RouterStatus("0", True, (), 0, 0, 0, 0))

    app.router.add_get("/status", status)
    runner, port = await start_http(app, "127.0.0.1", 0, what="http", tls=web_context(own))
    stage.stack.push_async_callback(runner.cleanup)
    other = make_keys(tmp_path / "other", "a").parent

    async def asked_with(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["status", f"https://127.0.0.1:{port}", *arguments])

    assert await asked_with("--ca", str(keys / "router" / "ca.crt")) == 0
    for arguments in ((), ("--ca", str(other / "router" / "ca.crt"))):
        assert await asked_with(*arguments) == 3
        said = capsys.readouterr().err
        assert "no TLS with it" in said and "certificate" in said and "--ca FILE" in said


async def test_seguectl_shows_its_token(
    stage: Stage, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By option or variable; without one it says which."""
    router = await stage.router([await stage.engine()], security={"dir": str(keys / "router")})

    async def seguectl(*arguments: str) -> int:
        return await asyncio.to_thread(main, list(arguments))

    token = keys / "router" / "token"
    assert await seguectl("status", router.url) == 3
    assert await seguectl("drain", "a", "--router", router.url) == 2
    said = capsys.readouterr().err
    assert said.count("--token-file") == 2 and said.count("SEGUE_TOKEN") == 2
    assert await seguectl("status", router.url, "--token-file", str(token)) == 0
    monkeypatch.setenv("SEGUE_TOKEN", token.read_text())
    assert await seguectl("drain", "a", "--router", router.url) == 0
    await eventually(lambda: router.context.registry["a"].draining, "drained")
    assert await seguectl("undrain", "a", "--router", router.url) == 0
    assert not router.context.registry["a"].draining


async def test_the_token_goes_to_no_engine(stage: Stage, keys: Path) -> None:
    """Probes and answers carry the keys that are meant for the engine, never the cluster's token."""
    seen: list[str | None] = []

    async def note(http: web.Request) -> web.Response:
        seen.append(http.headers.get("Authorization"))
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", note)
    runner, port = await start_http(app, "127.0.0.1", 0, what="x")
    stage.stack.push_async_callback(runner.cleanup)
    engine = {"name": "a", "url": f"http://127.0.0.1:{port}", "model": "m"}
    tree = {"engines": [engine], "security": {"dir": str(keys / "router")}, "listen": {"port": 0}}
    settings = msgspec.convert(tree, RouterSettings)
    async with running_router(settings) as (_, own), aiohttp.ClientSession() as client:
        await eventually(lambda: len(seen) > 1, "probed")
        mine = {"Authorization": "Bearer mine"}
        async with client.get(f"http://127.0.0.1:{own}/v1/anything", headers=mine) as answer:
            assert answer.status == 200
        token = read_tokens(keys / "router" / "token", "x").headers["Authorization"]
        slips = [
            ("GET", "/drain?engine=a"),
            ("POST", "/drain/?engine=a"),
            ("POST", "//drain"),
            ("POST", "/status"),
        ]
        for method, path in [*slips, ("POST", "/v1/completions"), ("GET", "/v1/segue/x")]:
            for shown in ([token], ["Bearer mine", token]):
                url = URL(f"http://127.0.0.1:{own}{path}", encoded=True)
                headers = [("Authorization", value) for value in shown]
                async with client.request(method, url, headers=headers, json={"prompt": "x"}) as answer:
                    assert answer.status == 400 and "the cluster's token" in await answer.text(), path
    assert set(seen) == {None, "Bearer mine"}


async def test_a_daemon_that_is_not_understood_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Its engine counts as unprotected for as long as that lasts: the log says why."""
    bad = b'{"engine": "e", "state": "running", "generation_defaults": {"x": null}}\n'
    lines = [bad, bad, b'{"engine": "e", "sta']  # the last of them first: of a daemon that died meanwhile

    async def watch(_: web.Request) -> web.Response:
        return web.Response(body=lines.pop() if lines else b'{"engine": "e", "state": "running"}\n')

    app = web.Application()
    app.router.add_get("/v1/watch", watch)
    runner, port = await start_http(app, "127.0.0.1", 0, what="x")
    async with aiohttp.ClientSession() as session:
        daemon = HttpDaemon(session, f"http://127.0.0.1:{port}")
        heard = [[status.state async for status in daemon.watch()] for _ in range(4)]
    assert heard == [[], [], [], ["running"]]
    assert capsys.readouterr().out.count("cannot be read") == 1
    await runner.cleanup()


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
async def test_an_address_that_is_none_gets_one_clear_line(host: str) -> None:
    """A slip in `http.host` or `listen.host` is no traceback."""
    with pytest.raises(StartupError, match=r"http: cannot listen on .*no host's name"):
        await start_http(web.Application(), host, 0, what="http")

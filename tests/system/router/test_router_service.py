"""The router as a service: its endpoints, users' mistakes, pass-through, start and stop of the process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path

import aiohttp
import pytest
import yaml

from system.router.asked import CHAT, COMPLETIONS, assert_uninterrupted, request
from system.router.fake_engine import Fault
from system.router.harness import DEADLINE_S, FAST, Client, Stage, eventually, session_of
from system.router.router_process import run_process, start_process, until_ready


async def test_mistakes_are_explained_in_the_form_clients_know(stage: Stage) -> None:
    """Garbage is 400, an unknown model 404 with the models there are, too much is 413."""
    client = await stage.router([await stage.engine()], limits={"max_body_bytes": 2048})
    for body in (b"{nonsense", b"[1]", b"\xff\xfe", b'{"model": 5}', b"[" * 2000, b'{"a":' * 400):
        answer = await client.ask(COMPLETIONS, body)
        assert answer.status == 400
        assert answer.body["error"]["type"] == "invalid_request_error"
    answer = await client.ask(CHAT, request(CHAT, model="other"))
    assert answer.status == 404
    assert "fake" in answer.body["error"]["message"]
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, prompt="x" * 3000))
    assert answer.status == 413


async def test_no_engine_is_503(stage: Stage) -> None:
    """Nothing can be reached: not ready, and a clear error at once."""
    engine = await stage.engine()
    client = await stage.router([engine])
    await engine.stop()
    await eventually(lambda: not client.context.registry.ready, "it is seen")
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS))
    assert answer.status == 503
    assert answer.body["error"]["code"] == "no_engine_available"
    assert (await client.get("/readyz"))[0] == 503
    assert (await client.get("/livez"))[0] == 200


async def test_own_endpoints(stage: Stage) -> None:
    """Ready, status, metrics, models."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    assert (await client.get("/readyz"))[0] == 200
    assert (await client.get("/health"))[0] == 200
    status = await client.status()
    assert status.ready
    assert [(e.name, e.model, e.state) for e in status.engines] == [("a", "fake", "up"), ("b", "fake", "up")]
    _, models = await client.get("/v1/models")
    assert [card["id"] for card in models["data"]] == ["fake"]
    metrics = await client.metrics()
    assert 'segue_router_engine_state{engine="a",state="up"} 1.0' in metrics
    assert (await client.get("/v1/segue/requests/nothing"))[0] == 404


async def test_other_paths_are_passed_through(stage: Stage) -> None:
    """Any method, with query and body; a stream that breaks does not end as if it were complete."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    answer = await client.ask("/tokenize", {"model": "fake", "prompt": "ab"})
    assert answer.body == {"tokens": [1097, 1098]}
    async with client.session.put(client.url + "/v1/echo?a=1%26b", data=b"hi") as response:
        assert await response.json() == {"method": "PUT", "query": "a=1%26b", "body": "hi"}
    async with client.session.post(client.url + "/v1/broken", data=b"{}") as response:
        raw = await response.read()
        assert b"event: error" in raw
    async with client.session.get(client.url + "/nowhere") as response:
        assert response.status == 404


async def test_passed_through_streams_are_honest(stage: Stage) -> None:
    """Several choices: every event reaches the client; `[DONE]` only if each choice finished."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    body = request(CHAT, n=2, stream_options={"include_usage": True})
    answer = await client.ask(CHAT, body)
    assert answer.done
    assert len(answer.finishes) == 2
    for kind in ("die", "error_event", "done_without_finish", "malformed"):
        stage.faults.append(Fault(kind, 30))
        answer = await client.ask(CHAT, body)
        assert answer.error is not None
        assert not answer.done


async def test_load_is_bounded(stage: Stage) -> None:
    """Beyond max_active: a clear 503."""
    engine = await stage.engine()
    client = await stage.router([engine], limits={"max_active": 1})
    stage.faults.append(Fault("silent", 3))
    first = asyncio.create_task(client.ask(COMPLETIONS, request(COMPLETIONS)))
    await engine.arrived.wait()
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS))
    assert answer.status == 503
    assert answer.body["error"]["code"] == "overloaded"
    assert 'outcome="failed"' in await client.metrics(), "the client did nothing wrong"
    assert (await first).done


async def raw(client: Client, data: bytes) -> bytes:
    """What a client gets that writes its own HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
    writer.write(data)
    await writer.drain()
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read(4096)
    writer.close()
    return answer


async def test_uploads_count_as_load_and_end_in_time(stage: Stage) -> None:
    """Clients that send their bodies slowly, or never, hold neither memory nor room without bound."""
    client = await stage.router([await stage.engine()], limits={"max_active": 1}, timeouts={"body_ms": 400})
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\nxxxx"
    slow = asyncio.create_task(raw(client, start))
    await eventually(lambda: client.context.admitted, "the upload has begun")
    assert (await raw(client, start)).startswith(b"HTTP/1.1 503")
    assert (await slow).startswith(b"HTTP/1.1 408")
    body = request(COMPLETIONS)
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)


async def test_targets_and_headers_as_old_clients_write_them(stage: Stage) -> None:
    """A target with scheme and host, a session that is not UTF-8: served like any other."""
    client = await stage.router([await stage.engine(), await stage.engine()])
    answer = await raw(
        client, b"PUT http://router/v1/echo?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"query": "a=1"' in answer
    assert (await raw(client, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 404")
    body = json.dumps(request(COMPLETIONS, stream=False)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Session-Id: caf\xe9\r\nContent-Length: %d\r\n\r\n"
    assert (await raw(client, head % len(body) + body)).startswith(b"HTTP/1.1 200")
    assert all(e.failures == 0 for e in (await client.status()).engines)


@pytest.mark.parametrize("more", [{"n": 2.0}, {"n": "2"}, {"n": True}, {"stream": 1}, {"stream": "true"}])
async def test_values_that_engines_would_read_otherwise_are_refused(
    stage: Stage, more: dict[str, object]
) -> None:
    """An engine takes 2.0 for 2 and 1 for true: the router would misunderstand its answer."""
    client = await stage.router([await stage.engine()])
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, **more))
    assert answer.status == 400
    assert f"`{next(iter(more))}`" in answer.body["error"]["message"]


async def test_a_stream_is_no_answer_in_one_piece(stage: Stage) -> None:
    """An engine that streams what was not to be streamed: its events are not passed on as an answer."""
    engines = [await stage.engine(always_streams=True), await stage.engine(always_streams=True)]
    client = await stage.router(engines)
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, n=2, stream=False))
    assert answer.status == 502


async def test_a_model_may_be_on_an_engine_that_was_not_reached_yet(stage: Stage) -> None:
    """503 (try again), not 404 (never), until every engine said what it serves."""
    away = await stage.engine()
    await away.stop()
    away.healthy = False
    client = await stage.router([await stage.engine(), away])
    assert (await client.ask(COMPLETIONS, request(COMPLETIONS, model="y"))).status == 503
    await away.start(away.port)
    away.healthy = True
    await eventually(lambda: client.context.registry["b"].models, "it is reached")
    assert (await client.ask(COMPLETIONS, request(COMPLETIONS, model="y"))).status == 404


async def test_a_hung_engine_is_left_while_it_answers_other_questions(stage: Stage) -> None:
    """Its API server tokenizes for others: that is no progress of an answer."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    stage.faults.append(Fault("silent", 7))
    body = request(COMPLETIONS)
    asking = asyncio.create_task(client.ask(COMPLETIONS, body))
    while not asking.done():
        for name in "ab":
            question = {"model": "fake", "prompt": "x"}
            await client.ask("/tokenize", question, x_session_id=session_of(name))
    answer = await asking
    assert_uninterrupted(answer, COMPLETIONS, body)
    (move,) = (await client.story(answer.seq)).moves
    assert (move.detect_ms or 0) < 2_000, "stall_ms is 300"


async def test_a_key_for_probes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that want a key come up with `api_key_env`, and without it say what is missing."""
    engine = await stage.engine()
    engine.api_key = "secret"
    monkeypatch.setenv("ENGINE_KEY", "secret")
    client = await stage.router([engine], engine={"api_key_env": "ENGINE_KEY"})
    body = request(COMPLETIONS)
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)
    engine.api_key = "another"
    await eventually(lambda: client.context.registry["a"].health.state == "down", "it is refused")
    (status,) = (await client.status()).engines
    assert status.detail.startswith("configuration: /v1/models answers 401")
    assert "api_key_env" in status.detail


async def test_an_engine_that_dies_during_the_grace_time_loses_no_answer(stage: Stage) -> None:
    """A router that is told to stop still moves the answers that it lets finish."""
    engines = [await stage.engine(token_s=0.01), await stage.engine(token_s=0.01)]
    client = await stage.router(engines, timeouts={"shutdown_grace_ms": 8_000})
    stage.faults.append(Fault("die", 12))
    body = request(COMPLETIONS)
    asking = asyncio.create_task(client.ask(COMPLETIONS, body))
    await eventually(lambda: any(s.sent_tokens > 3 for e in engines for s in e.seen), "it has begun")
    client.context.stopping = True
    assert (await client.ask(COMPLETIONS, body)).status == 503, "nothing new is accepted"
    assert_uninterrupted(await asking, COMPLETIONS, body)


async def test_an_answer_beyond_the_transcript_limit_runs_on_unprotected(stage: Stage) -> None:
    """Memory is bounded; the answer is not cut, it only cannot move any more."""
    client = await stage.router(
        [await stage.engine(), await stage.engine()], limits={"max_transcript_tokens": 20}
    )
    body = request(COMPLETIONS)
    assert_uninterrupted(await client.ask(COMPLETIONS, body), COMPLETIONS, body)
    stage.faults.append(Fault("die", 20))
    answer = await client.ask(COMPLETIONS, body)
    assert answer.error is not None
    assert answer.error["code"] == "cannot_resume_transcript_limit"


async def test_an_event_beyond_the_limit_is_a_failure(stage: Stage) -> None:
    """A stream without end of event does not fill the memory."""
    client = await stage.router([await stage.engine()], limits={"max_event_bytes": 1024})
    answer = await client.ask(COMPLETIONS, request(COMPLETIONS, prompt="y" * 400))
    assert answer.status == 502


async def test_a_slow_client_is_waited_for(stage: Stage) -> None:
    """Back pressure reaches the engine, and is not taken for a stall."""
    engines = [await stage.engine(), await stage.engine()]
    client = await stage.router(engines, timeouts={"stall_ms": 50})
    body = request(COMPLETIONS, max_tokens=200)
    async with client.session.post(client.url + COMPLETIONS, json=body) as response:
        await asyncio.sleep(0.3)  # the slow client
        raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert (await client.story(response.headers["x-segue-seq"])).moves == ()


@pytest.mark.parametrize("streaming", [True, False])
async def test_shutdown_lets_answers_finish_or_says_so(stage: Stage, streaming: bool, tmp_path: Path) -> None:
    """SIGTERM: no new requests; what fits into the grace time finishes, the rest ends in an error; exit 0."""
    engine = await stage.engine(token_s=0.01)
    config = tmp_path / "router.yaml"
    tree = {
        "listen": {"port": 0},
        "engines": [{"name": "a", "url": engine.url}],
        "timeouts": FAST | {"shutdown_grace_ms": 2_000 if streaming else 100, "stall_ms": 60_000},
    }
    config.write_text(yaml.safe_dump(tree))
    process, url = await start_process(config)
    try:
        if not streaming:
            stage.faults.append(Fault("silent", 5))
        async with asyncio.timeout(DEADLINE_S):
            async with aiohttp.ClientSession() as session:
                await until_ready(session, url)
                response = await session.post(url + COMPLETIONS, json=request(COMPLETIONS))
                await response.content.readany()
                process.send_signal(signal.SIGTERM)
                raw = await response.read()
            assert (b"[DONE]" in raw) is streaming
            assert (b"router_stopping" in raw) is not streaming
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engines: []", "engines"),
        ("engines: [{name: a, url: 'ftp://x'}]", "url"),
        ("engines: [{name: a, url: 'http://[::1'}]", "engines[].url"),
        ("engines: [{name: a, url: 'http://x:99999999'}]", "engines[].url"),
        ("engines: [{name: a, url: 'http://x'}, {name: a, url: 'http://y'}]", "twice"),
        ("engines: [{name: a, url: 'http://x'}]\nbogus: 1", "unknown key `bogus`"),
        ("engines: [{name: a, url: 'http://x', dæmon: 1}]", "unknown key"),
        ("listen: {port: 99999}\nengines: [{name: a, url: 'http://x'}]", "listen.port"),
        ("{", "not valid YAML"),
    ],
)
async def test_configuration_mistakes_are_one_line_and_exit_2(tmp_path: Path, text: str, says: str) -> None:
    """No traceback; the key is named."""
    config = tmp_path / "router.yaml"
    config.write_text(text)
    process = await run_process(config)
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert says in stderr.decode()
    assert stderr.count(b"\n") == 1
    assert stderr.startswith(b"segue-router: ")


async def test_check_and_environment(tmp_path: Path) -> None:
    """--check says that it is valid; a variable overrides a key."""
    config = tmp_path / "router.yaml"
    config.write_text("engines: [{name: a, url: 'http://x'}]")
    process = await run_process(config, "--check")
    async with asyncio.timeout(DEADLINE_S):
        stdout, _ = await process.communicate()
    assert (process.returncode, b"valid" in stdout) == (0, True)
    process = await run_process(config, "--check", SEGUE_ROUTER__LISTEN__PORT="x")
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"listen.port" in stderr


async def test_listening_beyond_this_host_is_warned_about(tmp_path: Path) -> None:
    """Without a token that takes `security.insecure`, and is in the log."""
    config = tmp_path / "router.yaml"
    listen = "listen: {host: 0.0.0.0, port: 0}\nengines: [{name: a, url: 'http://127.0.0.1:1'}]"
    config.write_text(f"{listen}\nsecurity: {{insecure: true}}")
    process, _ = await start_process(config)
    process.terminate()
    async with asyncio.timeout(DEADLINE_S):
        stdout, stderr = await process.communicate()
    assert b"open to other hosts without protection" in stdout + stderr
    assert process.returncode == 0


async def test_a_port_in_use_is_said_clearly(tmp_path: Path) -> None:
    """Exit 1 with the address, no traceback."""
    config = tmp_path / "router.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(f"listen: {{port: {port}}}\nengines: [{{name: a, url: 'http://127.0.0.1:1'}}]")
        process = await run_process(config)
        async with asyncio.timeout(DEADLINE_S):
            _, stderr = await process.communicate()
    assert process.returncode == 1
    assert f"127.0.0.1:{port} is already in use" in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_sessions_stay_together_and_leave_a_dead_engine(stage: Stage) -> None:
    """The same header goes to the same engine while it is there."""
    engines = [await stage.engine(), await stage.engine(), await stage.engine()]
    client = await stage.router(engines)
    body = request(COMPLETIONS, max_tokens=2)
    homes = set()
    for name in "abc":
        for engine in engines:
            engine.seen.clear()
        for _ in range(3):
            await client.ask(COMPLETIONS, body, x_session_id=session_of(name, "abc"))
        (home,) = [engine for engine in engines if engine.seen]
        homes.add(home.port)
        assert len(home.seen) == 3
    assert len(homes) == 3, "other sessions have other homes"
    await home.stop()
    answer = await client.ask(COMPLETIONS, body, x_session_id=session_of("c", "abc"))
    assert_uninterrupted(answer, COMPLETIONS, body)

"""The router as a service: its endpoints, users' mistakes, pass-through, start and stop of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml

from system.router.fake_engine import Fault
from system.router.harness import DEADLINE_S, FAST, Stage, eventually
from system.router.test_router_failover import CHAT, COMPLETIONS, assert_uninterrupted, request


async def test_mistakes_are_explained_in_the_form_clients_know(stage: Stage) -> None:
    """Garbage is 400, an unknown model 404 with the models there are, too much is 413."""
    client = await stage.router([await stage.engine()], limits={"max_body_bytes": 2048})
    for body in (b"{nonsense", b"[1]", b"\xff\xfe", b'{"model": 5}'):
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
    assert (await first).done


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
        await asyncio.sleep(0.3)
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


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Ask until the router is ready; the caller sets the deadline."""
    while (await session.get(url + "/readyz")).status != 200:  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.02)


async def start_process(config: Path) -> tuple[asyncio.subprocess.Process, str]:
    """`segue-router` as a process; returns it and its URL once it listens."""
    process = await run_process(config)
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        line = (await process.stdout.readline()).decode()
    assert "listening on http://" in line
    return process, line.split()[-1]


async def run_process(config: Path, *more: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "segue_router.cli",
        "--config",
        str(config),
        *more,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engines: []", "engines"),
        ("engines: [{name: a, url: 'ftp://x'}]", "url"),
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
    for _ in range(5):
        await client.ask(COMPLETIONS, body, x_session_id="mine")
    (home,) = [engine for engine in engines if engine.seen]
    assert len(home.seen) == 5
    await home.stop()
    answer = await client.ask(COMPLETIONS, body, x_session_id="mine")
    assert_uninterrupted(answer, COMPLETIONS, body)

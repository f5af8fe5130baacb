"""One engine and nobody else: the client waits for its restart, and goes on with what its own daemon kept."""

from __future__ import annotations

import asyncio
import json

import pytest

from segue_router import client as client_side
from system.router.asked import COMPLETIONS, request
from system.router.harness import Stage, eventually


async def test_a_restarted_engine_goes_on_with_what_its_daemon_kept(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is promoted before the engine is back in its new life, what is held is asked then, and the
    client's connection is not silent meanwhile."""
    monkeypatch.setattr(client_side, "WAITING_S", 0.02)
    engine, daemon = await stage.engine(token_s=0.005), await stage.daemon()
    client = await stage.router([engine], [daemon], timeouts={"failover_ms": 8_000})
    body = request(COMPLETIONS)
    async with client.session.post(client.url + COMPLETIONS, json=body) as response:
        await eventually(lambda: engine.seen and engine.seen[0].sent_tokens >= 3, "the answer has begun")
        port = engine.port
        daemon.say(state="dead")
        await engine.kill()
        raw = b""
        async with asyncio.timeout(10):
            while client_side.WAITING not in raw:
                raw += await response.content.readany()
        assert not daemon.promoted, "there is nobody to go on yet"
        daemon.watermark = 1_000  # kept from the dead engine's memory meanwhile
        daemon.say(state="running", incarnation=2)
        await engine.start(port)
        async with asyncio.timeout(10):
            raw += await response.content.read()
    ((_, promoted),) = daemon.promoted
    (move,) = (await client.story(response.headers["x-segue-seq"])).moves
    assert (promoted.epoch, move.watermark) == (2, promoted.want_tokens)
    whole = await client.ask(COMPLETIONS, body)
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole.text and raw.endswith(b"data: [DONE]\n\n")

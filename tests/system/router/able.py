"""Engines with daemons that say what they can continue exactly, and what they are asked."""

from __future__ import annotations

from typing import Any

from segue_core.messages.status import Exact
from system.router.exact_engine import ExactEngine
from system.router.fake_daemon import FakeDaemon
from system.router.harness import Stage

PATHS = ["/v1/completions", "/v1/chat/completions"]

ALL: tuple[Exact, ...] = ("output", "seed", "grammar")

ELSEWHERE = {"retry_same_engine_once": False}


def question(path: str, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "fake", "stream": True, "max_tokens": 20, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return body | more


async def able(
    stage: Stage, abilities: list[tuple[Exact, ...]]
) -> tuple[list[ExactEngine], list[FakeDaemon]]:
    """Engines with daemons that say what they can continue."""
    engines, daemons = [], []
    for exact in abilities:
        engine = ExactEngine(stage.faults)
        await engine.start()
        stage.stack.push_async_callback(engine.stop)
        daemon = await stage.daemon()
        daemon.say(exact=exact)
        engines.append(engine)
        daemons.append(daemon)
    return engines, daemons

"""The router between hostile clients, engines and daemons: bytes that are no HTTP, JSON that is no answer.

Real: the whole router on its port. Whatever comes from either side, every client gets an answer or an end,
none of them is the router's own failure, and nothing runs on afterwards.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from fuzz.hostile_servers import HostileDaemon, RawServer, answered
from fuzz.mutate import Mutator
from fuzz.on_transcript import TranscriptTarget
from fuzz.raw_http import exchange, request, status_of
from fuzz.target import Target, demand
from segue_router.app import running_router
from segue_router.request import parse_request
from segue_router.settings import RouterSettings
from support.waiting import eventually

TOGETHER = 12
ENGINES = 2
IDLE_S = 30.0
TIMEOUTS = {
    "connect_ms": 500,
    "stall_ms": 200,
    "lone_stall_ms": 200,
    "first_token_ms": 1_000,
    "health_interval_ms": 200,
    "health_ms": 300,
    "promote_wait_ms": 1,
    "probe_ms": 100,
    "failover_ms": 30,
    "shutdown_grace_ms": 100,
    "body_ms": 100,
}
OWN_FAILURE = b"Server got itself in trouble"
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
)
OWN_PATHS = (
    "/livez",
    "/readyz",
    "/status",
    "/metrics",
    "/v1/models",
    "/v1/segue/requests/x",
    "/drain?wait=false",
    "/undrain",
)


class RouterTarget(Target):
    """See the module."""

    name = "router"
    world_frames = 3_000

    def __init__(self, mutate: Mutator) -> None:
        super().__init__(mutate)
        self.stack = AsyncExitStack()
        self.streams = TranscriptTarget(mutate)
        self.answers: dict[int, int] = {}

    async def start(self) -> None:
        engines = []
        for number in range(ENGINES):
            engine, daemon = RawServer(self._engine), HostileDaemon(self.mutate)
            for server in (engine, daemon.server):
                await server.start()
                self.stack.push_async_callback(server.stop)
            entry = {"name": f"e{number}", "url": f"http://127.0.0.1:{engine.port}"}
            engines.append(entry | {"daemon": f"http://127.0.0.1:{daemon.server.port}"})
        limits = {"max_event_bytes": 1 << 16, "max_body_bytes": 1 << 20}
        tree = {"listen": {"port": 0}, "engines": engines, "timeouts": TIMEOUTS, "limits": limits}
        router = running_router(msgspec.convert(tree, RouterSettings))
        self.context, self.port = await self.stack.enter_async_context(router)

    async def feed(self) -> int:
        answers = await asyncio.gather(*(exchange(self.port, self._client()) for _ in range(TOGETHER)))
        for answer in answers:
            demand(OWN_FAILURE not in answer, f"the router failed: {answer[:300]!r}")
            status = status_of(answer)
            self.answers[status] = self.answers.get(status, 0) + 1
        await eventually(lambda: not self.context.running, "all is answered", timeout_s=IDLE_S)
        for engine in self.context.registry.engines:
            demand(not engine.attempts, "an attempt without a request")
        return TOGETHER

    # -- clients --------------------------------------------------------------------------------

    def _client(self) -> bytes:
        if self.mutate.chance(0.1):
            path = self.rng.choice(OWN_PATHS)
            method = "POST" if "drain" in path else "GET"
            body = {"engine": self.rng.choice(("e0", "e9"))} if path == "/undrain" else {}
            return request(self.mutate, path, self.mutate.json(body), method)
        path = self.rng.choice(PATHS[:2] if self.mutate.chance(0.8) else PATHS)
        return request(self.mutate, path, self.mutate.json(self._body(path)))

    def _body(self, path: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "stream": self.mutate.chance(0.7), "max_tokens": 5}
        extras: dict[str, Any] = {
            "stream_options": {"include_usage": True},
            "n": 2,
            "seed": 1,
            "temperature": 0.5,
            "logprobs": True,
            "return_token_ids": True,
            "user": "u",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "kv_transfer_params": {"segue": {"seq": "x", "epoch": 9}},
            "echo": True,
        }
        for name in self.rng.sample(list(extras), self.rng.randrange(3)):
            body[name] = extras[name]
        return body | (
            {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        )

    # -- engines --------------------------------------------------------------------------------

    def _engine(self, path: str, body: bytes) -> bytes:
        rng, mutate = self.rng, self.mutate
        if path == "/health":
            return answered(b"", status="200 OK" if mutate.chance(0.95) else "503 No")
        if path == "/v1/models":
            card = {"id": "m", "object": "model", "max_model_len": 512, "root": "m"}
            body = msgspec.json.encode({"object": "list", "data": [card]})
            return answered(body if mutate.chance(0.9) else mutate.json({"object": "list", "data": [card]}))
        if path == "/detokenize":
            return answered(mutate.json({"prompt": " w"}))
        status = (
            "200 OK"
            if mutate.chance(0.9)
            else rng.choice(("400 B", "429 T", "500 E", "503 U", "301 M", "99 X", "204 N"))
        )
        try:
            asked = parse_request(path if path in PATHS[:2] else PATHS[0], body)
        except Exception:
            return answered(mutate.json({"error": {"message": "no", "code": 400}}), status="400 Bad")
        if not msgspec.json.decode(body).get("stream"):
            whole = {
                "id": "x",
                "choices": [{"index": 0, "text": "a", "finish_reason": rng.choice(("stop", "abort"))}],
            }
            return answered(mutate.json(whole), status=status)
        events = [self.streams._event(asked, number) for number in range(rng.randrange(1, 8))]
        events += [b"[DONE]"] * mutate.chance(0.7)
        stream = b"".join(b"data: " + event + b"\n\n" for event in events)
        kind = (
            "text/event-stream" if mutate.chance(0.95) else rng.choice(("text/html", "", "a/b; charset=\xe9"))
        )
        answer = answered(stream, kind, status, sized=mutate.chance(0.5))
        return mutate.octets(answer) if mutate.chance(0.1) else answer

    def sizes(self) -> dict[str, tuple[int, int]]:
        context = self.context
        limit = context.settings.limits.max_stories
        return {"running": (len(context.running), TOGETHER), "stories": (len(context.stories._ended), limit)}

    def effects(self) -> dict[str, int]:
        return {f"answers {status}": self.answers.get(status, 0) for status in (200, 400, 404, 502)}

    async def stop(self) -> None:
        await self.stack.aclose()

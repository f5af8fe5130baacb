"""A router in this process, on a real socket, before fake engines and daemons on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import aiohttp
import msgspec

from segue_core.messages.status import RequestStory, RouterStatus
from segue_router.app import running_router
from segue_router.choose import Candidate, rank_new
from segue_router.context import Context
from segue_router.settings import RouterSettings
from support.waiting import eventually
from system.router.fake_daemon import FakeDaemon
from system.router.fake_engine import FakeEngine, Fault

DEADLINE_S = 10.0
FAST = {
    "connect_ms": 500,
    "stall_ms": 300,
    "first_token_ms": 5_000,
    "health_interval_ms": 50,
    "health_ms": 300,
    "promote_wait_ms": 50,
    "probe_ms": 300,
    "failover_ms": 600,
    "shutdown_grace_ms": 200,
}


def session_of(name: str, names: str = "ab", number: int = 0) -> str:
    """A session whose home is engine `name` of `names`; another one for each `number`."""
    engines = [Candidate(each) for each in names]
    homes = (key for key in map(str, range(100)) if rank_new(engines, f"session:{key}")[0] == name)
    return next(islice(homes, number, None))


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)
    body: Any = None
    done: bool = False

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.choices)

    @property
    def ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids") or ()]

    @property
    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]

    @property
    def error(self) -> dict[str, Any] | None:
        for event in self.events:
            if "error" in event:
                found: dict[str, Any] = event["error"]
                return found
        return None

    @property
    def seq(self) -> str:
        return self.headers["x-segue-seq"]


async def read_answer(session: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> Answer:
    """Post and read the whole answer; the caller sets the deadline."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with session.post(url, data=data, headers=named) as response:
        answer = Answer(response.status, {k.lower(): v for k, v in response.headers.items()})
        raw = await response.read()
    if response.content_type != "text/event-stream":
        answer.body = json.loads(raw) if raw else None
        return answer
    for part in raw.split(b"\n\n"):
        if part == b"data: [DONE]":
            answer.done = True
        elif part:
            assert not answer.done, "an event after [DONE]"
            answer.events.append(json.loads(part.removeprefix(b"data: ")))
    return answer


class Client:
    """A client of the router."""

    def __init__(self, session: aiohttp.ClientSession, url: str, context: Context) -> None:
        self.session = session
        self.url = url
        self.context = context

    async def ask(self, path: str, body: Any, **headers: str) -> Answer:
        """Post and read the whole answer, within the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            return await read_answer(self.session, self.url + path, body, **headers)

    async def story(self, seq: str) -> RequestStory:
        """What the router tells of a request that ended."""
        async with self.session.get(f"{self.url}/v1/segue/requests/{seq}") as response:
            assert response.status == 200
            return msgspec.json.decode(await response.read(), type=RequestStory)

    async def status(self) -> RouterStatus:
        async with self.session.get(f"{self.url}/status") as response:
            return msgspec.json.decode(await response.read(), type=RouterStatus)

    async def up(self, name: str) -> None:
        """Wait until engine `name` is up."""
        health = self.context.registry[name].health
        await eventually(lambda: health.state == "up", f"{name} is up")

    async def metrics(self) -> str:
        async with self.session.get(f"{self.url}/metrics") as response:
            return await response.text()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, json.loads(await response.read())


@dataclass
class Stage:
    """Starts things and stops them all at the end. `faults`: one for each generation, wherever it goes."""

    stack: AsyncExitStack
    faults: deque[Fault] = field(default_factory=deque)

    async def engine(self, **options: Any) -> FakeEngine:
        engine = await FakeEngine(self.faults, **options).start()
        self.stack.push_async_callback(engine.stop)
        return engine

    async def daemon(self) -> FakeDaemon:
        daemon = await FakeDaemon().start()
        self.stack.push_async_callback(daemon.stop)
        return daemon

    async def router(
        self,
        engines: list[FakeEngine],
        daemons: list[FakeDaemon] | None = None,
        *,
        engine: dict[str, Any] | None = None,
        each: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Client:
        """A router before `engines`, whose health it has seen. `engine`: more keys for all of them, `each`:
        for one after the other."""
        names = "abcdefgh"
        entries: list[dict[str, Any]] = []
        for index, fake in enumerate(engines):
            entry: dict[str, Any] = {"name": names[index], "url": fake.url} | (engine or {})
            if each:
                entry |= each[index]
            if daemons:
                entry["daemon"] = daemons[index].url
            entries.append(entry)
        tree = {
            "listen": {"port": 0},
            "engines": entries,
            "timeouts": FAST | settings.pop("timeouts", {}),
            "affinity": {"prefix_chars": 0},
            **settings,
        }
        config = msgspec.convert(tree, RouterSettings)
        context, port = await self.stack.enter_async_context(running_router(config))
        session = await self.stack.enter_async_context(aiohttp.ClientSession())
        for known in context.registry.engines:
            if known.settings.url in [e.url for e in engines if e.healthy and e.port]:
                await eventually(lambda e=known: e.health.state == "up", f"{known.name} is up")
        if daemons:
            for daemon in daemons:
                await eventually(daemon.watched.is_set, "the daemon is watched")
        return Client(session, f"http://127.0.0.1:{port}", context)

"""Two real engines behind cut proxies, a daemon beside each, and two routers.

The router `exact` knows the daemons and so what the engines' shims can continue; the router `by_ids` is told
of no daemon: to it they are engines like any other. References are asked of an engine itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer

from segue_core.messages.status import DaemonStatus, Move, RequestStory
from segue_ctl import cluster_checks as checks
from segue_ctl.cluster import Cluster
from segue_ctl.openai_stream import SseParser
from segue_ctl.vllm_server import EngineSpec, one_core_each
from segue_ctl.waiting import get_json, wait_for
from support.cut_proxy import Breaker, CutProxy
from support.seam.cases import PATHS, Api, Body, Column, Row, Uncut
from support.seam.joined import Broken, Joined, join

DTYPE = "float32"
ENGINE_ARGS = (
    *("--dtype", DTYPE),
    *("--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    *("--reasoning-parser", "deepseek_v3"),  # parses reasoning where a request asks for thinking, else not
    *("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})),
    *("--scheduling-policy", "priority"),
)
NO_COMPILER = ("TORCHDYNAMO_DISABLE", "1")
"""vLLM compiles a line of its log probabilities at their first use, for up to half a minute."""
STALL_MS = 2_000
"""No less: on a busy machine an engine's process stands still for a second now and then."""
ROUTER_SETTINGS = {
    "timeouts": {"stall_ms": STALL_MS, "health_interval_ms": 200, "failover_ms": 10_000},
    # The proxy keeps a dead engine's other endpoints alive: it would be asked again in vain.
    "failover": {"retry_same_engine_once": False, "max_moves": 3},
}
ROUTERS: dict[Column, str] = {"exact": "router", "by_ids": "router-without-daemons"}
ANSWER_WITHIN_S = 30.0


@dataclass
class Got:
    """An answer as the client got it. Of a stream: its events' payloads; else the body."""

    status: int
    seq: str = ""
    payloads: list[bytes] = field(default_factory=list)
    body: Any = None
    cut_off: bool = False

    def joined(self) -> Joined:
        """Raises Broken."""
        return join(self.payloads)


@dataclass(frozen=True)
class Reference:
    """The same request straight at an engine. `tokens`: of its output, over all choices."""

    got: Got
    tokens: int
    made: Body


class Stage:
    """What tests ask."""

    def __init__(self, cluster: Cluster, breaker: Breaker) -> None:
        self.cluster = cluster
        self.breaker = breaker
        self._references: dict[str, Reference] = {}
        self._tokenizer = Tokenizer.from_file(str(cluster.model_dir / "tokenizer.json"))
        self._asked = 0

    def url(self, column: Column) -> str:
        """A router's address."""
        return self.cluster.router_url(ROUTERS[column])

    async def can_continue(self) -> set[str]:
        """What both engines say that they can continue exactly."""
        statuses = [await self._daemon(name) for name in self.cluster.specs]
        return set.intersection(*(set(status.engine.exact) for status in statuses))

    async def _daemon(self, name: str) -> DaemonStatus:
        status = await checks.daemon_status(self.cluster.session, self.cluster.daemon_url(name))
        assert isinstance(status, DaemonStatus), status
        return status

    async def ready(self, column: Column) -> None:
        """Wait until a router has both engines up."""
        names = list(self.cluster.specs)
        await wait_for(
            "both engines are up",
            lambda: checks.router_ready(self.cluster.session, self.url(column), names),
            timeout_s=ANSWER_WITHIN_S,
        )

    async def ask(self, url: str, path: str, body: Body, headers: Mapping[str, str] | None = None) -> Got:
        """Ask once. Sessions differ from request to request, so that either engine may be the first."""
        self._asked += 1
        sent = {"x-session-id": f"session-{self._asked}", **(headers or {})}
        timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
        async with self.cluster.session.post(url + path, json=body, headers=sent, timeout=timeout) as answer:
            got = Got(answer.status, answer.headers.get("x-segue-seq", ""))
            if answer.content_type != "text/event-stream":
                got.body = await answer.json()
                return got
            parser = SseParser()
            try:
                async for chunk in answer.content.iter_any():
                    got.payloads += parser.feed(chunk)
            except aiohttp.ClientError:
                got.cut_off = True
        return got

    async def reference(self, row: Row, api: Api, *, stream: bool) -> Reference:
        """The uninterrupted answer, asked of an engine itself once."""
        made = await self._made(row, api) if row.made else {}
        body = row.request(api, stream, self.cluster.model, made)
        key = f"{api} {json.dumps(body, sort_keys=True)}"
        if key not in self._references:
            got = await self.ask(self.cluster.engine_url("a"), PATHS[api], body)
            assert got.status == 200, got.body
            counted = got.body["usage"]["completion_tokens"] if not stream else _tokens(got.joined())
            self._references[key] = Reference(got, counted, made)
        return self._references[key]

    async def _made(self, row: Row, api: Api) -> Body:
        assert row.made is not None
        body = {**row.request(api, False, self.cluster.model, {}), "return_token_ids": True}
        got = await self.ask(self.cluster.engine_url("a"), PATHS[api], body)
        (choice,) = got.body["choices"]
        ids = choice["token_ids"]
        text = choice["text"] if api == "completions" else choice["message"]["content"]
        return row.made(Uncut(text, ids, lambda at: self._word(ids[at : at + 2])))

    def _word(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        same = self._tokenizer.encode(text, add_special_tokens=False).ids == ids
        return text if same else ""

    async def moves(self, column: Column, seq: str) -> tuple[Move, ...]:
        """The moves of a request, by the router's story of it."""
        return (await self.story(column, seq)).moves

    async def story(self, column: Column, seq: str) -> RequestStory:
        """How a request went."""
        code, body = await get_json(self.cluster.session, f"{self.url(column)}/v1/segue/requests/{seq}")
        assert code == 200, (code, body)
        return msgspec.convert(body, RequestStory)


def _tokens(joined: Joined) -> int:
    """Output tokens of a stream: by its usage, else by its events (one token each, as good as)."""
    if joined.usage:
        return int(joined.usage[-1]["completion_tokens"])
    return sum(len(choice.get("token_ids") or "x" * 24) for choice in joined.choices.values())


@asynccontextmanager
async def seam_stage(model_dir: Path) -> AsyncIterator[Stage]:
    """Start everything; stop it in the end."""
    breaker = Breaker()
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(*NO_COMPILER)
        proxies = [await stack.enter_async_context(CutProxy(name, breaker)) for name in "ab"]
        names = ("--served-model-name", model_dir.name, "other")
        cluster = Cluster(
            [
                EngineSpec(name, cpus, extra_args=(*ENGINE_ARGS, *names))
                for name, cpus in zip("ab", one_core_each(2), strict=True)
            ],
            model_dir=model_dir,
            routed_urls={proxy.name: proxy.url for proxy in proxies},
            router_overrides=ROUTER_SETTINGS,
            daemon_overrides={"timeouts": {"stall_ms": STALL_MS // 2}, "store": {"budget_bytes": 64 << 20}},
        )
        for proxy in proxies:
            proxy.target = cluster.engine_url(proxy.name)
        await stack.enter_async_context(cluster)
        await cluster.start_router(ROUTERS["by_ids"], replicated=False)
        yield Stage(cluster, breaker)


__all__ = ["Broken", "Got", "Reference", "Stage", "seam_stage"]

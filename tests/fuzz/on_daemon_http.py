"""The daemon's HTTP endpoint: bytes that are no requests, bodies that are no JSON, numbers that cannot be."""

from __future__ import annotations

from aiohttp import web

from fuzz.daemon_world import DaemonWorld
from fuzz.raw_http import exchange, request, status_of
from fuzz.target import Target, demand
from segue_core.security import Tokens
from segue_core.service import start_http
from segue_daemon.api import build_api

SEQS = (
    "s0",
    "s1",
    "%FF",
    "%ED%A0%80",
    "a" * 128,
    "a" * 129,
    "..%2f..",
    "%00",
    "\xff\xfe",
    "%F0%9F%98%80",
    "a b",
    "",
)


class DaemonHttpTarget(Target):
    """See the module."""

    name = "daemon-http"
    world_frames = 4_000

    async def start(self) -> None:
        self.world = DaemonWorld()
        await self.world.start()
        api = build_api(self.world.daemon, Tokens(()))
        self.runner: web.AppRunner
        self.runner, self.port = await start_http(api, "127.0.0.1", 0, what="http")
        self.answers = dict.fromkeys((200, 400, 404, 409), 0)

    async def feed(self) -> int:
        seq = self.rng.choice(SEQS)
        promote = {"epoch": self.rng.randrange(1, 9), "want_tokens": 3, "wait_ms": self.rng.choice((0, 0, 1))}
        paths = {
            f"/v1/sequences/{seq}/promote": promote,
            f"/v1/sequences/{seq}/fence": {"epoch": 3},
            f"/v1/sequences/{seq}": {},
            self.rng.choice(
                ("/status", "/metrics", "/livez", "/readyz", "/v1/watch", "/nothing", "*", "//", "/%")
            ): {},
        }
        path = self.rng.choice(list(paths))
        method = "POST" if paths[path] else "GET"
        raw = request(self.mutate, path, self.mutate.json(paths[path]), method)
        answer = await exchange(self.port, raw, at_most=1 if "watch" in path else 1 << 16)
        status = status_of(answer)
        demand(
            status < 500 or (status == 503 and b"readyz" in raw),
            f"{raw[:300]!r} is answered {answer[:300]!r}",
        )
        if status in self.answers:
            self.answers[status] += 1
        return 1

    def sizes(self) -> dict[str, tuple[int, int]]:
        return {"waiters": (len(self.world.daemon._watermark_waiters), 100)}

    def effects(self) -> dict[str, int]:
        return {f"answers {status}": count for status, count in self.answers.items()}

    async def stop(self) -> None:
        await self.runner.cleanup()
        await self.world.stop()

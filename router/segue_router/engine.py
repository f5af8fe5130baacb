"""One engine as the router knows it: who it is, what it serves, and what runs on it.

Owns what its model cards, its daemon and its configuration say about it; policy is in `health`.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import aiohttp
import msgspec

from segue_core.messages.status import Exact, RouterEngine
from segue_router.daemons import DaemonClient, HttpDaemon
from segue_router.engine_client import Cards, EngineClient
from segue_router.group_client import GroupClient
from segue_router.health import EngineHealth
from segue_router.settings import EngineSettings
from segue_router.upstream import Attempt


@dataclass(frozen=True, slots=True)
class Served:
    """A model as an engine serves it: the id of its card, and what stands behind it (vLLM's `root`)."""

    model: str
    root: str | None = None

    def same_as(self, other: Served) -> bool:
        """Whether an answer can go on there. An engine that names no root is believed."""
        return self.model == other.model and (None in (self.root, other.root) or self.root == other.root)


class Attempts(set[Attempt]):
    """What runs on one engine; `changed` is set (and replaced) whenever one comes or goes."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def add(self, attempt: Attempt) -> None:
        super().add(attempt)
        self._tell()

    def discard(self, attempt: object) -> None:
        super().discard(attempt)
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Engine:
    """One engine and its daemon. `draining`: it is being emptied, and gets nothing new."""

    def __init__(
        self,
        settings: EngineSettings,
        control: aiohttp.ClientSession,
        daemons: aiohttp.ClientSession | None = None,
    ) -> None:
        """`control` is for the engine, `daemons` for its daemon (None: the same)."""
        self.settings = settings
        self.name = settings.name
        self.url = settings.url.rstrip("/")
        self.health = EngineHealth()
        self.daemon = _daemon(daemons or control, settings.daemon_urls)
        key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        self.client = EngineClient(control, self.url, key)
        self.models: Cards = {}
        self.attempts = Attempts()
        self.expected: set[object] = set()
        self.draining = False
        self.progressed_ms = float("-inf")
        self.look = asyncio.Event()

    def serves(self, model: str) -> bool:
        """Whether it has `model`; every engine serves a request that names none."""
        return not model or model == self.settings.model or model in self.models

    def served(self, model: str) -> Served | None:
        """What answers to `model` there (empty: its first model); None: not known."""
        name = model or next(iter(self.models), "")
        card = self.models.get(name)
        if card is None:
            return None
        root = card.get("root")
        return Served(name, root if isinstance(root, str) else None)

    def model_names(self) -> list[str]:
        """The models it is known to serve."""
        return list(self.models) or [name for name in (self.settings.model,) if name]

    @property
    def may_serve_more(self) -> bool:
        """Whether its models are not known yet: it was not reached since the router started."""
        return not self.models and not self.settings.model

    def max_model_len(self, model: str) -> int | None:
        """The longest context of `model` there (vLLM's `max_model_len`), if it says so."""
        card = self.models.get(model or next(iter(self.models), ""))
        if card is None:
            return None
        length = card.get("max_model_len")
        if length is None and isinstance(card.get("parent"), str):  # an adapter has its base model's
            length = self.models.get(card["parent"], {}).get("max_model_len")
        return length if isinstance(length, int) else None

    @property
    def generation_defaults(self) -> dict[str, float]:
        """Sampling parameters that it sets where a request does not: configured, else told by its daemon."""
        status = self.health.last_status
        named = msgspec.structs.asdict(self.settings.generation_defaults)
        told = status.generation_defaults if status else {}
        return {**told, **{key: value for key, value in named.items() if value is not None}}

    @property
    def exact(self) -> frozenset[Exact]:
        """What it can continue token for token, by its shim's own test. (One that was started after the
        engine that its daemon knows has no shim.)"""
        status = self.health.last_status
        return frozenset(status.exact) if status and not self.health.outlived else frozenset()

    @property
    def exact_again(self) -> frozenset[Exact]:
        """What it can, or can again once its daemon, which was started anew, knows it."""
        return frozenset() if self.health.outlived else frozenset(self.health.abilities)

    @property
    def fingerprint(self) -> str:
        """What its KV bytes can be exchanged with; empty: unknown."""
        status = self.health.last_status
        return status.fingerprint if status else ""

    @property
    def load(self) -> int:
        """Requests on it and on their way to it: when an engine fails, all of its choose at the same time."""
        return len(self.attempts) + len(self.expected)

    def progressed(self, now: float) -> None:
        """One of its generations advanced."""
        self.progressed_ms = now
        self.health.token()

    def status(self) -> RouterEngine:
        """As `/status` shows it."""
        return RouterEngine(
            name=self.name,
            url=self.url,
            model=", ".join(self.model_names()),
            state=self.health.state,
            active=len(self.attempts),
            daemon=", ".join(self.settings.daemon_urls),
            daemon_state=self.health.daemon_state,
            failures=self.health.failures,
            detail=self.health.detail,
            draining=self.draining,
        )


def _daemon(control: aiohttp.ClientSession, urls: tuple[str, ...]) -> DaemonClient | None:
    """The daemon at `urls`, or the daemons of the ranks as one; None: there is none."""
    daemons = [HttpDaemon(control, url, rank, len(urls)) for rank, url in enumerate(urls)]
    return GroupClient(daemons) if len(daemons) > 1 else next(iter(daemons), None)

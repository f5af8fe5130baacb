"""The router's configuration: `segue-router --config FILE`, overridden by `SEGUE_ROUTER__KEY__SUBKEY`.

One YAML file; unknown keys and bad values are refused with the path of the key.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from segue_core.errors import ConfigError
from segue_core.logs import LogFormat, LogLevel
from segue_core.messages.status import MAX_RANKS
from segue_core.security import SecuritySettings
from segue_core.settings import Settings, check_unique

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/\s?#]+(/[^\s?#]*)?$", max_length=1024)]


class ListenSettings(Settings, frozen=True):
    """Where clients connect. Beyond loopback `/drain`, `/status` and the like need a token."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on; 0 picks a free one, which is printed."""


class GenerationDefaults(Settings, frozen=True):
    """Sampling parameters that an engine sets where a request does not (vLLM: its generation config)."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Caps every answer, whatever the request says."""
    presence_penalty: float | None = None
    """Not zero: only requests that set it themselves can be resumed."""
    frequency_penalty: float | None = None
    """The same."""


class EngineSettings(Settings, frozen=True):
    """One OpenAI-compatible engine, such as a vLLM server."""

    name: Name
    """What it is called in logs, metrics and `/status`."""
    url: Url
    """Its base URL, without `/v1`."""
    model: str = ""
    """The model it serves. Empty: learnt from its `/v1/models`."""
    daemon: Url | None = None
    """The HTTP address of the segue-daemon beside it. None: it can still be failed over to (replay)."""
    daemons: Annotated[tuple[Url, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    """Instead, for an engine of several ranks: those of the daemons of all ranks, in rank order."""
    api_key_env: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_0-9]*$", max_length=128)] = ""
    """Environment variable with the key that it wants of the router's probes (vLLM's `--api-key`)."""
    generation_defaults: GenerationDefaults = GenerationDefaults()
    """Its own sampling parameters; what is not set is learnt from its daemon, if it has one."""

    def __post_init__(self) -> None:
        _check_url(self.url, "engines[].url")
        if self.daemon is not None:
            _check_url(self.daemon, "engines[].daemon")
        for url in self.daemons:
            _check_url(url, "engines[].daemons")
        if self.daemon is not None and self.daemons:
            raise ConfigError(
                f"engine {self.name!r} has `daemon` and `daemons`",
                hint="`daemon` for an engine of one rank, `daemons` for one of several: one URL a rank",
            )

    @property
    def daemon_urls(self) -> tuple[str, ...]:
        """The daemons of its ranks, in rank order; empty: it has none."""
        return self.daemons or ((self.daemon,) if self.daemon is not None else ())


class TimeoutSettings(Settings, frozen=True):
    """How long things may take."""

    connect_ms: Milliseconds = 1_000
    """Opening a connection to an engine."""
    stall_ms: Milliseconds = 5_000
    """A stream silent this long is moved, if its engine makes no progress either."""
    lone_stall_ms: Milliseconds = 20_000
    """The same while its engine does progress, where no daemon can tell that it only waits in there."""
    first_token_ms: Milliseconds = 300_000
    """Longest silence that is taken for prefill or queueing when there is no sign of progress or death."""
    health_interval_ms: Milliseconds = 1_000
    """Between two looks at an engine's `/health`."""
    health_ms: Milliseconds = 2_000
    """An engine's answer to `/health` and `/v1/models`."""
    body_ms: Milliseconds = 60_000
    """A client's request body, from its headers to its last byte."""
    promote_wait_ms: Milliseconds = 300
    """How long a standby's daemon may wait for the last tokens of a replica."""
    probe_ms: Milliseconds = 150
    """A daemon's answer to what it holds of a sequence."""
    failover_ms: Milliseconds = 15_000
    """How long a client waits for another engine to become available."""
    shutdown_grace_ms: Milliseconds = 30_000
    """How long SIGTERM lets running answers finish."""


class FailoverSettings(Settings, frozen=True):
    """Whether and how often a request may move. A client opts out with `x-segue-failover: off`."""

    enabled: bool = True
    """False: a broken answer ends in one clear error."""
    max_moves: Annotated[int, msgspec.Meta(ge=0, le=100)] = 3
    """Moves of one request; a request that kills its engines must not kill them all."""
    seed_sampled: bool = True
    """Give sampled requests without a `seed` one of the router's own (engines see it, clients do not), so
    that another engine can go on with the same random draws. False: by ids, where that is right."""
    retry_same_engine_once: bool = True
    """After a bare reset, ask the same engine once more while its daemon says that its process lives."""


class DrainSettings(Settings, frozen=True):
    """How an engine is emptied (`POST /drain`). Which ones are is not kept beyond the router's own life."""

    at_once: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 8
    """Requests of one engine that are being moved at the same time."""
    move_ms: Milliseconds = 30_000
    """How long one of them may wait for its replica before it counts as staying."""
    retry_ms: Milliseconds = 2_000
    """After this, one that stayed is asked again: another engine may be there now."""
    wait_ms: Milliseconds = 600_000
    """How long a call waits for the engine to be empty, unless it names `timeout_ms`."""


class LimitSettings(Settings, frozen=True):
    """Bounds of memory and load. Reaching one is an error for that request, or ends its protection."""

    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 32)] = 64 << 20
    """Largest request body, and largest answer that is buffered whole."""
    max_event_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 30)] = 8 << 20
    """Largest event of an engine's stream."""
    max_active: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4_096
    """Requests served at once, counted from their headers on."""
    max_transcript_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1 << 20
    """Prompt and answer ids kept for one request; a longer one runs on but cannot be resumed."""
    max_stories: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_024
    """Finished requests whose story `/v1/segue/requests/{seq}` can tell."""
    max_conversations: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 16_384
    """Conversations of which the router remembers where they were last; half a kilobyte each."""


class AffinitySettings(Settings, frozen=True):
    """What keeps a conversation on one engine: the header, else `user`, else how its prompt begins."""

    header: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")] = (
        "x-session-id"
    )
    """Request header that names the session."""
    prefix_chars: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 1_024
    """Characters of the prompt that name the session otherwise; 0: least load only."""


class RouterSettings(Settings, frozen=True):
    """One router."""

    engines: Annotated[tuple[EngineSettings, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """The engines, at least one. Each is a standby for the others of its model."""
    listen: ListenSettings = ListenSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    failover: FailoverSettings = FailoverSettings()
    drain: DrainSettings = DrainSettings()
    limits: LimitSettings = LimitSettings()
    affinity: AffinitySettings = AffinitySettings()
    security: SecuritySettings = SecuritySettings()
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        check_unique([engine.name for engine in self.engines], "engines[].name")
        check_unique([engine.url.rstrip("/") for engine in self.engines], "engines[].url")
        daemons = [url.rstrip("/") for engine in self.engines for url in engine.daemon_urls]
        check_unique(daemons, "engines[].daemon")  # it would speak for an engine that it does not know
        if not self.listen.host:
            raise ConfigError("`listen.host`: expected an address, found an empty string")


def _check_url(url: str, key: str) -> None:
    """Raise ConfigError for a host or port that no connection can be opened to."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0  # reading the port checks it
    except ValueError as error:
        raise ConfigError(f"`{key}`: {url!r}: {str(error).lower()}") from error
    if not usable:
        raise ConfigError(f"`{key}`: {url!r}: expected a host, and a port above 0 if any")

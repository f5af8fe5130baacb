"""The daemon's configuration: `segue-daemon --config FILE`, overridden by `SEGUE_DAEMON__KEY__SUBKEY`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from segue_core.errors import ConfigError
from segue_core.logs import LogFormat, LogLevel
from segue_core.settings import Settings, check_unique

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]


class HttpSettings(Settings, frozen=True):
    """The status endpoint. Loopback until it is secured."""

    host: str = "127.0.0.1"
    port: Port = 7101


class ListenSettings(Settings, frozen=True):
    """Where peers connect: control (ZeroMQ) and bulk (TCP). Port 0 picks a free one for bulk."""

    host: str = "127.0.0.1"
    control_port: Port = 7201
    bulk_port: Port = 0


class PeerSettings(Settings, frozen=True):
    """A peer daemon that replicas are sent to; `control` is its host:port for control."""

    name: Name
    control: Annotated[str, msgspec.Meta(pattern=r"^[^:\s]+:\d{1,5}$")]


class StoreSettings(Settings, frozen=True):
    """Room for peers' replicas, allocated and touched at start-up."""

    budget_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 46)] = 1 << 30
    lease_ms: Milliseconds = 10_000
    """How long blocks stay put for an engine that is loading them."""


class ReplicationSettings(Settings, frozen=True):
    """What is sent to peers and when."""

    enabled: bool = True
    sync_every_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    delta_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 30)] = 8 << 20
    """Most payload of one delta; bounds how long anything waits behind it."""
    window_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 32)] = 64 << 20
    """Unacked bytes that a peer may have under way to this daemon."""
    shadow_bytes: Bytes = 256 << 20
    """Memory for copies of what peers have of tail blocks."""
    max_sequences: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 20_000


class TimeoutSettings(Settings, frozen=True):
    """Deadlines. `stall_ms`: an engine that has work and stands still that long is reported stalled."""

    stall_ms: Milliseconds = 2_000
    step_ms: Milliseconds = 120_000
    """An engine that burns CPU inside one step longer than this is stalled all the same."""
    salvage_ms: Milliseconds = 500
    """A dead engine's memory is let go after this, whatever was not shipped by then."""
    peer_ms: Milliseconds = 2_000
    reconnect_ms: Milliseconds = 200


class DaemonSettings(Settings, frozen=True):
    """One daemon, beside one engine."""

    name: Name
    socket: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    """Path of the unix socket for the engine; its folder must exist."""
    http: HttpSettings = HttpSettings()
    listen: ListenSettings = ListenSettings()
    peers: tuple[PeerSettings, ...] = ()
    store: StoreSettings = StoreSettings()
    replication: ReplicationSettings = ReplicationSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        check_unique([peer.name for peer in self.peers], "peers[].name")
        if self.name in [peer.name for peer in self.peers]:
            raise ConfigError(f"`peers`: {self.name!r} is this daemon's own name")

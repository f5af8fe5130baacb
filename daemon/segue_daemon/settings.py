"""The daemon's configuration: `segue-daemon --config FILE`, overridden by `SEGUE_DAEMON__KEY__SUBKEY`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from segue_core.errors import ConfigError
from segue_core.logs import LogFormat, LogLevel
from segue_core.messages.status import MAX_RANKS
from segue_core.security import SecuritySettings
from segue_core.settings import Settings, check_unique

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]


class HttpSettings(Settings, frozen=True):
    """The status endpoint. Beyond loopback it needs a token."""

    host: str = "127.0.0.1"
    port: Port = 7101
    tls: bool = False
    """HTTPS, with this daemon's certificate; the router then says `https://` and needs the CA."""


class ListenSettings(Settings, frozen=True):
    """Where peers connect: control (ZeroMQ) and bulk (TCP). Port 0 picks a free one for bulk. Beyond loopback
    they need keys."""

    host: str = "127.0.0.1"
    control_port: Port = 7201
    bulk_port: Port = 0


class PeerSettings(Settings, frozen=True):
    """A peer daemon that replicas are sent to; `control` is its host:port for control."""

    name: Name
    control: Annotated[str, msgspec.Meta(pattern=r"^[^:\s]+:\d{1,5}$")]
    max_bytes_per_s: Bytes = 0
    """Bandwidth to this peer; 0: no limit but the daemon's own."""


class LabelSettings(Settings, frozen=True):
    """Where this daemon runs, for its peers: replicas go to another host, and if possible to another zone."""

    host: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """What fails together with this daemon; empty: the machine's host name."""
    zone: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """What fails together beyond the host: a rack, a power feed, a zone; empty: none."""


class StoreSettings(Settings, frozen=True):
    """Room for peers' replicas, allocated and touched at start-up."""

    budget_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 46)] = 1 << 30
    gpu_budget_bytes: Bytes = 0
    """Memory of the engine's GPU for copies of replicas: it takes those over faster. 0: none. The engine must
    leave so much of the GPU free."""
    high_watermark: Fraction = 0.95
    """Past this fraction of the budget things are given up, down to `low_watermark`."""
    low_watermark: Fraction = 0.85
    """Up to this fraction new replicas are taken in; above it only those that are here grow."""
    session_ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 600_000
    """A replica to which nothing happened for so long goes before live ones do; 0: never."""
    min_host_free_bytes: Bytes = 0
    """Replicas give way when the host has less memory available; 0: they keep their budget."""
    verify: Literal["always", "load", "off"] = "load"
    """When sealed blocks are compared with their checksums, beside the scrubber."""
    scrub_bytes_per_s: Bytes = 16 << 20
    """How fast sealed blocks are looked through for changes in memory; 0: not at all."""
    lease_ms: Milliseconds = 10_000
    """How long blocks stay put for an engine that is loading them."""
    keep_own: bool = True
    """Whether what this host's engine left when it died is kept for the one that comes in its place."""
    keep_own_ms: Milliseconds = 60_000
    """How long it is kept."""

    def __post_init__(self) -> None:
        if self.low_watermark > self.high_watermark:
            raise ConfigError("`store.low_watermark` is above `store.high_watermark`")
        if self.gpu_budget_bytes and self.verify == "always":
            raise ConfigError(
                "`store.gpu_budget_bytes`: copies on a GPU cannot be compared with their checksums each time",
                hint="set `store.verify: load`, or leave `store.gpu_budget_bytes` out",
            )


class ReplicationSettings(Settings, frozen=True):
    """What is sent to peers and when."""

    enabled: bool = True
    sync_every_tokens: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 1
    """A decode tail is sent when so many tokens are unsent, and whenever a block is full. 0: only by time."""
    sync_every_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 0
    """And when its oldest unsent token is so old. 0: only by count."""
    max_bytes_per_s: Bytes = 0
    """Bandwidth to all peers together; 0: no limit."""
    replicas: Annotated[int, msgspec.Meta(ge=0, le=8)] = 1
    """Copies of each sequence, each at another peer."""
    replace_after_ms: Milliseconds = 2_000
    """A peer that is gone this long is given up: its sequences go to others."""
    delta_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 30)] = 8 << 20
    """Most payload of one delta; bounds how long anything waits behind it."""
    window_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 32)] = 64 << 20
    """Unacked bytes that a peer may have under way to this daemon."""
    shadow_bytes: Bytes = 256 << 20
    """Memory for copies of what peers have of tail blocks."""
    hold_bytes: Bytes = 32 << 20
    """Memory for copies that wait for the word of an engine that gives no notice, for each peer."""
    max_sequences: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 20_000

    def __post_init__(self) -> None:
        if not self.sync_every_tokens and not self.sync_every_ms:
            raise ConfigError("`replication`: sync_every_tokens and sync_every_ms cannot both be 0")


class GroupSettings(Settings, frozen=True):
    """Which rank of its engine this daemon is beside. An engine of one rank needs none of it."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)] = 0
    """The engine's own number of that rank."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """How many there are: tensor parallel size."""
    leader: Annotated[str, msgspec.Meta(pattern=r"^([^:\s]+:\d{1,5})?$")] = ""
    """host:port for control of the daemon beside rank 0, which places sequences for all; empty at rank 0."""

    def __post_init__(self) -> None:
        if self.rank >= self.ranks:
            raise ConfigError(f"`group.rank`: {self.rank} of {self.ranks} ranks; they count from 0")
        if self.rank and not self.leader:
            raise ConfigError("`group.leader`: expected the address of the daemon beside rank 0")
        if self.leader and not self.rank:
            raise ConfigError("`group.leader`: rank 0 is the leader; leave it out there")

    def refusal(self, rank: int, ranks: int) -> str:
        """Why an engine's rank `rank` of `ranks` does not belong beside this daemon; empty if it does."""
        if (rank, ranks) == (self.rank, self.ranks):
            return ""
        leader = ", leader: HOST:PORT" if rank else ""
        return (
            f"the engine registers rank {rank} of {ranks}, this daemon is for rank {self.rank} of"
            f" {self.ranks}: set `group: {{rank: {rank}, ranks: {ranks}{leader}}}` in its configuration"
        )


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
    """Path of the unix socket for the engine, in a folder that nobody else may enter."""
    http: HttpSettings = HttpSettings()
    listen: ListenSettings = ListenSettings()
    peers: tuple[PeerSettings, ...] = ()
    labels: LabelSettings = LabelSettings()
    store: StoreSettings = StoreSettings()
    replication: ReplicationSettings = ReplicationSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    group: GroupSettings = GroupSettings()
    security: SecuritySettings = SecuritySettings()
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        check_unique([peer.name for peer in self.peers], "peers[].name")
        if self.name in [peer.name for peer in self.peers]:
            raise ConfigError(f"`peers`: {self.name!r} is this daemon's own name")
        if self.http.tls and not self.security.dir:
            raise ConfigError("`http.tls`: needs a certificate", hint="set `security.dir`")

"""The local channel: an engine and the daemon beside it, over a unix socket.

The engine opens two connections: the worker registers its memory (one per rank), the scheduler asks
what the daemon holds. Both get the replica arena, which they may read only; the daemon maps the
engine's pages read only. Neither can damage the other. End of file is death.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from segue_core.geometry import Geometry
from segue_core.messages.status import MAX_RANKS, Exact

Notice = Literal["before", "after"]
"""When an engine tells of a step. before: no block is overwritten unannounced. after: between two steps it
says what holds then; a copy of its memory is good if it still says so after the copy was complete."""


MAX_DETAIL_CHARS = 4096
"""What an engine says of itself is repeated with each heartbeat to the router."""


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """Worker to daemon, with file descriptors: journal, doorbell, lifeline, the timeline if there is one,
    then those of the geometry's handles.

    `fingerprint` is 16 bytes: equal for engines whose KV bytes are interchangeable. `defaults` are sampling
    parameters that the engine sets where a request does not. `exact` and `exact_detail`: see EngineStatus.
    `rank` of `ranks`: which part of the engine this worker is; each part has a daemon of its own. `notice`:
    when it tells of a step. `timeline`: a step is complete when its number is there (`segue_core.timeline`),
    and not when its commit is written. `tier`: it can load from a `Tier`.
    """

    version: int
    engine: Annotated[str, msgspec.Meta(max_length=256)]
    incarnation: int
    model: Annotated[str, msgspec.Meta(max_length=4096)]
    fingerprint: bytes
    geometry: Geometry
    defaults: Annotated[dict[str, float], msgspec.Meta(max_length=64)] = {}
    exact: Annotated[tuple[Exact, ...], msgspec.Meta(max_length=64)] = ()
    exact_detail: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_CHARS)] = ""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)] = 0
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    notice: Notice = "before"
    timeline: bool = False
    tier: bool = False


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Scheduler to daemon: this connection asks `Match`."""

    version: int
    engine: str
    incarnation: int


class Registered(msgspec.Struct, frozen=True, array_like=True, tag="registered"):
    """Daemon to engine, with one descriptor: the replica arena of `arena_bytes` bytes."""

    incarnation: int
    arena_bytes: int


class Tier(msgspec.Struct, frozen=True, array_like=True, tag="tier"):
    """Daemon to worker, with one descriptor: `nbytes` of GPU memory, tier number `number`. Copies of replicas
    may lie there once the worker has answered. Without a descriptor and of 0 bytes: that tier is over."""

    number: int
    nbytes: int


class TierMapped(msgspec.Struct, frozen=True, array_like=True, tag="tier_mapped"):
    """Worker to daemon: tier `number` can be loaded from; or it cannot (any more), as `problem` says."""

    number: int
    problem: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_CHARS)] = ""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Daemon to engine: the registration cannot be used. `retry`: whether trying again may help."""

    reason: str
    retry: bool


class Match(msgspec.Struct, frozen=True, array_like=True, tag="match"):
    """Scheduler to daemon: how much KV of `token_ids` (packed u32) is held here?

    `seq` and `epoch` are a hint where to look; the token ids decide. `computed` tokens are in the
    engine already. `limit` caps the answer. `rank` of `ranks`: whose KV; another rank's is none.
    """

    request: int
    seq: str
    epoch: int
    fingerprint: bytes
    salt: bytes
    token_ids: bytes
    computed: int
    limit: int
    rank: int = 0
    ranks: int = 1


class Matched(msgspec.Struct, frozen=True, array_like=True, tag="matched"):
    """Daemon to scheduler: KV of `tokens` tokens can be loaded (0: nothing).

    `extents` are packed u64 (`segue_core.extents`), one per block from block `first_block` on; each block's
    bytes lie there in geometry order. They stay unchanged until `deadline_ns` (CLOCK_MONOTONIC) or
    `Release`. A copy finished after the deadline must not be used.
    """

    request: int
    tokens: int
    first_block: int
    extents: bytes
    lease: int
    deadline_ns: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Scheduler to daemon: the lease is no longer needed. `loaded` tokens were used."""

    lease: int
    loaded: int


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag="fenced"):
    """Daemon to worker: `seq` went on elsewhere with a higher epoch; it is not replicated any more."""

    seq: str
    epoch: int


ToDaemon = Register | Attach | Match | Release | TierMapped
ToEngine = Registered | Refused | Matched | Fenced | Tier

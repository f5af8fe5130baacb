"""The HTTP contract: what `/status`, `/v1/sequences/{seq}` and `/v1/watch` say, as JSON.

Fields are only ever added. Ages and durations in milliseconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAX_RANKS = 64
"""Ranks of one engine, each with a daemon of its own."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

EngineState = Literal["running", "stalled", "dead", "absent"]
"""running: makes progress or is idle. stalled: has work and stands still. dead: its process ended.
absent: none has registered since the daemon started."""

Exact = Literal["output", "seed", "grammar"]
"""What an engine's shim can continue token for token, by its own test at start-up. output: ids taken as
output already produced, with all that counts output (penalties, limits, parsers). seed: and the random
draws. grammar: and structured output."""


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine as its daemon sees it. `incarnation` changes with each life of the process.

    `progress_age_ms`: how long the engine has stood still although it has work (0 when idle).
    `generation_defaults`: sampling parameters that the engine sets where a request does not. `exact`: what
    it can continue exactly; `exact_detail`: why not everything. `fenced`: of the `sequences`, those that go
    on elsewhere, and are not replicated any more. `rank` of `ranks`: which part of the engine this daemon is
    beside; the engine is what its daemons say together.
    """

    engine: str
    state: EngineState
    incarnation: int = 0
    model: str = ""
    fingerprint: str = ""
    pid: int = 0
    running: Count = 0
    step: int = 0
    progress_age_ms: Count = 0
    sequences: int = 0
    journal_dropped: int = 0
    journal_broken: int = 0
    sequences_refused: int = 0
    detail: str = ""
    generation_defaults: dict[str, float] = {}
    exact: tuple[Exact, ...] = ()
    exact_detail: str = ""
    fenced: int = 0
    rank: int = 0
    ranks: int = 1


class PeerStatus(msgspec.Struct, frozen=True):
    """A link to a peer daemon: `lag_tokens` are computed here but not acked there; the oldest of them was
    computed `lag_ms` ago. `throttled_ms`: time that something was ready and the bandwidth budget was spent;
    `throttled_bytes`: bytes that were sent only after such a wait. `host`, `zone`: where it says that it
    runs. `lag_p50_ms`, `lag_p99_ms`: from commit to ack, of the last 512 acks.
    `held_bytes`: copies that an engine without notice has yet to confirm."""

    peer: str
    address: str
    connected: bool
    incarnation: int = 0
    sequences: int = 0
    lag_tokens: int = 0
    in_flight_bytes: int = 0
    sent_bytes: int = 0
    acked_tokens: int = 0
    torn_copies: int = 0
    free_bytes: int = 0
    detail: str = ""
    lag_ms: float = 0.0
    throttled_ms: int = 0
    throttled_bytes: int = 0
    host: str = ""
    zone: str = ""
    lag_p50_ms: float = 0.0
    lag_p99_ms: float = 0.0
    held_bytes: int = 0


class StoreStatus(msgspec.Struct, frozen=True):
    """The replica store. `limit_bytes`: what memory pressure of the host leaves of the budget. `room_bytes`:
    for replicas that are not here yet. `hits` and `misses` count full blocks that engines asked for.
    `evicted_*`: blocks of cache, and replicas given up as stale or while they were live. `corrupt` counts
    deltas with a wrong checksum and blocks that changed in memory; `poisoned_blocks` are the latter of them.
    `own_replicas`: of the `replicas`, those kept for the engine of this host after it died.
    `fences_forgotten`: epochs that a late writer could go below again, because newer ones took their place.
    `tier_*`: copies of sealed blocks in the memory of the engine's GPU; `tier_hits` of them were given out
    while this tier is there, `tier_detail` says why there is none.
    """

    budget_bytes: int
    used_bytes: int
    cached_bytes: int
    replicas: int
    leases: int
    refused: int
    corrupt: int = 0
    loaded_bytes: int = 0
    limit_bytes: int = 0
    room_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evicted_cached_blocks: int = 0
    evicted_stale_replicas: int = 0
    evicted_live_replicas: int = 0
    poisoned_blocks: int = 0
    scrubbed_bytes: int = 0
    own_replicas: int = 0
    evicted_own_replicas: int = 0
    fences_forgotten: int = 0
    tier_bytes: int = 0
    tier_used_bytes: int = 0
    tier_blocks: int = 0
    tier_hits: int = 0
    tier_detail: str = ""


class CopiesStatus(msgspec.Struct, frozen=True):
    """Replicas of the engine's sequences: as many as are `wanted`, as have a peer (`placed`), and as have
    begun to arrive at a peer that is connected (`achieved`). `moves`: sequences re-placed so far."""

    wanted: int = 0
    placed: int = 0
    achieved: int = 0
    moves: int = 0


class GroupStatus(msgspec.Struct, frozen=True):
    """The daemons of an engine of several ranks. `joined`: at rank 0, the other ranks that follow it now; at
    another one, rank 0 if it follows. `detail`: why not all."""

    rank: int = 0
    ranks: int = 1
    joined: tuple[int, ...] = ()
    detail: str = ""


class DaemonStatus(msgspec.Struct, frozen=True):
    """`GET /status` of a daemon."""

    name: str
    version: str
    incarnation: int
    ready: bool
    engine: EngineStatus
    peers: tuple[PeerStatus, ...]
    store: StoreStatus
    copies: CopiesStatus = CopiesStatus()
    group: GroupStatus = GroupStatus()


class SequenceStatus(msgspec.Struct, frozen=True):
    """`GET /v1/sequences/{seq}` of a daemon.

    role owner: the engine here writes it (watermark: the best peer's). role fenced: it goes on elsewhere
    under `epoch`, whatever the engine here still computes. role replica: held for a peer, or for the engine
    here after it died. role cached: it is over, and the KV of its first `watermark` tokens is still here;
    nothing keeps it.
    """

    seq: str
    role: Literal["owner", "fenced", "replica", "cached"]
    epoch: Count
    computed: Count
    known: Count
    watermark: Count
    bytes: Count
    peers: dict[str, int] = {}


class PromoteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/sequences/{seq}/promote`: the caller is about to write on with `epoch`.

    The daemon waits up to `wait_ms` until `want_tokens` are held, then refuses lower epochs.
    """

    epoch: int
    want_tokens: int = 0
    wait_ms: int = 0


class FenceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/sequences/{seq}/fence`: `seq` goes on elsewhere with `epoch`."""

    epoch: int


class Promoted(msgspec.Struct, frozen=True):
    """Answer to promote: `watermark` tokens can be loaded here."""

    seq: str
    epoch: int
    watermark: Count


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every error answer of a status endpoint."""

    error: str
    hint: str = ""


RouterEngineState = Literal["up", "suspect", "down"]


class RouterEngine(msgspec.Struct, frozen=True):
    """An engine as the router sees it. `draining`: it is being emptied and gets nothing new."""

    name: str
    url: str
    model: str
    state: RouterEngineState
    active: int
    daemon: str = ""
    daemon_state: str = ""
    failures: int = 0
    detail: str = ""
    draining: bool = False


class DrainProgress(msgspec.Struct, frozen=True):
    """One line of `POST /drain?engine=NAME` of the router: how far an engine is emptied.

    active: requests on it now. moved: those that another engine goes on with, since its drain began.
    staying: of the active ones, those that cannot move now; they are waited for. detail: why the answer ends
    although it is not empty.
    """

    engine: str
    active: int
    moved: int
    staying: int
    done: bool
    detail: str = ""


class RouterStatus(msgspec.Struct, frozen=True):
    """`GET /status` of the router."""

    version: str
    ready: bool
    engines: tuple[RouterEngine, ...]
    active_requests: int
    failovers: int
    resumed: int
    refused: int


class Move(msgspec.Struct, frozen=True):
    """One move of a request from a failed engine to another.

    detect_ms: from the last byte of the failed engine to the detection; null if there was none.
    decide_ms: from the detection to the request to the next engine. first_token_ms: from that to its first
    token. gap_ms: between the two tokens that the client received around the move.
    """

    from_engine: str = msgspec.field(name="from")
    to: str
    detected_by: str
    at_monotonic_ns: int
    detect_ms: float | None
    watermark: int
    how: Literal["restart", "by_ids", "exact"]
    delivered_tokens: int
    dropped_tokens: int
    decide_ms: float
    first_token_ms: float | None = None
    gap_ms: float | None = None


class RequestStory(msgspec.Struct, frozen=True):
    """`GET /v1/segue/requests/{seq}` of the router: what happened to one request."""

    seq: str
    path: str
    outcome: str
    """active, ok, client_error, client_left, failed, refused."""
    engines: tuple[str, ...]
    prompt_tokens: int
    delivered_tokens: int
    moves: tuple[Move, ...]
    ttft_ms: float | None = None
    detail: str = ""

"""A daemon's own status as text for people. Pure: a `DaemonStatus` in, lines out.

Invariant: no line of a table is wider than `WIDTH`; what does not fit is cut, and whole in `--json`.
"""

from __future__ import annotations

from segue_core.messages.status import DaemonStatus, PeerStatus, StoreStatus
from segue_ctl.output import Style, table

WIDTH = 120
_PEER_CHARS, _WHERE_CHARS = 16, 20
_HEADER = (
    "PEER",
    "WHERE",
    "LINK",
    "SEQUENCES",
    "LAG TOKENS",
    "LAG MS",
    "P99 MS",
    "THROTTLED S",
    "SENT MIB",
    "ROOM MIB",
)


def daemon_facts(status: DaemonStatus) -> str:
    """The engine beside it, its copies elsewhere, and what it holds for others."""
    engine, store, copies = status.engine, status.store, status.copies
    own, used, budget = store.own_replicas, _mib(store.used_bytes), _mib(store.budget_bytes)
    room, cached, loaded = _mib(store.room_bytes), _mib(store.cached_bytes), _mib(store.loaded_bytes)
    blocks, gone_own = store.evicted_cached_blocks, store.evicted_own_replicas
    stale, live = store.evicted_stale_replicas, store.evicted_live_replicas
    rows = [
        ["engine", f"{engine.engine or '-'} {engine.state}" + (f" (pid {engine.pid})" if engine.pid else "")],
        ["", engine.detail],
        ["sequences", f"{engine.sequences}, of which {engine.fenced} fenced"],
        ["journal", f"records dropped {engine.journal_dropped}, broken {engine.journal_broken}"],
        ["copies", f"wanted {copies.wanted}, achieved {copies.achieved}, sequences moved {copies.moves}"],
        ["replicas", f"{store.replicas} ({own} of this host's engine) in {used} of {budget} MiB"],
        ["", f"room {room} MiB, cached {cached} MiB, leases {store.leases}, refused {store.refused}"],
        ["", f"hits {store.hits}, misses {store.misses}, loaded {loaded} MiB"],
        ["", f"corrupt {store.corrupt}, poisoned {store.poisoned_blocks}"],
        ["GPU tier", _tier(store)],
        ["given up", f"cached blocks {blocks}, replicas: own {gone_own}, stale {stale}, live {live}"],
    ]
    return table([row for row in rows if row[1]])


def _tier(store: StoreStatus) -> str:
    """Copies in the memory of the engine's GPU, or why there are none; empty if none are wanted."""
    if store.tier_detail or not store.tier_bytes:
        return store.tier_detail
    used, budget = _mib(store.tier_used_bytes), _mib(store.tier_bytes)
    return f"{store.tier_blocks} blocks in {used} of {budget} MiB, hits {store.tier_hits}"


def peer_table(peers: tuple[PeerStatus, ...], style: Style) -> str:
    """A line for each peer, then why links are down."""
    rows = [
        [
            _cut(peer.peer, _PEER_CHARS),
            _cut("/".join(filter(None, (peer.host, peer.zone))) or "-", _WHERE_CHARS),
            style.good("up") if peer.connected else style.bad("down"),
            str(peer.sequences),
            str(peer.lag_tokens),
            f"{peer.lag_ms:.1f}",
            f"{peer.lag_p99_ms:.1f}",
            f"{peer.throttled_ms / 1000:.1f}",
            _mib(peer.sent_bytes),
            _mib(peer.free_bytes),
        ]
        for peer in peers
    ]
    lines = [table(rows, header=_HEADER, right=range(3, len(_HEADER)))]
    lines += [f"{peer.peer} ({peer.address}): {peer.detail}" for peer in peers if peer.detail]
    return "\n".join(lines)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f}"

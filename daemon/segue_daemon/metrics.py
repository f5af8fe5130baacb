"""Prometheus figures of the daemon, read from its status when asked for: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from segue_core.messages.status import PeerStatus

if TYPE_CHECKING:
    from segue_daemon.app import Daemon


def registry_of(daemon: Daemon) -> CollectorRegistry:
    """A registry with the figures of one daemon."""
    registry = CollectorRegistry()
    registry.register(DaemonCollector(daemon))
    return registry


class DaemonCollector(Collector):
    """Turns `DaemonStatus` into metrics."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._daemon.status()
        engine, store = status.engine, status.store
        up = GaugeMetricFamily("segue_engine_up", "1 while the engine here runs and makes progress")
        up.add_metric([], 1.0 if engine.state == "running" else 0.0)
        yield up
        for name, text, value in (
            ("segue_engine_running_sequences", "Sequences the engine works on", engine.running),
            ("segue_engine_protected_sequences", "Sequences in the ledger", engine.sequences),
            ("segue_engine_fenced_sequences", "Those of them that go on elsewhere", engine.fenced),
            (
                "segue_engine_progress_age_ms",
                "Time without progress although there is work",
                engine.progress_age_ms,
            ),
            ("segue_store_budget_bytes", "Room for replicas", store.budget_bytes),
            ("segue_store_used_bytes", "Bytes taken, cache included", store.used_bytes),
            ("segue_store_cached_bytes", "Bytes of blocks that no replica uses", store.cached_bytes),
            ("segue_store_replicas", "Sequences held for peers", store.replicas),
            ("segue_store_own_replicas", "Those kept for the engine of this host", store.own_replicas),
            ("segue_store_leases", "Loads under way", store.leases),
            ("segue_store_limit_bytes", "What the host's memory leaves of the budget", store.limit_bytes),
            ("segue_store_tier_bytes", "GPU memory for copies of replicas", store.tier_bytes),
            ("segue_store_tier_used_bytes", "What copies take of it", store.tier_used_bytes),
            ("segue_store_room_bytes", "Room for replicas that are not here yet", store.room_bytes),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("segue_journal_dropped", "Records that found the journal full", engine.journal_dropped),
            (
                "segue_sequences_refused",
                "Sequences beyond max_sequences",
                engine.sequences_refused,
            ),
            ("segue_journal_broken", "Times the journal was unreadable", engine.journal_broken),
            ("segue_store_refused", "Deltas not taken", store.refused),
            ("segue_loaded_bytes", "Bytes of replicas that the engine here took over", store.loaded_bytes),
            ("segue_store_corrupt", "Wrong checksums: of deltas, and of blocks held here", store.corrupt),
            (
                "segue_store_poisoned_blocks",
                "Blocks held here that changed by themselves",
                store.poisoned_blocks,
            ),
            ("segue_store_scrubbed_bytes", "Bytes compared with their checksums", store.scrubbed_bytes),
            ("segue_store_hits", "Full blocks that engines asked for and got", store.hits),
            ("segue_store_misses", "Full blocks that engines asked for in vain", store.misses),
            ("segue_store_tier_hits", "Blocks given out from GPU memory to this engine", store.tier_hits),
            ("segue_store_fences_forgotten", "Epochs given up for newer ones", store.fences_forgotten),
        ):
            yield CounterMetricFamily(name, text, value=value)
        evicted = CounterMetricFamily(
            "segue_store_evicted", "Given up for room: blocks of cache, else replicas", labels=["class"]
        )
        evicted.add_metric(["cached"], store.evicted_cached_blocks)
        evicted.add_metric(["own"], store.evicted_own_replicas)
        evicted.add_metric(["stale"], store.evicted_stale_replicas)
        evicted.add_metric(["live"], store.evicted_live_replicas)
        yield evicted
        for name, text, value in (
            ("segue_copies_wanted", "Replicas that the engine's sequences should have", status.copies.wanted),
            ("segue_copies_achieved", "Replicas that a connected peer holds", status.copies.achieved),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield CounterMetricFamily(
            "segue_sequences_replaced", "Sequences that moved to other peers", value=status.copies.moves
        )
        yield from _peers(status.peers)
        lag = HistogramMetricFamily(
            "segue_peer_lag_ms", "Time from a token's commit here to its ack there", labels=["peer"]
        )
        for link in self._daemon.links:
            lag.add_metric([link.name], buckets=link.lag.cumulative(), sum_value=link.lag.sum_ms)
        yield lag


def _peers(peers: Sequence[PeerStatus]) -> Iterator[Metric]:
    connected = GaugeMetricFamily("segue_peer_connected", "1 while the link is up", labels=["peer"])
    lag = GaugeMetricFamily("segue_peer_lag_tokens", "Tokens computed and not acked", labels=["peer"])
    sent = CounterMetricFamily("segue_peer_sent_bytes", "Bulk bytes sent", labels=["peer"])
    torn = CounterMetricFamily(
        "segue_peer_torn_copies", "Copies thrown away: a block was reassigned", labels=["peer"]
    )
    throttled = CounterMetricFamily(
        "segue_peer_throttled_ms", "Time spent waiting for the bandwidth budget", labels=["peer"]
    )
    deferred = CounterMetricFamily(
        "segue_peer_throttled_bytes", "Bulk bytes that had to wait for it", labels=["peer"]
    )
    held = GaugeMetricFamily("segue_peer_held_bytes", "Copies not confirmed yet", labels=["peer"])
    for peer in peers:
        connected.add_metric([peer.peer], float(peer.connected))
        lag.add_metric([peer.peer], peer.lag_tokens)
        sent.add_metric([peer.peer], peer.sent_bytes)
        torn.add_metric([peer.peer], peer.torn_copies)
        throttled.add_metric([peer.peer], peer.throttled_ms)
        deferred.add_metric([peer.peer], peer.throttled_bytes)
        held.add_metric([peer.peer], peer.held_bytes)
    yield from (connected, lag, sent, torn, throttled, deferred, held)

"""The router's metrics, in a registry of their own so that several routers fit into one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

GAP_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 60)
LATENCY_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1)
STATES = ("up", "suspect", "down")


class Metrics:
    """Counters and gauges. The plain integers beside them are for `/status`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.failovers_total = self.resumed_total = self.refused_total = 0
        r = self.registry
        self._requests = Counter(
            "segue_router_requests", "Requests by how they ended.", ["path", "outcome"], registry=r
        )
        self._failovers = Counter(
            "segue_router_failovers",
            "Failures of engines in a request, by how detected.",
            ["cause"],
            registry=r,
        )
        self._resumes = Counter(
            "segue_router_resumes", "Requests that went on elsewhere, by how.", ["how"], registry=r
        )
        self._refusals = Counter(
            "segue_router_refusals", "Requests that could not go on, by why.", ["reason"], registry=r
        )
        self.gap = Histogram(
            "segue_router_gap_seconds",
            "Between the two tokens that a client received around a move.",
            buckets=GAP_BUCKETS,
            registry=r,
        )
        self.added_latency = Histogram(
            "segue_router_added_latency_seconds",
            "From a request's arrival to its way to an engine.",
            buckets=LATENCY_BUCKETS,
            registry=r,
        )
        self._drained = Counter(
            "segue_router_drained", "Requests asked to leave an engine, by answer.", ["answer"], registry=r
        )
        self._draining = Gauge(
            "segue_router_engine_draining", "1 while an engine is being emptied.", ["engine"], registry=r
        )
        self._state = Gauge(
            "segue_router_engine_state", "1 for the state an engine is in.", ["engine", "state"], registry=r
        )
        self._active = Gauge("segue_router_engine_active", "Requests on an engine.", ["engine"], registry=r)

    def request(self, path: str, outcome: str) -> None:
        """A request ended."""
        self._requests.labels(path, outcome).inc()

    def failover(self, cause: str) -> None:
        """An engine failed in a request."""
        self.failovers_total += 1
        self._failovers.labels(cause).inc()

    def resume(self, how: str) -> None:
        """A request goes on elsewhere."""
        self.resumed_total += 1
        self._resumes.labels(how).inc()

    def refusal(self, reason: str) -> None:
        """A request could not go on."""
        self.refused_total += 1
        self._refusals.labels(reason).inc()

    def drained(self, *, moves: bool) -> None:
        """A request was asked to leave an engine that is being drained."""
        self._drained.labels("moves" if moves else "stays").inc()

    def engine(self, name: str, state: str, active: int, *, draining: bool) -> None:
        """An engine's state now."""
        for known in STATES:
            self._state.labels(name, known).set(1 if known == state else 0)
        self._active.labels(name).set(active)
        self._draining.labels(name).set(draining)

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

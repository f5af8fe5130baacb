"""What travels between the connector's two halves, inside vLLM's own messages (pickled by vLLM itself)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from segue_core.messages.status import Exact
from segue_shim.plan import Load, LoadResult, StepPlan


@dataclass
class SegueMetadata(KVConnectorMetadata):
    """Scheduler to worker, every step."""

    plan: StepPlan = field(default_factory=StepPlan)
    loads: tuple[Load, ...] = ()
    void_blocks: tuple[int, ...] = ()
    """Blocks that vLLM expects to be loaded although nobody will: they must be computed."""
    failed_blocks: tuple[int, ...] = ()
    """Blocks that some rank could not load in the step before: it was in vain for all ranks."""
    starting: dict[str, bytes] = field(default_factory=dict)
    """Requests that start in this step with output they already have: its ids, as packed u32."""
    arriving: tuple[str, ...] = ()
    """Requests that wait for a load of this step: they may start once it is over, whatever became of it."""
    broken: bool = False
    """The scheduler's half gave up: what the worker knows of live sequences is not true any more."""

    def awaited_blocks(self) -> set[int]:
        """Every block that holds KV after this step only if its load succeeds."""
        return {block for load in self.loads for block in load.block_ids}.union(self.void_blocks)


@dataclass
class SegueWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler, after a step with loads."""

    results: tuple[LoadResult, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Results of all ranks, one after another: each releases its own lease."""
        assert isinstance(other, SegueWorkerMetadata)
        return SegueWorkerMetadata(self.results + other.results)


@dataclass
class SegueHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once, when the engine starts: what the worker can continue exactly."""

    exact: tuple[Exact, ...] = ()

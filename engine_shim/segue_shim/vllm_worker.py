"""The worker's half of the vLLM connector: owns the exporter, and carries the scheduler's plans out.

Runs where the KV cache is. Invariant: what a step overwrites is in the journal before the step runs, and
what it computed only after it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from segue_core.errors import GeometryError
from segue_shim.exporter import Exporter
from segue_shim.plan import LoadResult, StepPlan
from segue_shim.vllm_metadata import SegueMetadata, SegueWorkerMetadata

if TYPE_CHECKING:
    import torch

    from segue_shim.vllm_caches import NamedTensors

IN_PROCESS: dict[int, Callable[[StepPlan], None]] = {}
"""Worker halves of this process by their engine's incarnation, for a scheduler half beside them."""


class WorkerHalf:
    """Called by `vllm_connector` only; see vLLM's connector base for when."""

    def __init__(
        self,
        exporter: Exporter,
        refusal: str,
        name: Callable[[Mapping[str, torch.Tensor]], NamedTensors],
        num_blocks: int,
        block_size: int,
        ranks: int = 1,
    ) -> None:
        """`refusal`: why this engine cannot be protected, or empty. `name`: see `vllm_caches`. `ranks`: the
        workers of the engine."""
        self._exporter = exporter
        self._refusal = refusal
        self._name = name
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._alone = ranks == 1
        self._metadata = SegueMetadata()
        self._results: list[LoadResult] = []
        self._failed: set[int] = set()
        self._loaded = True
        self._told = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV cache is there, on the host or on a GPU: share it and register."""
        refusal = self._refusal
        if not refusal:
            try:
                tensors, axes = self._name(kv_caches)
            except GeometryError as error:
                refusal = str(error)
        if refusal:
            self._exporter.refuse(refusal)
            return
        self._exporter.register_pages(
            tensors, num_blocks=self._num_blocks, block_size=self._block_size, axes=axes
        )

    def begin(self, metadata: SegueMetadata) -> None:
        """Before vLLM updates its own state for the step, which may zero or overwrite blocks."""
        self._metadata = metadata
        self._results, self._failed = [], set(metadata.void_blocks)
        self._told = False
        self._loaded = not metadata.loads
        if metadata.broken:
            self._exporter.give_up("the scheduler's half failed")
            return
        self._exporter.begin(metadata.plan)

    def load(self) -> None:
        """Before the forward pass of a step that loads."""
        if self._loaded:
            return
        self._loaded = True
        self._results = self._exporter.load(self._metadata.loads)
        self._failed.update(block for result in self._results for block in result.failed_blocks)

    def commit(self) -> None:
        """After the forward pass; a second call in one step changes nothing."""
        if not self._loaded:
            self._failed |= self._metadata.awaited_blocks()
        # If another rank fails to load them, what was computed here from its part is void, too: the next
        # step's plan says so, or counts it.
        unsure = set() if self._alone else self._metadata.awaited_blocks()
        self._exporter.commit(tuple(self._failed), tuple(unsure))

    def take_failed_blocks(self) -> set[int]:
        """Blocks that must be computed after all; told once."""
        told, self._told = self._told, True
        return set() if told else set(self._failed)

    def take_results(self) -> SegueWorkerMetadata | None:
        """What became of the step's loads; told once."""
        if not self._results:
            return None
        results, self._results = tuple(self._results), []
        return SegueWorkerMetadata(results)

    def flush(self, plan: StepPlan) -> None:
        """A step that does nothing but say `plan`."""
        self._exporter.begin(plan)
        self._exporter.commit()

    def give_up(self) -> None:
        """A hook failed: what the exporter says could be wrong from here on."""
        self._exporter.give_up("a hook failed")

    def close(self) -> None:
        """The engine shuts down."""
        self._exporter.close()

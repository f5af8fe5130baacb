"""A worker without a model: does with each step of vLLM's scheduler what vLLM's runner does, in KV slots
whose content is a hash of their prefix.

Keeps its own tokens and positions, as the runner does where steps are scheduled ahead of their ids. Dice
decide which loads fail and which drafts are accepted. Invariant: a token that was computed on a slot with
the wrong content leaves junk, as it would in a real cache.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedule_content import BLOCK_SIZE, JUNK, Replicas, contents, next_token
from schedule_journal import Journal
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from segue_shim.plan import LoadResult, pack_u32, unpack_u32
from segue_shim.vllm_metadata import SegueMetadata, SegueWorkerMetadata

LOADS_THAT_FAIL = 0.35
REJECTED = 1
"""A token that the model never answers: what a rejected draft's slot was computed from."""


@dataclass(slots=True)
class Running:
    """A request of the batch. `computed`: where its next step begins."""

    tokens: list[int]
    prompt: int
    blocks: list[int]
    computed: int


@dataclass(slots=True)
class Written:
    """What a step computes of one request: the slots of [start, stop), on those before them."""

    blocks: list[int]
    start: int
    stop: int
    contents: tuple[int, ...]

    def slot(self, position: int) -> tuple[int, int]:
        return self.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE


class Worker:
    """Every step's records come in their real order; on a GPU its kernels run later, with `finish`."""

    def __init__(
        self,
        journal: Journal,
        replicas: Replicas,
        ahead: bool,
        gpu: bool,
        dice: random.Random,
        counts: Counter[str],
    ) -> None:
        self._journal = journal
        self._replicas = replicas
        self._ahead = ahead
        self._gpu = gpu
        self._dice = dice
        self._counts = counts
        self._batch: dict[str, Running] = {}
        self._kernels: deque[tuple[int, Callable[[], None]]] = deque()

    def execute(self, output: Any) -> tuple[int, ModelRunnerOutput]:
        """Carry out a step: its number, and what the scheduler hears of it."""
        metadata: SegueMetadata = output.kv_connector_metadata
        assert not metadata.broken
        self._journal.begin(metadata.plan)
        step = self._journal.step
        self._update_batch(output, metadata)
        failed: set[int] = set()
        results: list[LoadResult] = []
        # Loads that nobody of this step waits for come after it, as in vLLM's runner.
        if output.has_sync_kv_loads:
            self._load(metadata, failed, results)
        written: list[Written] = []
        sampled = [self._compute(each, output, written) for each in output.num_scheduled_tokens]
        self._kernels.append((step, lambda: self._write(written)))
        if not self._gpu or metadata.loads:
            self.finish(step)
        if not output.has_sync_kv_loads:
            self._load(metadata, failed, results)
        self._journal.commit(metadata.plan, tuple(failed))
        told = KVConnectorOutput(finished_recving=set(metadata.arriving), invalid_block_ids=failed)
        if results:
            told.kv_connector_worker_meta = SegueWorkerMetadata(tuple(results))
        ids = list(output.num_scheduled_tokens)
        return step, ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def propose(self, ids: list[str], most: int) -> DraftTokenIds:
        """At most that many drafts for each request's next step. What they say does not matter: dice decide
        what is accepted of them."""
        return DraftTokenIds(ids, [[REJECTED] * self._dice.randrange(most + 1) for _ in ids])

    def finish(self, step: int) -> None:
        """The kernels of all steps up to this one have run."""
        while self._kernels and self._kernels[0][0] <= step:
            done, kernels = self._kernels.popleft()
            kernels()
            if self._gpu:
                self._journal.completed(done)

    def _update_batch(self, output: Any, metadata: SegueMetadata) -> None:
        for request_id in output.finished_req_ids:
            self._batch.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            delivered = unpack_u32(metadata.starting.get(new.req_id, b""))
            self._batch[new.req_id] = Running(
                tokens=[*new.prompt_token_ids, *delivered],
                prompt=len(new.prompt_token_ids),
                blocks=list(new.block_ids[0]),
                computed=new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            running, blocks = self._batch[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                running.blocks = list(blocks[0])
                running.computed = cached.num_computed_tokens[index]
                running.tokens = list(cached.all_token_ids.get(request_id, running.tokens))
                continue
            # Drafts of one that starts are none: vLLM fills up its step, so that all are of one size.
            self._counts["drafts"] += len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            running.blocks += blocks[0] if blocks else ()
            if not self._ahead:  # ahead, the scheduler does not know yet which drafts were rejected
                running.computed = cached.num_computed_tokens[index]
                del running.tokens[running.prompt + cached.num_output_tokens[index] :]

    def _compute(self, request_id: str, output: Any, written: list[Written]) -> list[int]:
        """The tokens that the request has sampled, if it is past its prompt."""
        running = self._batch[request_id]
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        start, stop = running.computed, running.computed + output.num_scheduled_tokens[request_id]
        sampled: list[int] = []
        while stop - drafts >= len(running.tokens) and len(sampled) <= drafts:
            sampled.append(next_token(running.tokens + sampled))
            if self._dice.random() < 0.5:
                break
        seen = running.tokens + sampled[:-1] + [REJECTED] * (drafts + 1)
        written.append(Written(list(running.blocks), start, stop, contents(pack_u32(seen[:stop]))))
        running.tokens += sampled
        running.computed = stop - drafts + len(sampled) - 1 if sampled else stop
        return sampled

    def _write(self, written: list[Written]) -> None:
        """The whole batch at once: a request may read what another of the same step computes."""
        slots = self._journal.slots
        for each in written:
            for position in range(each.start, each.stop):
                slots[each.slot(position)] = each.contents[position]
        spoiled = list(written)
        while spoiled:
            spoiled = [
                each
                for each in written
                if slots[each.slot(each.stop - 1)] != JUNK
                and any(slots.get(each.slot(p)) != each.contents[p] for p in range(each.start))
            ]
            for each in spoiled:
                for position in range(each.start, each.stop):
                    slots[each.slot(position)] = JUNK

    def _load(self, metadata: SegueMetadata, failed: set[int], results: list[LoadResult]) -> None:
        for load in metadata.loads:
            lease = load.sources[0].lease
            held = contents(pack_u32(self._replicas.leases[lease]))
            fails = self._dice.random() < LOADS_THAT_FAIL
            self._counts["loads that failed" if fails else "loads"] += 1
            for block, extent in zip(load.block_ids, load.sources[0].extents, strict=True):
                for slot in range(BLOCK_SIZE):
                    at = extent * BLOCK_SIZE + slot
                    self._journal.slots[block, slot] = JUNK if fails or at >= len(held) else held[at]
            failed.update(load.block_ids if fails else ())
            loaded = (0, load.block_ids) if fails else (load.tokens, ())
            results.append(LoadResult(1, lease, *loaded))

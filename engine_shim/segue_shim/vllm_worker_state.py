"""Exact continuation, the worker's part: a new request enters vLLM's batch with output it already has.

`install` wraps `InputBatch.add_request` of vLLM's V1 model runner (0.32) in memory. A request that the
scheduler's half named in this step's metadata gets the delivered ids as its output before it is added, and
its generator moves on by as many draws. From there vLLM's own code does what it does for a request that
comes back after a preemption: token ids, prompt length, penalties, bad words, minimum length, drafts. A
request that comes back finds its output there and is left alone.

The wrapper also looks after the generators of all seeded requests, Segue's or not: see `draws`. A step whose
replica could not be loaded draws in vain; its requests' generators go back before the next one.

Invariant: nothing here raises into vLLM, and a request without delivered ids and seed is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from segue_shim.draws import Draw, RewindableGenerator, skip_integers
from segue_shim.plan import unpack_u32

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

logger = logging.getLogger("segue_shim")

_WRAPPED = "_segue_wrapped"


class WorkerState:
    """What the wrapper must know of the current step. `skip`: how this engine's sampler draws, once the
    self-test knows it; until then no request with a seed is continued."""

    def __init__(self) -> None:
        self.skip: Draw = skip_integers
        self._starting: dict[str, bytes] = {}
        self._seeded: list[tuple[CachedRequestState, int]] = []
        self._failed: set[int] = set()

    def begin(self, starting: Mapping[str, bytes]) -> None:
        """Before the step's requests enter the batch: `starting` come with output, as packed u32."""
        self._starting = dict(starting)
        seeded, self._seeded = self._seeded, []
        failed, self._failed = self._failed, set()
        try:
            for request, offset in seeded if failed else ():
                if not failed.isdisjoint(request.block_ids[0]):
                    _rewind(request.generator, offset)
        except Exception:
            logger.exception("segue: draws in vain were not taken back")

    def load_failed(self, blocks: Collection[int]) -> None:
        """The step ran without the KV of these blocks."""
        self._failed.update(blocks)

    def adopt(self, batch: InputBatch, request: CachedRequestState) -> None:
        """`request` is about to enter the batch."""
        packed = self._starting.pop(request.req_id, None)
        if packed is not None and not request.output_token_ids:
            ids = unpack_u32(packed)
            request.output_token_ids[:] = ids
            if request.generator is not None:
                self.skip(request.generator, len(ids), batch.vocab_size)
        generator = request.generator
        if generator is None:
            return
        offset = 0
        if generator.device.type == "cpu":
            request.generator = RewindableGenerator.of(generator)
        else:
            offset = generator.get_offset()
        self._seeded.append((request, offset))


STATE = WorkerState()
"""Of this process's one worker."""


def install(state: WorkerState = STATE) -> None:
    """Wrap `InputBatch.add_request`; a second call changes nothing."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    original: Any = InputBatch.add_request
    if getattr(original, _WRAPPED, False):
        return

    def add_request(self: InputBatch, request: CachedRequestState) -> int:
        try:
            state.adopt(self, request)
        except Exception:
            logger.exception("segue: the state of %s could not be prepared", request.req_id)
        index: int = original(self, request)
        return index

    setattr(add_request, _WRAPPED, True)
    InputBatch.add_request = add_request


def installed() -> bool:
    """Whether the wrapper is where the model runner looks."""
    from vllm.v1.worker import gpu_model_runner

    return bool(getattr(gpu_model_runner.InputBatch.add_request, _WRAPPED, False))


def _rewind(generator: Any, offset: int) -> None:
    if isinstance(generator, RewindableGenerator):
        generator.rewind()
    elif generator is not None:
        generator.set_offset(offset)

"""The scheduler's half of the vLLM connector: follows live requests and says what each step does.

Runs in vLLM's EngineCore, on its one thread. Keeps nothing of the KV; decides which requests are
protected, and whether a resumed one loads a replica. Invariant: of all live requests with one `seq`
at most one is protected, the one with the highest epoch.

Where vLLM schedules ahead (asynchronously), a step is put together before the ids of the one before it are
known: what is `computed` runs ahead of the ids told, by a token for each step on its way. That a load failed
must be known before anything is computed on it: a request waits for its load, and starts in a later step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from segue_core.clock import Clock, MonotonicClock
from segue_core.messages.journal import SequenceBegin, SequenceUpdate
from segue_core.messages.request import Replication
from segue_shim import vllm_compat
from segue_shim.match_group import GroupMatch, MatchGroup
from segue_shim.options import ExporterOptions
from segue_shim.plan import Load, LoadResult, StepPlan, pack_u32

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How vLLM schedules. `ahead`: the next step before the outcome of this one; `drafts`: tokens that may
    turn out not to be part of the answer."""

    ahead: bool = False
    drafts: bool = False


@dataclass(slots=True)
class Tracked:
    """A live request. `seq` is empty if it is not protected; `sent` ids and `computed` tokens (once the
    steps so far are complete) have been told to the worker; `blocks` is its block table. `match` is what the
    daemons answered when `local` tokens were in the prefix cache; `external` tokens of it are being loaded in
    the step that is put together, which computes on them."""

    request: Request
    seq: str = ""
    epoch: int = 0
    salt: bytes = b""
    replication: Replication = "normal"
    resume: bool = False
    sent: int = 0
    computed: int = 0
    blocks: array[int] = field(default_factory=lambda: array("I"))
    asked: bool = False
    match: GroupMatch | None = None
    local: int = 0
    external: int = 0


class SchedulerHalf:
    """Called by `vllm_connector` only; see vLLM's connector base for when."""

    def __init__(
        self,
        client: MatchGroup,
        block_size: int,
        options: ExporterOptions,
        flush: Callable[[StepPlan], bool] = lambda plan: False,
        clock: Clock | None = None,
        scheduling: Scheduling = Scheduling(),
    ) -> None:
        """`flush` carries a plan out at once if the worker's half lives in the same process."""
        self._client = client
        self._block_size = block_size
        self._lease_margin_ns = options.lease_margin_ms * 1_000_000
        self._flush = flush
        self._clock = clock or MonotonicClock()
        self._scheduling = scheduling
        self._tracked: dict[str, Tracked] = {}
        self._owners: dict[str, Tracked] = {}
        self._ended: list[str] = []
        self._taken_over: list[str] = []
        self._loads: list[Load] = []

    def on_new_request(self, request: Request) -> None:
        """A request was added; it may wait for a while."""
        tracked = Tracked(request)
        self._tracked[request.request_id] = tracked
        params = vllm_compat.protectable(request)
        if params is None:
            return
        owner = self._owners.get(params.seq)
        if owner is not None:
            if owner.epoch >= params.epoch:
                return  # a writer that is late, or a choice that nobody gave a name of its own
            owner.seq = ""
            # Its blocks may be others' before this one starts: nothing may be claimed of them any more.
            self._taken_over.append(params.seq)
        tracked.seq = params.seq
        tracked.epoch = params.epoch
        tracked.resume = params.resume
        tracked.replication = params.replication
        tracked.salt = vllm_compat.salt(request)
        self._owners[params.seq] = tracked

    def matched_tokens(self, request: Request, computed: int) -> int:
        """How many tokens beyond `computed` a replica here holds. Asks the daemon once a request."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.seq or not tracked.resume or request.skip_reading_prefix_cache:
            return 0
        # One token must be left to compute, or vLLM has nothing to sample from (and asserts).
        limit = request.num_tokens - 1
        if limit <= computed:
            return 0
        match = tracked.match
        if match is not None and (
            computed // self._block_size < match.first_block
            or match.tokens > limit
            or match.deadline_ns - self._clock.now_ns() < self._lease_margin_ns
        ):
            self._drop_match(tracked)
            tracked.asked = False
        if not tracked.asked:
            tracked.asked = True
            tracked.match = self._client.match(
                seq=tracked.seq,
                epoch=tracked.epoch,
                salt=tracked.salt,
                token_ids=pack_u32(vllm_compat.known_tokens(request, 0)),
                computed=computed,
                limit=limit,
            )
        tracked.local = computed
        return max(0, tracked.match.tokens - computed) if tracked.match is not None else 0

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks were found for the request; `external` tokens of them are to be loaded (0: none)."""
        tracked = self._tracked.get(request.request_id)
        if external <= 0:
            if tracked is not None:
                self._drop_match(tracked)
            return
        if tracked is None or tracked.match is None:
            raise RuntimeError(f"{external} tokens to load that were never promised")
        match, tracked.match = tracked.match, None
        first = tracked.local // self._block_size
        last = -(-(tracked.local + external) // self._block_size)
        if not self._scheduling.ahead:
            tracked.external = external
        self._loads.append(
            Load(
                tokens=external,
                block_ids=tuple(vllm_compat.first_blocks(blocks)[first:last]),
                sources=match.blocks(first, last),
            )
        )

    def build(self, output: SchedulerOutput) -> tuple[StepPlan, tuple[Load, ...]]:
        """The step that vLLM has just scheduled, as the worker's half must say and do it."""
        loads, self._loads = tuple(self._loads), []
        assigned: list[int] = []
        if self._scheduling.ahead:
            assigned += [block for load in loads for block in load.block_ids]
        filling: list[int] = []
        starts: list[tuple[Tracked, int]] = []
        updated: list[SequenceUpdate] = []
        computed: list[tuple[str, int]] = []
        paused, self._taken_over = self._taken_over, []
        cached = output.scheduled_cached_reqs
        for request_id in output.preempted_req_ids or ():
            self._pause(request_id, paused)
        for new in output.scheduled_new_reqs:
            self._start(new.req_id, new.block_ids[0], new.num_computed_tokens, assigned, starts)
            self._count(new.req_id, new.num_computed_tokens, output, computed)
        for index, request_id in enumerate(cached.req_ids):
            begin = cached.num_computed_tokens[index]
            new_blocks = cached.new_block_ids[index]
            blocks = new_blocks[0] if new_blocks is not None else []
            tracked = self._tracked.get(request_id)
            if request_id in cached.resumed_req_ids:
                self._start(request_id, blocks, begin, assigned, starts)
            elif tracked is not None and tracked.seq and begin < tracked.computed:
                # Taken back, for example after a replica failed to load: say it all, with less computed.
                tracked.blocks.extend(blocks)
                self._start(request_id, tracked.blocks.tolist(), begin, assigned, starts)
            else:
                assigned += blocks
                if tracked is not None:
                    tracked.blocks.extend(blocks)
                    filling += tracked.blocks[begin // self._block_size :]
                    if tracked.seq:
                        self._continue(tracked, blocks, updated)
            self._count(request_id, begin, output, computed)
        writing = frozenset(assigned).union(filling)
        ended, self._ended = tuple(self._ended), []
        plan = StepPlan(
            assigned=pack_u32(assigned) if assigned else b"",
            begun=tuple(self._begin(tracked, full_blocks, writing) for tracked, full_blocks in starts),
            updated=tuple(updated),
            paused=tuple(paused),
            ended=ended,
            computed=tuple(computed),
            running=len(self._tracked),
        )
        return plan, loads

    def computed_in_vain(self, failed: Iterable[int]) -> set[int]:
        """Blocks of every table from the first of `failed` blocks on: they hold no KV, or what was made of
        none."""
        failed = frozenset(failed)
        found: set[int] = set()
        for tracked in self._tracked.values() if failed else ():
            first = next((n for n, block in enumerate(tracked.blocks) if block in failed), None)
            found.update(tracked.blocks[first:] if first is not None else ())
        return found

    def worker_done(self, results: tuple[LoadResult, ...]) -> None:
        """Loads were carried out, or failed, at each rank: the leases are over."""
        for result in results:
            self._client.release(result.daemon, result.lease, result.loaded)

    def finished(self, request_id: str) -> None:
        """The request is over, in whatever way."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self._drop_match(tracked)
        if tracked.seq:
            self._owners.pop(tracked.seq, None)
            self._ended.append(tracked.seq)
        # vLLM's server runs one empty step more; an offline engine does not, and would look stalled.
        if not self._tracked and self._flush(StepPlan(ended=tuple(self._ended))):
            self._ended = []

    def close(self) -> None:
        """The engine shuts down."""
        self._client.close()

    def _start(
        self,
        request_id: str,
        blocks: list[int],
        begin: int,
        assigned: list[int],
        starts: list[tuple[Tracked, int]],
    ) -> None:
        """A block table as a whole: new, resumed, or taken back to `begin` tokens."""
        tracked = self._tracked.get(request_id)
        local = begin
        if tracked is not None:
            local -= tracked.external
            tracked.external = 0
        full_blocks = local // self._block_size
        assigned += blocks[full_blocks:]
        if tracked is not None:
            tracked.blocks = array("I", blocks)
            if tracked.seq:
                starts.append((tracked, full_blocks))

    def _begin(self, tracked: Tracked, full_blocks: int, writing: frozenset[int]) -> SequenceBegin:
        """`computed` counts whole blocks before the step. A prefix-cache hit may be on blocks that another
        request of this very step is about to fill, or to go on filling: they do not count yet."""
        for position in range(full_blocks):
            if tracked.blocks[position] in writing:
                full_blocks = position
                break
        tokens = vllm_compat.known_tokens(tracked.request, 0)
        tracked.sent = len(tokens)
        return SequenceBegin(
            seq=tracked.seq,
            epoch=tracked.epoch,
            salt=tracked.salt,
            token_ids=pack_u32(tokens),
            block_ids=pack_u32(tracked.blocks),
            computed=full_blocks * self._block_size,
            replication=tracked.replication,
        )

    def _continue(self, tracked: Tracked, blocks: list[int], updated: list[SequenceUpdate]) -> None:
        tokens = vllm_compat.known_tokens(tracked.request, tracked.sent)
        tracked.sent += len(tokens)
        if tokens or blocks:
            updated.append(SequenceUpdate(tracked.seq, pack_u32(tokens), pack_u32(blocks)))

    def _count(
        self, request_id: str, begin: int, output: SchedulerOutput, computed: list[tuple[str, int]]
    ) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.seq:
            return
        tokens = begin + output.num_scheduled_tokens[request_id]
        drafts = output.scheduled_spec_decode_tokens.get(request_id) or ()
        if drafts or self._scheduling.drafts:
            # KV of drafts is worth nothing until they are accepted, which a later step tells. Of a step that
            # is on its way vLLM counts them as accepted: so no more than is known.
            tokens = min(tokens - len(drafts), tracked.request.num_tokens)
        tracked.computed = tokens
        computed.append((tracked.seq, tokens))

    def _pause(self, request_id: str, paused: list[str]) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.blocks = array("I")
            tracked.computed = 0
            tracked.asked = False
            if tracked.seq:
                paused.append(tracked.seq)

    def _drop_match(self, tracked: Tracked) -> None:
        match, tracked.match = tracked.match, None
        if match is not None:
            self._client.drop(match)

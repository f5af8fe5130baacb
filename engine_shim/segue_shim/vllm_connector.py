"""vLLM's way in: a KV connector (V1 API, vLLM 0.32) whose replicas live in the daemon beside the engine.

    --kv-transfer-config '{"kv_connector": "SegueConnector",
                           "kv_connector_module_path": "segue_shim.vllm_connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"socket": "/run/segue/a.sock", "engine": "a"}}'

A thin dispatcher: the scheduler's half is in `vllm_scheduler`, the worker's in `vllm_worker`. vLLM makes one
object for each role. Invariant: no hook raises, and each returns what vLLM can go on with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.logger import init_logger

from segue_shim import vllm_caches, vllm_compat, vllm_sleep, vllm_worker_state
from segue_shim.exporter import Exporter
from segue_shim.guard import contained, nothing
from segue_shim.match_client import MatchClient
from segue_shim.match_group import MatchGroup
from segue_shim.options import ExporterOptions
from segue_shim.plan import StepPlan
from segue_shim.vllm_fingerprint import fingerprint
from segue_shim.vllm_metadata import SegueHandshake, SegueMetadata, SegueWorkerMetadata
from segue_shim.vllm_resume import OutputResumer
from segue_shim.vllm_scheduler import SchedulerHalf, Scheduling
from segue_shim.vllm_worker import IN_PROCESS, WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from segue_core.messages.status import Exact

logger = init_logger(__name__)


class SegueConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """A configuration that is not understood is one log line, and an engine that runs unprotected."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.broken = False
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._resumer: OutputResumer | None = None
        self._handshake: SegueHandshake | None = None
        self._unloaded: set[int] = set()
        self._arriving: list[str] = []
        self._ahead = False
        self._failed: tuple[int, ...] = ()
        self._block_size = 1
        self._cached_blocks = 0
        self._incarnation = 0
        vllm_compat.adopt_logging()
        if role is KVConnectorRole.WORKER:
            self._prepare_batch()
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "segue: set kv_load_failure_policy to recompute: otherwise a replica that cannot be loaded"
                " fails its request"
            )
        try:
            extra = vllm_compat.extra_config(vllm_config)
            options = extra.options()
        except ValueError as error:
            logger.error("segue: the engine runs unprotected: %s", error)
            return
        self._build(vllm_config, role, kv_cache_config, extra, options)

    @contained(nothing)
    def _prepare_batch(self) -> None:
        vllm_worker_state.install()

    @contained(nothing)
    def _build(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        extra: vllm_compat.ExtraConfig,
        options: ExporterOptions,
    ) -> None:
        refusal = vllm_compat.refusal(vllm_config, kv_cache_config, extra.socket)
        refusal = refusal or vllm_sleep.refusal(vllm_config)
        if refusal and role is KVConnectorRole.SCHEDULER:
            return  # the worker's half says why
        incarnation = vllm_compat.incarnation(vllm_config)
        identity = fingerprint(vllm_config, kv_cache_config, extra.fingerprint)
        block_size = 0 if refusal else vllm_compat.block_size(kv_cache_config)
        rank, ranks = vllm_compat.group(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            clients = [
                MatchClient(
                    extra.socket_of(each),
                    engine=extra.engine,
                    incarnation=incarnation,
                    fingerprint=identity,
                    block_size=block_size,
                    rank=each,
                    ranks=ranks,
                    options=options,
                )
                for each in range(ranks)
            ]
            client = MatchGroup(clients, block_size, options)
            self._block_size = block_size
            scheduling = Scheduling(*vllm_compat.scheduling(vllm_config))
            self._ahead = scheduling.ahead
            self._scheduler = SchedulerHalf(
                client, block_size, options, _flush(incarnation), scheduling=scheduling
            )
            self._resumer = OutputResumer(*vllm_compat.limits(vllm_config))
            return
        exact, detail = _self_test(vllm_config)
        self._handshake = SegueHandshake(exact)
        exporter = Exporter(
            extra.socket_of(rank),
            engine=extra.engine,
            model=vllm_compat.model_name(vllm_config),
            fingerprint=identity,
            incarnation=incarnation,
            defaults=vllm_compat.generation_defaults(vllm_config),
            exact=exact,
            exact_detail=detail,
            rank=rank,
            ranks=ranks,
            options=options,
        )
        num_blocks = kv_cache_config.num_blocks if kv_cache_config is not None else 0
        name = partial(vllm_caches.named_tensors, vllm_config, kv_cache_config)
        self._worker = WorkerHalf(exporter, refusal, name, num_blocks, block_size, ranks)
        if not refusal:
            vllm_sleep.follow(vllm_config, exporter.suspend, exporter.resume)
        self._incarnation = incarnation
        IN_PROCESS[incarnation] = self._worker.flush

    def on_broken(self) -> None:
        """A hook failed: the other half hears of it, through the metadata or the journal."""
        if self._worker is not None:
            self._worker.give_up()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def requires_kv_delivery(self) -> bool:
        """Replicas are made on the way: a preempted request owes nobody its KV."""
        return False

    # -- worker -------------------------------------------------------------------------------

    @contained(nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> SegueHandshake | None:
        """What this worker can continue, for the scheduler's half, before the first request."""
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Runs first in every step: the place to say what the step overwrites, and who enters it how."""
        if isinstance(kv_connector_metadata, SegueMetadata):
            # Even if all else is broken: the scheduler counts on it.
            vllm_worker_state.STATE.load_failed(kv_connector_metadata.failed_blocks)
            vllm_worker_state.STATE.begin(kv_connector_metadata.starting)
            self._begin(kv_connector_metadata)

    @contained(nothing)
    def _begin(self, metadata: SegueMetadata) -> None:
        if self._worker is not None:
            self._worker.begin(metadata)

    @contained(nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete when `start_load_kv` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """The daemon copies by itself."""

    @contained(nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.commit()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads are over when the step is, well or not: whoever waits for one may start."""
        metadata = self._connector_metadata
        return None, set(metadata.arriving) if isinstance(metadata, SegueMetadata) else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Whatever went wrong, no block counts as loaded that was not."""
        metadata = self._connector_metadata
        awaited = metadata.awaited_blocks() if isinstance(metadata, SegueMetadata) else set()
        failed = self._take_failed_blocks() if awaited else set()
        failed = awaited if failed is None else failed
        vllm_worker_state.STATE.load_failed(failed)
        return failed

    @contained(nothing)
    def _take_failed_blocks(self) -> set[int] | None:
        return self._worker.take_failed_blocks() if self._worker is not None else None

    @contained(nothing)
    def build_connector_worker_meta(self) -> SegueWorkerMetadata | None:
        return self._worker.take_results() if self._worker is not None else None

    # -- scheduler ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """vLLM's own refuses to start an engine of several pipeline stages."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    @contained(nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What the workers can continue, all of them."""
        if self._resumer is not None:
            workers = [
                set(worker.exact) if isinstance(worker, SegueHandshake) else set()
                for worker in metadata.values()
            ]
            self._resumer.can = set.intersection(*workers) if workers else set()

    @contained(nothing)
    def on_new_request(self, request: Request) -> None:
        if self._resumer is not None:
            self._resumer.on_new_request(request)
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._resumer is not None and not self._resumer.may_start(request):
            return None, False
        self._cached_blocks = num_computed_tokens // self._block_size
        matched = self._matched_tokens(request, num_computed_tokens)
        return matched, self._ahead and matched > 0

    @contained(lambda: 0)
    def _matched_tokens(self, request: Request, computed: int) -> int:
        return self._scheduler.matched_tokens(request, computed) if self._scheduler is not None else 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            # Not those of the prefix cache: others that run on them would be taken back, too.
            self._unloaded.update(vllm_compat.first_blocks(blocks)[self._cached_blocks :])
            if self._ahead:
                self._arriving.append(request.request_id)
        if self._resumer is not None:
            self._resumer.after_alloc(request, num_external_tokens)
        self._after_alloc(request, blocks, num_external_tokens)

    @contained(nothing)
    def _after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SegueMetadata:
        metadata = self._plan_step(scheduler_output)
        unloaded, self._unloaded = self._unloaded, set()
        failed, self._failed = self._failed, ()
        metadata.failed_blocks = failed
        metadata.arriving, self._arriving = tuple(self._arriving), []
        if metadata.broken:
            metadata.void_blocks = tuple(unloaded)
        if self._resumer is not None:
            metadata.starting = self._resumer.build(scheduler_output)
        return metadata

    @contained(lambda: SegueMetadata(broken=True))
    def _plan_step(self, scheduler_output: SchedulerOutput) -> SegueMetadata:
        if self._scheduler is None:
            return SegueMetadata()
        plan, loads = self._scheduler.build(scheduler_output)
        return SegueMetadata(plan, loads)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._failed = tuple(connector_output.invalid_block_ids or ())
        self._evict(self._failed)
        self._take_results(connector_output)

    @contained(nothing)
    def _evict(self, failed: tuple[int, ...]) -> None:
        """vLLM lists blocks in its prefix cache before they are loaded, and leaves them there to be computed
        again. A request that is aborted or preempted before that would leave junk for all others."""
        manager: Any = getattr(self, "_kv_cache_manager", None)
        if failed and manager is not None and self._scheduler is not None:
            manager.evict_blocks(self._scheduler.computed_in_vain(failed))

    @contained(nothing)
    def _take_results(self, connector_output: KVConnectorOutput) -> None:
        results = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(results, SegueWorkerMetadata):
            self._scheduler.worker_done(results.results)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._resumer is not None:
            self._resumer.finished(request.request_id)
        self._finished(request)
        return False, None

    @contained(nothing)
    def _finished(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)

    @contained(nothing)
    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
            IN_PROCESS.pop(self._incarnation, None)


def _self_test(vllm_config: VllmConfig) -> tuple[tuple[Exact, ...], str]:
    """Its verdict. It names more of vLLM than all the rest: what another version lacks costs this only."""
    try:
        from segue_shim import vllm_selftest
    except ImportError as error:
        logger.warning("segue: nothing can be continued exactly here: %s", error)
        return (), f"output: {error}"
    return vllm_selftest.verdict(vllm_config)


def _flush(incarnation: int) -> Callable[[StepPlan], bool]:
    """Carries a plan out at once if the worker's half is in this process, else leaves it be."""

    def flush(plan: StepPlan) -> bool:
        worker = IN_PROCESS.get(incarnation)
        if worker is not None:
            worker(plan)
        return worker is not None

    return flush

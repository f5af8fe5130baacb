"""What the shim reads of vLLM's own objects (0.32), under names that an upgrade may change.

Never changes them. What is not recognised counts as "do not protect". The places that do change vLLM's
objects, all for exact continuation, are `vllm_resume` (scheduler), `vllm_worker_state` (worker),
`vllm_front_end`, `vllm_replay` and `vllm_collector` (API server); `vllm_selftest` tries all of them out.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from segue_core.messages.request import SegueParams, parse_params
from segue_core.messages.status import MAX_RANKS
from segue_shim import vllm_caches
from segue_shim.options import ExporterOptions
from segue_shim.vllm_fingerprint import sampled

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

DEFAULT_SOCKET = "/run/segue/daemon.sock"
RANK_MARK = "{rank}"
MAX_ADAPTERS = 1_024
"""Whose weights are not looked at again."""
LIMITS = ("ring_bytes", "match_timeout_ms", "connect_timeout_ms", "reply_timeout_ms")


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`. `engine` names this engine to its daemon; `fingerprint` is whatever
    else must agree for KV to be interchangeable, in the operator's own words. In `socket`, `{rank}` stands
    for the number of the rank whose daemon it is."""

    socket: str = DEFAULT_SOCKET
    engine: str = "engine"
    fingerprint: str = ""
    ring_bytes: int | None = None
    match_timeout_ms: int | None = None
    connect_timeout_ms: int | None = None
    reply_timeout_ms: int | None = None

    def socket_of(self, rank: int) -> str:
        """The socket of the daemon beside rank `rank`."""
        return self.socket.replace(RANK_MARK, str(rank))

    def options(self) -> ExporterOptions:
        """The limits, with defaults. Raises ValueError for one out of bounds."""
        given = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        return ExporterOptions(**given)


def extra_config(vllm_config: VllmConfig) -> ExtraConfig:
    """Raises ValueError, naming the key, if the operator wrote something that is not understood."""
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    try:
        return msgspec.convert(raw, ExtraConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config of SegueConnector: {error}") from error


def adopt_logging() -> None:
    """Let the shim's log lines go where vLLM's go."""
    ours, theirs = logging.getLogger("segue_shim"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False


def incarnation(vllm_config: VllmConfig) -> int:
    """63 bits that are the same in every process of one engine's life, and new in its next life."""
    identity = f"{vllm_config.kv_transfer_config.engine_id} {vllm_config.instance_id}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1


def model_name(vllm_config: VllmConfig) -> str:
    """What clients call the model."""
    served = vllm_config.model_config.served_model_name
    return str(served[0] if isinstance(served, list) and served else served or vllm_config.model_config.model)


def generation_defaults(vllm_config: VllmConfig) -> dict[str, float]:
    """Sampling parameters that the server sets where a request does not (generation_config.json and
    `--override-generation-config`): whoever continues a request elsewhere must know them."""
    found = vllm_config.model_config.get_diff_sampling_param()
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def group(vllm_config: VllmConfig) -> tuple[int, int]:
    """(rank of this process, ranks of the engine); the scheduler's process counts as rank 0."""
    parallel = vllm_config.parallel_config
    return int(parallel.rank), int(parallel.world_size)


def limits(vllm_config: VllmConfig) -> tuple[int, int]:
    """(size of the vocabulary, tokens of the longest sequence)."""
    return int(vllm_config.model_config.get_vocab_size()), int(vllm_config.model_config.max_model_len)


def scheduling(vllm_config: VllmConfig) -> tuple[bool, bool]:
    """(whether the next step is scheduled before the outcome of this one is known, whether steps hold drafts
    that may be rejected)."""
    return bool(vllm_config.scheduler_config.async_scheduling), vllm_config.speculative_config is not None


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, socket: str) -> str:
    """Why this engine's KV cannot be protected; empty if it can. `socket`: as configured."""
    problem = _group_refusal(vllm_config.parallel_config, socket)
    if problem:
        return problem
    return vllm_caches.refusal(vllm_config, kv_cache_config)


def _group_refusal(parallel: Any, socket: str) -> str:
    if parallel.data_parallel_size > 1:
        return (
            f"{parallel.data_parallel_size} data-parallel engines: only engines of their own are supported"
            " so far: start each as one server"
        )
    if parallel.pipeline_parallel_size > 1:
        # vLLM schedules the next step before it knows of this one's failed loads.
        return "pipeline parallelism is not supported so far: use --tensor-parallel-size for several ranks"
    for other in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, other, 1) > 1:
            return f"{other} {getattr(parallel, other)} is not supported so far"
    if parallel.world_size > MAX_RANKS:
        return f"{parallel.world_size} ranks: at most {MAX_RANKS} are supported"
    if parallel.world_size > 1 and RANK_MARK not in socket:
        return (
            f"{parallel.world_size} ranks, but one socket {socket}: start one segue-daemon a rank and write"
            f' {RANK_MARK} into `socket`, for example "/run/segue/a-{RANK_MARK}.sock"'
        )
    return ""


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block, of the one group that `refusal` lets pass."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def protectable(request: Request) -> SegueParams | None:
    """The request's Segue parameters if its KV depends on token ids, salt and adapter only."""
    params = parse_params(request.kv_transfer_params)
    if (
        params is None
        or request.mm_features
        or request.prompt_embeds is not None
        or request.prompt_token_ids is None
        or request.pooling_params is not None
        or request.resumable
    ):
        return None
    return params


def salt(request: Request) -> bytes:
    """What else the KV depends on: cache salt and adapter, each part with its length; empty if neither."""
    adapter = request.lora_request
    if request.cache_salt is None and adapter is None:
        return b""
    parts = [b"" if request.cache_salt is None else b"s" + request.cache_salt.encode()]
    if adapter is not None:
        path = str(adapter.lora_path)
        parts += [adapter.lora_name.encode(), path.encode(), *_adapter_weights(adapter.lora_int_id, path)]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


@lru_cache(maxsize=MAX_ADAPTERS)
def _adapter_weights(number: int, path: str) -> tuple[bytes, ...]:
    """Samples of the files, as they are when the engine first has adapter `number`: a replica outlives the
    engine, and other hosts may have other weights at that path. Empty: they are elsewhere."""
    try:
        samples = sampled(Path(path))
    except OSError:
        return ()
    return (hashlib.blake2b(" ".join(samples).encode(), digest_size=16).digest(),) if samples else ()


def first_blocks(blocks: KVCacheBlocks) -> list[int]:
    """Block ids of the only group."""
    return list(blocks.get_block_ids()[0])


def known_tokens(request: Request, start: int) -> list[int]:
    """Ids known from position `start` on."""
    tokens: Any = request.all_token_ids[start:]
    return list(tokens)

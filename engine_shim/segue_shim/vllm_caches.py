"""What vLLM (0.32) says about its KV tensors, as facts for `vllm_layout`, and the tensors under named axes.

Reads vLLM's objects, changes none. The order of the layers is the group's own, so that engines whose memory
is laid out differently still agree on the order of a block's bytes. Invariant: every tensor that vLLM hands
over is described, or is another layer's once more, or all are refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from segue_core.errors import GeometryError
from segue_shim.vllm_layout import LayerFacts, named_view

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KINDS = (FullAttentionSpec, MLAAttentionSpec)
SCALES_ELSEWHERE = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""Nothing but values in the cache: what scales them belongs to the model."""


class NamedTensors(NamedTuple):
    """KV tensors by layer, and the names of their axes."""

    tensors: dict[str, torch.Tensor]
    axes: dict[str, tuple[str, ...]]


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> str:
    """Why this KV cache cannot be protected, as far as its specification says; empty if it can."""
    if kv_cache_config is None or len(kv_cache_config.kv_cache_groups) != 1:
        count = 0 if kv_cache_config is None else len(kv_cache_config.kv_cache_groups)
        return f"{count} KV cache groups: only models with one are supported so far"
    (group,) = kv_cache_config.kv_cache_groups
    if getattr(group, "host_resident", False):
        return "its KV cache lies on the host while the model runs elsewhere"
    for spec in _specs(group).values():
        if type(spec) not in KINDS:
            return f"KV cache of kind {type(spec).__name__}: only full attention and MLA are supported so far"
        if spec.kv_quant_mode not in SCALES_ELSEWHERE:
            return (
                f"KV cache type {spec.kv_quant_mode.name} keeps scales beside its values:"
                " use --kv-cache-dtype auto or fp8"
            )
        if spec.tokens_per_state != 1:
            return f"a KV cache that keeps one state for {spec.tokens_per_state} tokens"
    if vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing:
        # It clears new blocks before the connector hears of the step: a copy could hold zeros, unnoticed.
        return (
            "the V2 model runner clears blocks before it says so with a KV cache of mixed types:"
            " set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return ""


def named_tensors(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> NamedTensors:
    """The tensors that `register_kv_caches` brings, for a configuration without `refusal`. Raises
    GeometryError with the reason if one of them is not understood."""
    (group,) = kv_cache_config.kv_cache_groups
    facts = _facts(vllm_config, kv_cache_config, kv_caches)
    named = NamedTensors({}, {})
    for name in group.layer_names:
        if name not in facts:
            raise GeometryError(f"{name}: vLLM has no KV cache for it")
        tensor = kv_caches[name]
        view = named_view(
            facts[name], num_blocks=kv_cache_config.num_blocks, block_size=group.kv_cache_spec.block_size
        )
        named.tensors[name] = tensor.as_strided(view.shape, view.strides, tensor.storage_offset())
        named.axes[name] = view.axes
    described = {_place(kv_caches[name]) for name in named.tensors}
    for name, tensor in kv_caches.items():
        if name not in named.tensors and _place(tensor) not in described:
            raise GeometryError(f"{name}: a KV cache that is in no group")
    return named


def _facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, LayerFacts]:
    specs = _specs(kv_cache_config.kv_cache_groups[0])
    layout = _layout(vllm_config, kv_cache_config)
    backends = _backends(vllm_config, specs)
    facts: dict[str, LayerFacts] = {}
    for place in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(place.layers):
            tensor = kv_caches.get(name)
            if tensor is None:
                continue
            spec = specs.get(name)
            if spec is None:
                raise GeometryError(f"{name}: a KV cache that is in no group")
            itemsize = _ordinary(name, tensor)
            kernel_block = int(tensor.shape[2])
            if kernel_block < 1 or spec.block_size % kernel_block:
                raise GeometryError(f"{name}: kernel blocks of {kernel_block} of {spec.block_size} slots")
            stated = compute_layout_strides(
                spec,
                kv_cache_config.num_blocks,
                len(place.layers),
                layout,
                # A padded page is never split, and says so if it is asked.
                None if kernel_block == spec.block_size else kernel_block,
                (place.layer_stride, place.block_stride * kernel_block // spec.block_size, None, None, None),
            )
            facts[name] = LayerFacts(
                name=name,
                backend=backends.get(name, ""),
                cache_type=getattr(spec, "cache_dtype_str", None) or "",
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
                offset=tensor.storage_offset() * itemsize,
                itemsize=itemsize,
                heads=spec.num_heads,
                content_bytes=spec.state_content_size_bytes,
                # vLLM counts the content in bytes, the tensor in elements: the last stride is one of each.
                stated_strides=(*(stride // itemsize for stride in stated[1:4]), 1),
                stated_offset=place.offset + index * place.layer_stride,
            )
    return facts


def _ordinary(name: str, tensor: torch.Tensor) -> int:
    """Bytes of an element. Raises GeometryError unless it is a tensor of the kind that vLLM 0.32 makes."""
    if not isinstance(tensor, torch.Tensor):
        raise GeometryError(f"{name}: a {type(tensor).__name__}, not one KV tensor a layer")
    if tensor.layout != torch.strided or tensor.dim() != 4:
        raise GeometryError(
            f"{name}: shape {tuple(tensor.shape)}, {tensor.layout}: not [blocks, heads, slots, content]"
        )
    return int(tensor.element_size())


def _specs(group: Any) -> dict[str, Any]:
    """The specification of each layer of a group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(group.layer_names, spec)


def _layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVCacheLayout:
    name = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    if name is None:
        raise GeometryError("vLLM does not say how its KV cache is laid out")
    return KVCacheLayout[name]


def _backends(vllm_config: VllmConfig, layers: Iterable[str]) -> dict[str, str]:
    """Names of the attention backends, as the loaded layers say them."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: str(context[name].get_attn_backend().get_name()) for name in layers if name in context}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype

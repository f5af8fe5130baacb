"""Sixteen bytes that are equal for two vLLM engines exactly if their KV bytes may be exchanged.

Both halves of the connector compute it, from the configuration alone, and all ranks come to the same: the
rank and the geometry's digest are the daemon's to add. Anything that is not understood goes in as text: the
worst case is that two engines that could have helped each other do not.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAMES = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys of a model's configuration that do not change its KV (the data type is added on its own)."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
SAMPLES = 16
SAMPLE_BYTES = 4096


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, extra: str) -> bytes:
    """16 bytes over model, weights, types, KV cache specification, attention backend and host kernels."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    facts = {
        "model": _without_names(model.hf_config.to_dict()),
        "weights": _weights(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "groups": [repr(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups],
        "layers": [list(group.layer_names) for group in kv_cache_config.kv_cache_groups],
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "host": _host(vllm_config),
        "extra": extra,
    }
    encoded = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(encoded, digest_size=16, person=b"segue-vllm").digest()


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_names(item) for key, item in value.items() if key not in NAMES}
    return value


def _host(vllm_config: VllmConfig) -> list[str]:
    """On a CPU the kernels pack KV by instruction set (see vLLM's cpu_attn.py: amx, vec, neon...)."""
    if vllm_config.device_config.device_type != "cpu":
        return [str(vllm_config.device_config.device_type)]
    return [
        platform.machine(),
        f"amx {torch.cpu._is_amx_tile_supported()}",
        f"avx512 {torch.cpu._is_avx512_supported()}",
    ]


def _weights(model: Any) -> list[str]:
    """Two fine-tunes of one architecture differ here and nowhere else; a name and revision if the files are
    elsewhere."""
    return sampled(Path(model.model)) or [str(model.model), str(model.revision)]


def sampled(path: Path) -> list[str]:
    """Sizes of the weight files at `path` and samples of their content; empty: there are none."""
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = sorted(file for pattern in WEIGHT_FILES for file in path.glob(pattern))
    return [f"{file.stat().st_size} {_sample(file)}" for file in files]


def _sample(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = file.stat().st_size
    with file.open("rb") as content:
        for number in range(SAMPLES):
            content.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()

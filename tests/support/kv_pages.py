"""A small engine's KV cache for tests, and options with short deadlines."""

from __future__ import annotations

import torch

from segue_shim.options import ExporterOptions

BLOCKS, BLOCK_SIZE, LAYERS, HEADS, WIDTH = 12, 4, 3, 2, 8
FAST = ExporterOptions(
    retry_refused_ms=300,
    ring_bytes=1 << 16,
    retry_min_ms=5,
    retry_max_ms=20,
    reply_timeout_ms=200,
    match_timeout_ms=100,
    match_pause_ms=50,
)


def kv_tensors() -> dict[str, torch.Tensor]:
    """A KV cache in the shape of vLLM's on a CPU: all layers in one storage."""
    size = BLOCKS * HEADS * BLOCK_SIZE * WIDTH
    storage = torch.arange(LAYERS * size, dtype=torch.float32)
    strides = (HEADS * BLOCK_SIZE * WIDTH, BLOCK_SIZE * WIDTH, WIDTH, 1)
    return {
        f"layer.{layer}": storage.as_strided((BLOCKS, HEADS, BLOCK_SIZE, WIDTH), strides, layer * size)
        for layer in range(LAYERS)
    }

"""KV of a sequence, from the daemon's view of vLLM's pages and, independently, from transformers."""

from __future__ import annotations

import torch

from segue_core.geometry import Geometry

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 64, 32


def paged_kv(page: torch.Tensor, geometry: Geometry, block_ids: list[int], tokens: int) -> torch.Tensor:
    """KV of the first `tokens` slots: [layers, tokens, 2, kv_heads, head_dim] from a handle's float32 `page`.

    Inside a (block, head), vLLM's CPU kernels keep K as [head_dim, block_size] and V as
    [block_size, head_dim].
    """
    layers = []
    for region in geometry.regions:
        tables = torch.stack(
            [
                page[start : start + KV_HEADS * BLOCK_SIZE * 2 * HEAD_DIM]
                for block in block_ids[: -(-tokens // BLOCK_SIZE)]
                for start in [(region.offset + block * region.strides[0]) // 4]
            ]
        ).view(-1, KV_HEADS, 2, BLOCK_SIZE * HEAD_DIM)
        keys = tables[:, :, 0].reshape(-1, KV_HEADS, HEAD_DIM, BLOCK_SIZE).permute(0, 3, 1, 2)
        values = tables[:, :, 1].reshape(-1, KV_HEADS, BLOCK_SIZE, HEAD_DIM).permute(0, 2, 1, 3)
        both = torch.stack([keys, values], dim=2)
        layers.append(both.reshape(-1, 2, KV_HEADS, HEAD_DIM)[:tokens])
    return torch.stack(layers).clone()


class Reference:
    """The same model, computed by transformers in float32."""

    def __init__(self, folder: str) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def kv(self, token_ids: list[int]) -> torch.Tensor:
        """[layers, tokens, 2, kv_heads, head_dim], keys as they are cached (rotated)."""
        cache = self._model(torch.tensor([token_ids]), use_cache=True).past_key_values
        return torch.stack(
            [torch.stack([layer.keys[0], layer.values[0]]).permute(2, 0, 1, 3) for layer in cache.layers]
        )

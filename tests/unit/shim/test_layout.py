"""KV layouts: the ones that are understood are described byte by byte, the others refused untouched."""

from __future__ import annotations

import mmap

import pytest
import torch

from segue_core.errors import GeometryError
from segue_shim.layout import describe, share_pages
from support.kv_pages import BLOCK_SIZE, BLOCKS, HEADS, LAYERS, WIDTH, kv_tensors

VLLM_CPU_AXES = ("block", "opaque", "opaque", "opaque")
"""vLLM on a CPU: [num_blocks, kv_heads, block_size, 2 * head_dim]. Inside a (block, head) the kernels
lay K out transposed and V by rows, so no axis but the block's means what its name says."""

LAYER_BYTES = BLOCKS * HEADS * BLOCK_SIZE * WIDTH * 4
BLOCK_BYTES = LAYER_BYTES // BLOCKS


def test_layers_of_one_storage_are_one_handle() -> None:
    """vLLM's CPU layout: one region a layer, a block is opaque."""
    geometry = describe(kv_tensors(), num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=VLLM_CPU_AXES)
    assert geometry.handle_bytes == (LAYERS * LAYER_BYTES,)
    assert [region.offset for region in geometry.regions] == [layer * LAYER_BYTES for layer in range(LAYERS)]
    assert geometry.block_bytes == LAYERS * BLOCK_BYTES
    assert [piece.nbytes for piece in geometry.fragments] == [BLOCK_BYTES] * LAYERS
    assert not geometry.slot_axis_known


def test_sharing_keeps_the_content_and_shows_later_changes() -> None:
    """The engine's own tensors follow; another mapping of the descriptor sees what they do."""
    tensors = kv_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    pages = share_pages(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=VLLM_CPU_AXES)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    tensors["layer.1"][3].fill_(7.0)
    with mmap.mmap(pages.fds[0], pages.geometry.handle_bytes[0], prot=mmap.PROT_READ) as seen:
        start = LAYER_BYTES + 3 * BLOCK_BYTES
        assert seen[start : start + BLOCK_BYTES] == tensors["layer.1"][3].numpy().tobytes()
    assert pages.views[0].numel() == pages.geometry.handle_bytes[0]


def test_layers_with_storages_of_their_own_have_handles_of_their_own() -> None:
    """As engines other than vLLM allocate them; the block axis is found by its length."""
    tensors = {name: tensor.clone() for name, tensor in kv_tensors().items()}
    pages = share_pages(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    assert len(pages.fds) == LAYERS and len(set(pages.fds)) == LAYERS
    assert pages.geometry.regions[0].axes == ("block", "opaque", "opaque", "opaque")


def test_a_layer_that_uses_anothers_cache_is_not_shipped_twice() -> None:
    """Cross-layer sharing hands the same tensor out under two names."""
    tensors = kv_tensors()
    tensors["layer.copy"] = tensors["layer.0"]
    geometry = describe(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=VLLM_CPU_AXES)
    assert len(geometry.regions) == LAYERS


def test_named_slots_are_kept() -> None:
    """An engine that knows where a token's bytes are may say so."""
    tensors = {"kv": torch.zeros(BLOCKS, 2, BLOCK_SIZE, HEADS, WIDTH)}
    axes = ("block", "kv", "slot", "head", "dim")
    geometry = describe(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=axes)
    assert geometry.slot_axis_known


UNKNOWN = {
    "no tensors": ({}, None, "no KV cache tensors"),
    "a list per layer": ({"mamba": [torch.zeros(2)]}, None, "list"),
    "another device": ({"kv": torch.zeros(BLOCKS, 4, device="meta")}, None, "meta"),
    "no block axis": ({"kv": torch.zeros(5, 4)}, None, "no single axis"),
    "two candidates": ({"kv": torch.zeros(BLOCKS, BLOCKS)}, None, "no single axis"),
    "too few dimensions": ({"kv": torch.zeros(BLOCKS, 4)}, VLLM_CPU_AXES, "is not"),
    "blocks elsewhere": ({"kv": torch.zeros(2, BLOCKS, 4, 8)}, VLLM_CPU_AXES, "is not"),
    "a broadcast": ({"kv": torch.zeros(BLOCKS, 1).expand(BLOCKS, 4)}, None, "must be positive"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_layout_is_refused_with_a_reason(what: str) -> None:
    """And the engine's tensors are left alone."""
    tensors, axes, reason = UNKNOWN[what]
    with pytest.raises(GeometryError, match=reason):
        share_pages(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=axes)
    assert not any(isinstance(tensor, torch.Tensor) and tensor.is_shared() for tensor in tensors.values())


def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    """Sparse tensors have no strides to describe."""
    with pytest.raises(GeometryError, match="layout"):
        describe({"kv": torch.zeros(BLOCKS, 4).to_sparse()}, num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def test_two_shapes_over_the_same_bytes_are_refused() -> None:
    """Hybrid models lay several kinds of cache over each other."""
    tensors = kv_tensors()
    tensors["overlay"] = tensors["layer.0"].view(BLOCKS, HEADS * BLOCK_SIZE, WIDTH, 1)
    with pytest.raises(GeometryError, match="overlaps"):
        describe(tensors, num_blocks=BLOCKS, block_size=BLOCK_SIZE, axes=VLLM_CPU_AXES)

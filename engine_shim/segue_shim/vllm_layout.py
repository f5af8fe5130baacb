"""Which axis of vLLM's KV tensors is which: blocks, heads, slots, content. Pure: no torch, no vLLM.

vLLM (0.32) hands a connector one view a layer, always [kernel blocks, heads, slots, content], whatever the
order in memory: NHD and HND, layers apart or packed into each block, head planes outermost. Where a kernel
takes smaller blocks than vLLM's manager counts, one manager block is `ratio` kernel blocks side by side.

Invariant: nothing is guessed from lengths. A view is named only if it lies exactly where vLLM's own
configuration puts it, and by a backend whose kernels are known: that a slot's content is one token's (then
tails go as slot runs), or only that a block's bytes are all there is of it.
"""

from __future__ import annotations

from typing import NamedTuple

from segue_core.errors import GeometryError

TOKEN_SLOTS = frozenset(
    {
        # [blocks, heads, slots, K and V side by side]
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "HPC_ATTN",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        # [blocks, a plane of K and one of V, slots, heads side by side]
        "B12X",
        # [blocks, 1, slots, one latent vector]: vLLM writes it with one operation for all, a row a token
        "CUTLASS_MLA",
        "FLASH_ATTN_MLA",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASHINFER_MLA",
        "FLASHINFER_MLA_SPARSE",
        "FLASHINFER_MLA_SPARSE_SM120",
        "FLASHINFER_MLA_SPARSE_SM90",
        "FLASHMLA",
        "FLASHMLA_SPARSE",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
    }
)
"""Backends whose kernels keep everything of one token in its slot."""
WHOLE_BLOCKS = frozenset(
    {
        "CPU_ATTN",  # K is transposed inside of each head
        "DEEPSEEK_V32_INDEXER",  # all values of a kernel block come before all of its scales
    }
)
"""Backends that fill a block in an order of their own, within the block."""
PACKED_ROWS = frozenset({"fp8_ds_mla"})
"""Cache types whose rows hold values, scales and positions as bytes: shipped by whole blocks."""


class LayerFacts(NamedTuple):
    """One layer's KV. `strides` and `offset` (of its first byte in the allocation) are the view's own,
    `stated_strides` and `stated_offset` what vLLM's configuration says of it; strides count elements.
    `heads` and `content_bytes` are those of its specification."""

    name: str
    backend: str
    cache_type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int
    heads: int
    content_bytes: int
    stated_strides: tuple[int, ...]
    stated_offset: int


class NamedView(NamedTuple):
    """The same memory with an axis for manager blocks first, and a name for each axis; strides count
    elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    axes: tuple[str, ...]


class _Axis(NamedTuple):
    name: str
    length: int
    stride: int


def named_view(facts: LayerFacts, *, num_blocks: int, block_size: int) -> NamedView:
    """What each axis of a layer's view means. Raises GeometryError with the reason if that is not certain."""
    _check(facts, num_blocks, block_size)
    known = facts.backend in TOKEN_SLOTS and facts.cache_type not in PACKED_ROWS
    kernel_blocks, heads, slots, content = (
        _Axis(*axis)
        for axis in zip(("block", "head", "slot", "dim"), facts.shape, facts.strides, strict=True)
    )
    ratio = block_size // slots.length
    inner = [heads, slots, content]
    if ratio > 1:
        side_by_side = slots.length == 1 or kernel_blocks.stride == slots.length * slots.stride
        if side_by_side and facts.backend in TOKEN_SLOTS:
            step = slots.stride if slots.length > 1 else kernel_blocks.stride
            inner = [heads, _Axis("slot", block_size, step), content]
        else:
            # Heads lie between one kernel block's slots and the next one's: two steps from slot to slot. Or
            # each kernel block has an order of its own, which kernel blocks of another size have not.
            known = False
            inner.insert(0, _Axis("opaque", ratio, kernel_blocks.stride))
    # Where an axis of one lies means nothing; engines that agree on the rest must agree.
    inner = [axis for axis in inner if axis.length > 1 or (known and axis.name == "slot")]
    if not known:
        inner = [axis._replace(name="opaque") for axis in inner]
    axes = [_Axis("block", num_blocks, kernel_blocks.stride * ratio), *inner]
    return NamedView(
        tuple(axis.length for axis in axes),
        tuple(axis.stride for axis in axes),
        tuple(axis.name for axis in axes),
    )


def _check(facts: LayerFacts, num_blocks: int, block_size: int) -> None:
    """Raise GeometryError unless the view is what the specification and the configuration say."""
    where, shape = facts.name, facts.shape
    if facts.backend not in TOKEN_SLOTS | WHOLE_BLOCKS:
        raise GeometryError(
            f"{where}: where attention backend {facts.backend or 'without a name'} puts KV is not known:"
            " choose another with --attention-backend"
        )
    if len(shape) != 4 or min(shape) < 1:
        raise GeometryError(f"{where}: shape {shape}: not [blocks, heads, slots, content]")
    blocks, heads, slots, content = shape
    if block_size % slots or blocks != num_blocks * (block_size // slots):
        raise GeometryError(
            f"{where}: {blocks} kernel blocks of {slots} slots are not {num_blocks} blocks of {block_size}"
        )
    if heads != facts.heads or content * facts.itemsize != facts.content_bytes:
        raise GeometryError(
            f"{where}: {heads} heads with {content * facts.itemsize} bytes a slot, where its specification"
            f" says {facts.heads} with {facts.content_bytes}"
        )
    pairs = zip(shape, facts.strides, facts.stated_strides, strict=True)
    if facts.offset != facts.stated_offset or any(n > 1 and own != stated for n, own, stated in pairs):
        raise GeometryError(
            f"{where}: strides {facts.strides} from byte {facts.offset}, where vLLM's configuration says"
            f" {facts.stated_strides} from byte {facts.stated_offset}"
        )

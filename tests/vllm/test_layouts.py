"""KV tensors made by vLLM's own allocation, in the shapes that its GPU backends ask for, in host memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from segue_core.errors import GeometryError
from segue_core.geometry import Geometry
from segue_shim.layout import describe

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCKS, LAYERS = 3, 2
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""In vLLM's words: L layers, B blocks, H heads, N slots, C content; NHD is LBNHC, HND is LBHNC."""


class Cache(NamedTuple):
    """A KV cache as a connector gets it. `raw` is its memory, byte by byte."""

    config: Any
    cache_config: Any
    tensors: dict[str, torch.Tensor]
    raw: torch.Tensor

    def geometry(self) -> Geometry:
        """As the shim describes it. Raises GeometryError."""
        from segue_shim.vllm_caches import named_tensors

        named = named_tensors(self.config, self.cache_config, self.tensors)
        block_size = self.cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return describe(named.tensors, num_blocks=BLOCKS, block_size=block_size, axes=named.axes)

    def rows(self, layer: str, block: int, slots: range) -> list[torch.Tensor]:
        """[heads, content] of each slot of a manager block, by indexing vLLM's tensor."""
        tensor = self.tensors[layer]
        per_kernel = tensor.shape[2]
        ratio = tensor.shape[0] // BLOCKS
        return [tensor[block * ratio + slot // per_kernel, :, slot % per_kernel] for slot in slots]


def backend(name: str) -> Any:
    """vLLM's own class, or its name alone where the class needs what only a GPU host has."""
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
    from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    real: tuple[Any, ...] = (
        B12xPagedAttentionBackend,
        CPUAttentionBackend,
        DeepseekV32IndexerBackend,
        FlashAttentionBackend,
        FlashMLABackend,
        FlashMLASparseBackend,
        FlexAttentionBackend,
        TritonAttentionBackend,
        TritonMLABackend,
    )
    found = {made.get_name(): made for made in real}
    return found.get(name) or type(name, (AttentionBackend,), {"get_name": staticmethod(lambda: name)})


def spec(kind: str, **changes: Any) -> Any:
    """A specification as a model's layer makes it: `full` attention, `mla`, its packed bytes, an indexer."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

    if kind == "full":
        values = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16} | changes
        return FullAttentionSpec(**values)
    values = {"block_size": 64, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16}
    if kind == "packed":
        values |= {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
        values |= {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    if kind == "indexer":
        values |= {"dtype": torch.uint8, "head_size": 132}
    return MLAAttentionSpec(**values | changes)


def cache(layout: str, layers: dict[str, tuple[str, Any]], kernel_block: int | None = None) -> Cache:
    """vLLM's KV cache for {layer: (backend, specification)}; kernels take blocks of `kernel_block` slots."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheLayout, UniformTypeKVCacheSpecs
    from vllm.v1.worker.utils import allocate_kv_cache

    specs = {name: backend(of).customize_spec(wanted) for name, (of, wanted) in layers.items()}
    first = next(iter(specs.values()))
    uniform = all(each == first for each in specs.values())
    whole = first if uniform else UniformTypeKVCacheSpecs(first.block_size, kv_cache_specs=specs)
    contexts = {
        name: SimpleNamespace(get_attn_backend=lambda of=of: backend(of)) for name, (of, _) in layers.items()
    }
    config = SimpleNamespace(
        use_v2_model_runner=False,
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            kv_cache_layout=layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        compilation_config=SimpleNamespace(static_forward_context=contexts),
    )
    made = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(list(layers), whole)], 1 << 24)
    kernel_blocks = None if kernel_block is None else [kernel_block]
    tensors = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout[layout], kernel_blocks)
    storage = next(iter(tensors.values())).untyped_storage()
    return Cache(config, made, tensors, torch.empty(0, dtype=torch.uint8).set_(storage))


def alike(of: str, wanted: Any, layout: str, kernel_block: int | None = None) -> Cache:
    """A KV cache whose layers are all of one kind."""
    return cache(layout, {f"layer.{n}": (of, wanted) for n in range(LAYERS)}, kernel_block)


def pieces(geometry: Geometry, block: int, slots: range | None) -> list[tuple[int, int]]:
    """(first byte, bytes) of everything that the geometry takes for a block, or for some slots of it."""
    if slots is None:
        found = geometry.fragments
    else:
        found = tuple(run.piece for run in geometry.slot_runs(slots.start, slots.stop))
    return [(piece.offset + block * piece.block_stride, piece.nbytes) for piece in found]


def touched(of: Cache, block: int, slots: range) -> list[int]:
    """Bytes of memory that hold these slots, over all layers, by writing through vLLM's tensors."""
    of.raw.zero_()
    for layer in of.tensors:
        for row in of.rows(layer, block, slots):
            row.view(torch.uint8).fill_(255)
    return of.raw.nonzero().flatten().tolist()


BY_TOKEN = {
    "FlashAttention": ("FLASH_ATTN", "full", {}),
    "one head": ("FLASHINFER", "full", {"num_kv_heads": 1, "head_size": 16}),
    "fp8": ("FLASHINFER", "full", {"dtype": torch.uint8}),
    "K wider than V": ("TRITON_ATTN_DIFFKV", "full", {"head_size_v": 4}),
    "Triton": ("TRITON_ATTN", "full", {"num_kv_heads": 3}),
    "Flex": ("FLEX_ATTENTION", "full", {"dtype": torch.float32}),
    "planes of K and V": ("B12X", "full", {"block_size": 64}),
    "MLA": ("FLASHMLA", "mla", {}),
    "sparse MLA": ("FLASHMLA_SPARSE", "mla", {}),
    "fp8 MLA": ("FLASHINFER_MLA_SPARSE", "mla", {"dtype": torch.uint8}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", BY_TOKEN)
def test_a_token_s_bytes_are_the_ones_that_vllm_s_tensor_has_for_it(what: str, layout: str) -> None:
    """In every order of axes that vLLM knows, a tail of a few tokens is shipped as exactly their KV."""
    of, kind, changes = BY_TOKEN[what]
    made = alike(of, spec(kind, **changes), layout)
    geometry = made.geometry()
    assert geometry.slot_axis_known
    block_size = geometry.block_size
    for block, slots in ((1, range(3, 4)), (2, range(block_size)), (0, range(5, block_size - 2))):
        found = [n for start, count in pieces(geometry, block, slots) for n in range(start, start + count)]
        assert sorted(found) == touched(made, block, slots)
    whole = [n for start, count in pieces(geometry, 1, None) for n in range(start, start + count)]
    assert sorted(whole) == touched(made, 1, range(block_size))


SPLIT = {
    "NHD": ("FLASHINFER", "full", {"block_size": 64}, "LBNHC", 16, True),
    "one slot a kernel block": ("FLASHINFER", "full", {"block_size": 4}, "LBHNC", 1, True),
    "MLA": ("FLASHMLA", "mla", {"block_size": 256}, "LBHNC", 64, True),
    # The next kernel block's slots begin behind the last head: two steps from slot to slot.
    "HND": ("FLASHINFER", "full", {"block_size": 64}, "LBHNC", 16, False),
    "an indexer": ("DEEPSEEK_V32_INDEXER", "indexer", {"block_size": 128}, "LBNHC", 64, False),
}


@pytest.mark.parametrize("what", SPLIT)
def test_several_kernel_blocks_are_one_block_of_the_manager(what: str) -> None:
    """vLLM's block ids count manager blocks; its kernels may read them in smaller ones."""
    of, kind, changes, layout, kernel_block, known = SPLIT[what]
    made = alike(of, spec(kind, **changes), layout, kernel_block)
    geometry = made.geometry()
    assert geometry.num_blocks == BLOCKS and geometry.slot_axis_known is known
    block_size = geometry.block_size
    for slots in [range(kernel_block - 1, min(kernel_block + 2, block_size))] * known + [None]:
        found = [n for start, count in pieces(geometry, 2, slots) for n in range(start, start + count)]
        assert sorted(found) == touched(made, 2, slots or range(block_size))


@pytest.mark.parametrize(
    "what", [("CPU_ATTN", "full"), ("DEEPSEEK_V32_INDEXER", "indexer"), ("FLASHMLA_SPARSE", "packed")]
)
def test_blocks_that_a_kernel_fills_in_its_own_order_are_shipped_whole(what: tuple[str, str]) -> None:
    """A slot of the tensor is not a token there: tails are found by comparing, never by address."""
    of, kind = what
    made = alike(of, spec(kind), "LBHNC")
    geometry = made.geometry()
    assert not geometry.slot_axis_known
    whole = [n for start, count in pieces(geometry, 1, None) for n in range(start, start + count)]
    assert sorted(whole) == touched(made, 1, range(geometry.block_size))


def test_mla_and_its_indexer_are_one_block() -> None:
    """Layers of two sizes in one group, packed or apart: all of a token's KV, in the model's order."""
    layers = {
        "0.attn": ("FLASHMLA_SPARSE", spec("packed")),
        "0.index": ("DEEPSEEK_V32_INDEXER", spec("indexer")),
    }
    layers |= {"1.attn": layers["0.attn"], "1.index": layers["0.index"]}
    digests = set()
    for layout in ("LBNHC", "BLHNC"):
        made = cache(layout, layers)
        geometry = made.geometry()
        digests.add(geometry.digest)
        whole = [n for start, count in pieces(geometry, 1, None) for n in range(start, start + count)]
        assert sorted(whole) == touched(made, 1, range(geometry.block_size))
    assert len(digests) == 1


def test_engines_exchange_blocks_exactly_if_a_block_means_the_same_bytes() -> None:
    """Equal digests: what one engine packs, another unpacks to the same KV, however it lays out its own."""
    ways = [(layout, None) for layout in LAYOUTS] + [("LBNHC", 4), ("LBHNC", 4)]
    made = {way: alike("FLASH_ATTN", spec("full"), *way) for way in ways}
    for number, each in enumerate(made.values()):
        each.raw.copy_(torch.randint(256, each.raw.shape, generator=torch.Generator().manual_seed(number)))
    digests = {way: each.geometry().digest for way, each in made.items()}
    interior = lambda way: (way[0].index("H") < way[0].index("N"), way == ("LBHNC", 4))  # noqa: E731
    for one, other in combinations(ways, 2):
        assert (digests[one] == digests[other]) is (interior(one) == interior(other)), (one, other)
        if digests[one] == digests[other]:
            hand_over(made[one], made[other])


def test_what_a_kernel_orders_by_its_own_blocks_goes_to_kernels_with_blocks_of_that_size() -> None:
    """An indexer's scales lie behind the values of each kernel block: another split is another order."""

    def digest(of: str, kind: str, kernel_block: int | None) -> bytes:
        return alike(of, spec(kind, block_size=128), "LBNHC", kernel_block).geometry().digest

    indexer = {digest("DEEPSEEK_V32_INDEXER", "indexer", size) for size in (32, 64, None)}
    assert len(indexer) == 3
    # A row of packed MLA is a token's, whatever the blocks.
    assert len({digest("FLASHMLA_SPARSE", "packed", size) for size in (64, None)}) == 1


def hand_over(one: Cache, other: Cache) -> None:
    """Block 1 of `one` into block 2 of `other`, by the bytes as shipped; then the KV must be the same."""
    packed = b"".join(bytes(one.raw[at : at + n].tolist()) for at, n in pieces(one.geometry(), 1, None))
    taken = 0
    for at, n in pieces(other.geometry(), 2, None):
        other.raw[at : at + n] = torch.tensor(list(packed[taken : taken + n]), dtype=torch.uint8)
        taken += n
    for layer in one.tensors:
        slots = range(one.geometry().block_size)
        pairs = zip(one.rows(layer, 1, slots), other.rows(layer, 2, slots), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_layers_packed_into_a_block_are_one_piece() -> None:
    """With all layers side by side, a block is copied as one stretch, not as one for each layer."""
    assert len(alike("FLASH_ATTN", spec("full"), "BLNHC").geometry().fragments) == 1
    assert len(alike("FLASH_ATTN", spec("full"), "LBNHC").geometry().fragments) == LAYERS


def test_a_layer_that_uses_another_s_cache_is_no_layer_of_its_own() -> None:
    """Shared caches come under two names; a tensor of unknown meaning beside them is refused."""
    made = alike("FLASH_ATTN", spec("full"), "LBNHC")
    shared = made._replace(tensors=made.tensors | {"shared": made.tensors["layer.0"]})
    assert shared.geometry() == made.geometry()
    with pytest.raises(GeometryError, match="in no group"):
        made._replace(tensors=made.tensors | {"odd": made.tensors["layer.0"][:1]}).geometry()


WRONG = {
    "another backend": (lambda t: t, "TURBOQUANT", "attention backend TURBOQUANT"),
    "two axes swapped": (lambda t: t.transpose(1, 2), "FLASH_ATTN", "kernel blocks of"),
    "a copy in another order": (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "FLASH_ATTN",
        "strides",
    ),
    "elsewhere": (lambda t: t.as_strided(t.shape, t.stride(), 1), "FLASH_ATTN", "from byte 2"),
    "five axes": (lambda t: t.unsqueeze(0), "FLASH_ATTN", "not \\[blocks"),
    "a list": (lambda t: [t], "FLASH_ATTN", "a list"),
    "fewer heads": (lambda t: t[:, :1], "FLASH_ATTN", "1 heads"),
    "fewer blocks": (lambda t: t[:2], "FLASH_ATTN", "2 kernel blocks"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_where_vllm_says_is_refused(what: str) -> None:
    """A later vLLM that lays things out in another way costs protection, never a wrong answer."""
    change, of, reason = WRONG[what]
    made = alike("FLASH_ATTN", spec("full"), "LBHNC")
    contexts = made.config.compilation_config.static_forward_context
    contexts["layer.0"] = SimpleNamespace(get_attn_backend=lambda: backend(of))
    tensors = made.tensors | {"layer.0": change(made.tensors["layer.0"])}
    with pytest.raises(GeometryError, match=reason):
        made._replace(tensors=tensors).geometry()


def test_caches_that_are_more_than_values_of_tokens_are_refused() -> None:
    """Scales beside the values, states of several tokens, windows, several groups: each with its reason."""
    from vllm.v1.kv_cache_interface import KVQuantMode, SlidingWindowSpec

    from segue_shim.vllm_caches import refusal

    def reason(wanted: Any, groups: int = 1, **config: Any) -> str:
        group = SimpleNamespace(kv_cache_spec=wanted, layer_names=["layer"], host_resident=False)
        zeroing = {"needs_kv_cache_zeroing": True}
        caches: Any = SimpleNamespace(kv_cache_groups=[group] * groups, **zeroing)
        runner: Any = SimpleNamespace(**{"use_v2_model_runner": False} | config)
        return refusal(runner, caches)

    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=8
    )
    assert reason(spec("full")) == reason(spec("packed")) == ""
    assert "FP8_PER_TOKEN_HEAD keeps scales" in reason(
        spec("full", kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    )
    assert "for 4 tokens" in reason(replace(spec("mla"), tokens_per_state=4))
    assert "SlidingWindowSpec" in reason(window)
    assert "2 KV cache groups" in reason(spec("full"), groups=2)
    assert "V2 model runner clears" in reason(spec("full"), use_v2_model_runner=True)

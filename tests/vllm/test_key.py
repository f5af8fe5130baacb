"""What the KV of a request depends on beyond its token ids, with vLLM's own objects: nothing that vLLM keeps
apart in its prefix cache is taken for the same here, and what cannot be told apart is not replicated."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

IDS = list(range(40))
SEGUE = {"segue": {"seq": "s", "epoch": 1}}
ADAPTERS = (None, ("tone", "/adapters/1"), ("tone", "/adapters/2"), ("t", "one/adapters/1"))


def request(**changes: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": SEGUE})
    return Request(
        "r", **({"prompt_token_ids": IDS, "pooling_params": None} | changes), sampling_params=parameters
    )


def adapted(adapter: tuple[str, str] | None, cache_salt: str | None) -> Any:
    from vllm.lora.request import LoRARequest

    lora = None if adapter is None else LoRARequest(adapter[0], 1, adapter[1])
    return request(lora_request=lora, cache_salt=cache_salt)


def image() -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", "hash-of-it", PlaceholderRange(offset=2, length=8))


def test_whatever_vllm_keeps_apart_has_keys_of_its_own() -> None:
    """Cache salt, and name and path of the adapter: equal keys exactly where vLLM itself shares blocks."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    from segue_core.content_key import root_key
    from segue_shim.vllm_compat import protectable, salt

    requests = [adapted(*each) for each in product(ADAPTERS, (None, "tenant-1", "tenant-2"))]
    assert all(protectable(each) is not None for each in requests)
    for one, other in product(requests, repeat=2):
        theirs = [generate_block_hash_extra_keys(each, 0, 32, 0)[0] for each in (one, other)]
        ours = [root_key(b"fingerprint", salt(each)) for each in (one, other)]
        assert (ours[0] == ours[1]) == (theirs[0] == theirs[1])


def test_an_adapter_with_other_weights_at_the_same_place_is_another_one(tmp_path: Path) -> None:
    """Replicas outlive the engine that wrote them, and other hosts have files of their own. vLLM counts an
    adapter anew when it is loaded anew; in place it keeps what its prefix cache has, and so do we."""
    from vllm.lora.request import LoRARequest

    from segue_shim.vllm_compat import salt

    def key(number: int) -> bytes:
        return salt(request(lora_request=LoRARequest("tone", number, str(tmp_path)), cache_salt=None))

    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old" * 1000)
    old = key(101)
    weights.write_bytes(b"new" * 1000)
    assert key(101) == old
    assert key(102) != old
    weights.write_bytes(b"old" * 1000)
    assert key(103) == old, "wherever it is the same, KV can be exchanged"


@pytest.mark.parametrize("what", ["image", "embeddings"])
def test_what_token_ids_do_not_tell_is_not_replicated(what: str) -> None:
    """Images and embeddings: vLLM keys them by their content, which the ids do not show; so they run on
    unprotected, and never find another one's KV."""
    import torch
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    from segue_shim.vllm_compat import protectable

    if what == "image":
        asked = request(mm_features=[image()])
    else:
        asked = request(prompt_token_ids=None, prompt_embeds=torch.zeros(40, 4))
    assert generate_block_hash_extra_keys(asked, 0, 32, 0)[0], "vLLM sees more than the ids"
    assert protectable(asked) is None
    assert protectable(request()) is not None

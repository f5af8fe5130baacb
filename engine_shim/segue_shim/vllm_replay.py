"""Puts delivered token ids into vLLM's own output messages (0.32): builds new ones, knows no request.

Log probabilities of delivered ids were not kept: their rows hold the id with log probability 0 and rank 1,
for whoever drops them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists


def pad(output: EngineCoreOutput, ids: Sequence[int], *, logprobs: bool) -> EngineCoreOutput:
    """`output` with `ids` in front of its own tokens. `logprobs`: the request wants them."""
    return msgspec.structs.replace(
        output,
        new_token_ids=[*ids, *output.new_token_ids],
        new_logprobs=_rows(ids, output.new_logprobs) if logprobs else output.new_logprobs,
    )


def pieces(output: EngineCoreOutput, ids: Sequence[int], *, logprobs: bool) -> list[EngineCoreOutput]:
    """One output for each of `ids`, which are not empty, then `output`. What is said once, the first says."""
    first = msgspec.structs.replace(
        output,
        new_token_ids=[ids[0]],
        new_logprobs=_rows(ids[:1], None) if logprobs else None,
        finish_reason=None,
        stop_reason=None,
        kv_transfer_params=None,
        ec_transfer_params=None,
        routed_experts=None,
        new_sampling_mask=None,
        spec_decode_metrics=None,
    )
    others = [
        EngineCoreOutput(
            request_id=output.request_id,
            new_token_ids=[token],
            new_logprobs=_rows([token], None) if logprobs else None,
        )
        for token in ids[1:]
    ]
    last = msgspec.structs.replace(
        output,
        new_prompt_logprobs_tensors=None,
        prompt_token_id_logprobs=None,
        events=None,
        prefill_stats=None,
    )
    return [first, *others, last]


def _rows(ids: Sequence[int], own: LogprobsLists | None) -> LogprobsLists:
    """Rows for `ids`, as wide as the `own` ones that follow: (tokens, 1 + alternatives)."""
    width = own.logprob_token_ids.shape[1] if own is not None else 1
    tokens = np.repeat(np.asarray(ids, dtype=np.int64)[:, None], width, axis=1)
    values = np.zeros((len(ids), width), dtype=np.float32)
    ranks = np.ones(len(ids), dtype=np.int64)
    if own is None:
        return LogprobsLists(tokens, values, ranks)
    return LogprobsLists(
        np.concatenate([tokens, own.logprob_token_ids]),
        np.concatenate([values, own.logprobs]),
        np.concatenate([ranks, own.sampled_token_ranks]),
    )

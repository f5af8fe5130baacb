"""A vLLM engine in this process, driven step by step, and requests that carry Segue's parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any


def make_engine(model: str, socket: str, **arguments: Any) -> Any:
    """An `LLM` with the connector. `dtype` float32: recomputing does not change its greedy tokens."""
    from vllm.config import KVTransferConfig

    from vllm import LLM

    arguments = {"extra": {}, "distributed_executor_backend": "uni"} | arguments
    extra = {"socket": socket, "engine": "a"} | arguments.pop("extra")
    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SegueConnector",
            kv_connector_module_path="segue_shim.vllm_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        **(
            {"max_model_len": 512, "seed": 0, "disable_log_stats": True, "gpu_memory_utilization": 0.1}
            | arguments
        ),
    )


def prompt(seed: int, length: int) -> list[int]:
    """Token ids without the special ones."""
    chosen = random.Random(seed)
    return [chosen.randrange(2, 2048) for _ in range(length)]


class Driver:
    """Adds requests and steps the engine; `outputs[request]` are the ids so far."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def add(self, request: str, token_ids: list[int], max_tokens: int, n: int = 1, **segue: Any) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"segue": segue}} if segue else None
        parameters = SamplingParams(
            temperature=0.0 if n == 1 else 1.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra, n=n
        )
        self.engine.add_request(request, {"prompt_token_ids": list(token_ids)}, parameters)

    def abort(self, request: str) -> None:
        self.engine.abort_request([request])

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens or 0

    def run(self, each_step: Callable[[], Any] = lambda: None, steps: int = 10_000) -> int:
        """Until all requests are done, or for so many steps; returns the steps made."""
        for made in range(steps):
            if not self.engine.has_unfinished_requests():
                return made
            self.step()
            each_step()
        return steps

    def generate(self, token_ids: list[int], max_tokens: int, **segue: Any) -> list[int]:
        """One request from beginning to end."""
        name = f"request-{len(self.outputs)}-{random.random()}"
        self.add(name, token_ids, max_tokens, **segue)
        self.run()
        return self.outputs[name]

"""An engine on one GPU is killed, and one on another goes on with what it had: the steps of such tests."""

from __future__ import annotations

from support.cuda_process import CudaProcess
from support.daemons import DaemonSet
from support.waiting import wait_for


def replicated(daemons: DaemonSet, first: CudaProcess, ids: list[int], tokens: int) -> None:
    """Engines joined daemons a and b: the first computes so many tokens, and all of them are at b."""
    for name in "ab":
        wait_for(daemons[name].protects, f"engine {name} is registered")
    first.call("run", ids, tokens)
    wait_for(lambda: daemons["b"].watermark("s") == tokens, "all is at the peer")

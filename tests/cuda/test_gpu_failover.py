"""From GPU to GPU: an engine's KV goes through two real daemons into another engine's pages, on the
double."""

from __future__ import annotations

from pathlib import Path

from conformance.pages_engine import BLOCK_SIZE, content
from support.cuda_failover import replicated
from support.cuda_process import CudaProcess
from support.daemons import DaemonSet

ENGINE = Path(__file__).parent / "gpu_engine.py"
IDS = list(range(100, 115))
TOKENS = 14
"""Three whole blocks and half a tail."""


def test_what_a_killed_engine_had_on_its_gpu_is_on_the_standby_s(
    daemons: DaemonSet, library_folder: Path
) -> None:
    """The standby goes on from the last token that the dead engine's GPU had completed, without computing it
    again."""
    first, standby = (CudaProcess(library_folder, ENGINE) for _ in "ab")
    try:
        daemons.start()
        assert first.call("join", daemons["a"].socket, "a", 1, "cuda_vmm")
        assert standby.call("join", daemons["b"].socket, "b", 2, "cuda_ipc")
        replicated(daemons, first, IDS, TOKENS)
        first.kill()
        assert standby.call("take_over", IDS, [8, 9, 10, 11]) == TOKENS
        for number in range(3):
            assert standby.call("block", 8 + number) == content()[:, number].tobytes()
        tail = content()[:, 3, : TOKENS % BLOCK_SIZE]
        loaded = standby.call("block", 11)
        layer = len(loaded) // len(tail)
        assert [loaded[at : at + tail[0].nbytes] for at in range(0, len(loaded), layer)] == [
            part.tobytes() for part in tail
        ]
    finally:
        first.kill()
        standby.kill()

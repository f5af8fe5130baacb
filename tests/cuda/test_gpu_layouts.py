"""vLLM's layouts from GPU to GPU, on the double: packed into blocks on one engine, layer by layer on the
other."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.pages_engine import BLOCK_SIZE
from support.cuda_failover import replicated
from support.cuda_process import CudaProcess
from support.daemons import DaemonSet

ENGINE = Path(__file__).parent / "layout_engine.py"
IDS = list(range(100, 115))
TOKENS = 14
"""Three whole blocks and half a tail."""


@pytest.mark.parametrize(("first_has", "standby_has"), [("LBNHC", "BLNHC"), ("BLHNC", "LHBNC")])
def test_an_engine_goes_on_from_one_whose_memory_is_laid_out_differently(
    daemons: DaemonSet, library_folder: Path, first_has: str, standby_has: str
) -> None:
    """NHD and HND: a block means the same bytes wherever layers lie, and a tail is its tokens' bytes."""
    first, standby = (CudaProcess(library_folder, ENGINE) for _ in "ab")
    try:
        daemons.start()
        assert first.call("join", daemons["a"].socket, "a", 1, first_has, True) == [True, True]
        assert standby.call("join", daemons["b"].socket, "b", 2, standby_has, False) == [True, True]
        replicated(daemons, first, IDS, TOKENS)
        first.kill()
        assert standby.call("take_over", IDS, [8, 9, 10, 11]) == TOKENS
        for number in range(4):
            last = min(BLOCK_SIZE, TOKENS - number * BLOCK_SIZE)
            wanted = standby.call("computed", number, 0, last)
            assert standby.call("slots", 8 + number, 0, last) == wanted
    finally:
        first.kill()
        standby.kill()

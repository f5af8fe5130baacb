"""An engine on the driver's double, run in a child, whose KV lies in GPU memory as vLLM (0.32) has it."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from conformance import pages_engine
from conformance.pages_engine import BLOCK_SIZE, BLOCKS, LAYERS, OFFSET, WIDTH, state

sys.path.insert(0, str(Path(__file__).parent))

from gpu_engine import run, take_over  # noqa: F401 - called by name

HEADS = 2
CONTENT = WIDTH // HEADS
LENGTHS = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": BLOCK_SIZE, "C": CONTENT}


def kv() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the engine has computed: bytes [layers, blocks, heads, slots, content], vLLM's logical order."""
    shape = tuple(LENGTHS.values())
    return np.random.default_rng(11).integers(0, 256, shape, dtype=np.uint8)


def join(socket: str, name: str, incarnation: int, layout: str, filled: bool) -> list[bool]:
    """Register with the daemon at `socket`: [accepted?, is a token's place known?]. `layout`: vLLM's word."""
    from cuda.bindings import driver

    from segue_shim.cuda_driver import CudaDriver
    from segue_shim.cuda_export import DeviceTensor
    from segue_shim.cuda_side import CudaSide
    from segue_shim.exporter import Exporter
    from segue_shim.match_client import MatchClient
    from segue_shim.vllm_layout import LayerFacts, named_view

    cuda = CudaDriver()
    cuda.call("cuInit", 0)
    cuda.enter(cuda.primary_context(0))
    stream = cuda.create_stream()
    start = pages_engine.allocate("cuda_ipc", driver) + OFFSET
    # The tensor's axes in memory order, and back.
    memory = np.ascontiguousarray(kv().transpose([list(LENGTHS).index(axis) for axis in layout]))
    if not filled:
        memory[:] = 0
    pages_engine.checked(driver.cuMemcpyHtoD(start, memory.ctypes.data, memory.nbytes))
    steps = {axis: prod(LENGTHS[inner] for inner in layout[at + 1 :]) for at, axis in enumerate(layout)}
    shape, strides = (tuple(of[axis] for axis in "BHNC") for of in (LENGTHS, steps))
    tensors, axes = [], {}
    for layer in range(LAYERS):
        at = layer * steps["L"]
        facts = LayerFacts(
            f"layer.{layer}", "FLASHINFER", "", shape, strides, at, 1, HEADS, CONTENT, strides, at
        )
        view = named_view(facts, num_blocks=BLOCKS, block_size=BLOCK_SIZE)
        tensors.append(DeviceTensor(facts.name, start + at, view.shape, view.strides, 1))
        axes[facts.name] = view.axes
    sizes = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE}
    side = CudaSide(tensors, device=0, stream=lambda: stream, axes=axes, **sizes)
    whose = {"engine": name, "incarnation": incarnation, "fingerprint": b"f" * 16}
    exporter = Exporter(socket, model="m", **whose)
    client = MatchClient(socket, block_size=BLOCK_SIZE, **whose)
    state.update(exporter=exporter, client=client, start=start, layout=layout)
    return [exporter.register_gpu(side), side.geometry.slot_axis_known]


def computed(block: int, first: int, last: int) -> bytes:
    """What an engine that is filled has there: bytes of [layers, heads, slots, content]."""
    return kv()[:, block, :, first:last].tobytes()


def slots(block: int, first: int, last: int) -> bytes:
    """What the GPU holds there now, in the same order."""
    from cuda.bindings import driver

    layout = state["layout"]
    memory = np.empty([LENGTHS[axis] for axis in layout], np.uint8)
    pages_engine.checked(driver.cuMemcpyDtoH(memory.ctypes.data, state["start"], memory.nbytes))
    logical = memory.transpose([layout.index(axis) for axis in LENGTHS])
    return logical[:, block, :, first:last].tobytes()

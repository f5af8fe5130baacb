"""An engine's KV tensors as torch's caching allocator makes them, run in a child that has torch with CUDA."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from gpu.shapes import AXES, REGIONS, SEED, Shape
from segue_shim.cuda_tensors import cuda_side
from support.cuda_process import WithDescriptors

held: list[Any] = []


def export(slots: int, slot_bytes: int, blocks: int) -> WithDescriptors:
    """A tensor a region, with others of the engine between them: an encoded geometry and its descriptors."""
    shape = Shape(slots, slot_bytes, blocks)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(REGIONS):
        data = torch.from_numpy(shape.region(number, SEED))
        tensors[f"region.{number}"] = data.to("cuda")
        held.append(torch.empty(3 << 20, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    side = cuda_side(tensors, num_blocks=blocks, block_size=slots, axes=AXES)
    held.extend([tensors, side])
    return WithDescriptors(msgspec.msgpack.encode(side.geometry), list(side.memory_fds))


def kinds() -> list[Any]:
    """[kinds of the handles, allocations in all of them] of what was exported."""
    side = held[-1]
    handles = side.geometry.handles
    return [sorted({handle.kind for handle in handles}), sum(len(handle.pieces) for handle in handles)]

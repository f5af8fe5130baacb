"""KV tensors of torch on NVIDIA GPUs, as the GPU's side of the shim wants them: addresses, bytes, a
stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from segue_core.errors import GeometryError
from segue_shim.cuda_export import DeviceTensor
from segue_shim.cuda_side import CudaSide
from segue_shim.regions import Axes


def on_gpu(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether this is a KV cache on NVIDIA GPUs."""
    return bool(tensors) and all(
        isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" for tensor in tensors.values()
    )


def cuda_side(
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_size: int,
    axes: Axes = None,
) -> CudaSide:
    """The side of an engine whose KV tensors these are. Raises GeometryError."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise GeometryError(f"the KV cache of this rank lies on {len(devices)} GPUs: one is supported")
    device = devices.pop()
    index = device.index if device.index is not None else torch.cuda.current_device()
    return CudaSide(
        [device_tensor(name, tensor) for name, tensor in tensors.items()],
        device=index,
        stream=lambda: int(torch.cuda.current_stream(index).cuda_stream),
        num_blocks=num_blocks,
        block_size=block_size,
        axes=axes,
    )


def device_tensor(name: str, tensor: torch.Tensor) -> DeviceTensor:
    """Where a tensor is. Raises GeometryError unless it is an ordinary one."""
    if tensor.layout != torch.strided:
        raise GeometryError(f"{name}: tensor layout {tensor.layout}")
    itemsize = tensor.element_size()
    strides = tuple(stride * itemsize for stride in tensor.stride())
    return DeviceTensor(name, tensor.data_ptr(), tuple(tensor.shape), strides, itemsize)

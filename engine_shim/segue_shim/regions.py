"""The region of one KV tensor, from its layout in bytes. Pure: knows no torch and no memory."""

from __future__ import annotations

from collections.abc import Mapping

from segue_core.errors import GeometryError
from segue_core.geometry import Region

Axes = tuple[str, ...] | Mapping[str, tuple[str, ...]] | None
"""Names of a tensor's axes, of all tensors or by the tensor's name; None: see `region_of`."""


def region_of(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    handle: int,
    offset: int,
    num_blocks: int,
    axes: Axes,
) -> Region:
    """The region of a tensor that begins `offset` bytes into its handle; `strides` are in bytes.

    `axes` None: the block axis is found by its length, and nothing is claimed about the others. Raises
    GeometryError.
    """
    if isinstance(axes, Mapping):
        axes = axes[name]
    if axes is None:
        found = [index for index, length in enumerate(shape) if length == num_blocks]
        if len(found) != 1:
            raise GeometryError(f"{name}: shape {shape}: no single axis of {num_blocks} blocks")
        axes = tuple("block" if index == found[0] else "opaque" for index in range(len(shape)))
    if len(axes) != len(shape) or shape[axes.index("block")] != num_blocks:
        raise GeometryError(f"{name}: shape {shape} is not {axes} with {num_blocks} blocks")
    return Region(
        handle=handle,
        offset=offset,
        shape=shape,
        strides=strides,
        itemsize=itemsize,
        axes=axes,
    )

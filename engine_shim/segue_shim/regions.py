"""The region of one KV tensor, from its layout in bytes. Pure: knows no torch and no memory."""

from __future__ import annotations

from segue_core.errors import GeometryError
from segue_core.geometry import Region


def region_of(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    handle: int,
    offset: int,
    num_blocks: int,
    axes: tuple[str, ...] | None,
) -> Region:
    """The region of a tensor that begins `offset` bytes into its handle; `strides` are in bytes.

    `axes` None: the block axis is found by its length, and nothing is claimed about the others. Raises
    GeometryError.
    """
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

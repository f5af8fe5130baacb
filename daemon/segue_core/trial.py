"""The memory that one process shares with another to find out whether a machine lets it (`seguectl doctor`).

Both ends know its shape and every byte of it. Never holds anything of users. Invariant: no two blocks of it
are alike, so bytes from the wrong place are noticed.
"""

from __future__ import annotations

import random

import msgspec

from segue_core.geometry import Geometry

BLOCKS, SLOTS, SLOT_BYTES = 32, 4, 32 << 10
TRIAL_BYTES = BLOCKS * SLOTS * SLOT_BYTES
REGION_AXES = ("block", "slot", "dim")
MARKED_STEP = 7
"""What the GPU writes into the timeline behind the export."""
SEED = 20_011


class Offer(msgspec.Struct, frozen=True):
    """What is shared; with it come the timeline's descriptor and then those of the memory."""

    geometry: Geometry


def tensor_shape() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shape and strides in bytes of the one tensor."""
    return (BLOCKS, SLOTS, SLOT_BYTES), (SLOTS * SLOT_BYTES, SLOT_BYTES, 1)


def content() -> bytes:
    """What it holds."""
    return random.Random(SEED).randbytes(TRIAL_BYTES)  # noqa: S311 - a pattern, not a secret

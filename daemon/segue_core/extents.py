"""Where a block of a replica lies: in the daemon's arena, or as a copy in its GPU memory (the tier).

An extent is a u64 on the local channel. One below 2^63 is an offset into the arena. Above, the bits below the
highest are the number of a tier (19 bits) and an offset into it (44 bits). A tier is opened for one
registration of an engine and never again under its number: an extent of an earlier one is recognised, and
not read. Pure.
"""

from __future__ import annotations

TIER_BIT = 1 << 63
OFFSET_BITS = 44
MAX_TIERS = 1 << 19


def in_tier(tier: int, offset: int) -> int:
    """The extent at `offset` of tier number `tier`."""
    assert 0 <= tier < MAX_TIERS and 0 <= offset < 1 << OFFSET_BITS, "not an extent"
    return TIER_BIT | tier << OFFSET_BITS | offset


def is_in_tier(extent: int) -> bool:
    """Whether it is in GPU memory of the daemon, and not in the arena."""
    return extent >= TIER_BIT


def tier_of(extent: int) -> tuple[int, int]:
    """(number of the tier, offset into it) of an extent that is in one."""
    low = extent & ~TIER_BIT
    return low >> OFFSET_BITS, low & ((1 << OFFSET_BITS) - 1)

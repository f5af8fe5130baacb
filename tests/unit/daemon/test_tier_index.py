"""What is copied to a GPU tier, and where blocks are loaded from."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.extents import MAX_TIERS, in_tier, is_in_tier, tier_of
from segue_daemon.blocks import Block
from segue_daemon.tier_index import ALIGNMENT, Slot, TierIndex

SLOTS, BYTES = 3, ALIGNMENT
Action = tuple[str, int]


def sealed(number: int) -> Block:
    return Block(0, BYTES, key=b"%d" % number)


@given(
    st.lists(
        st.tuples(st.sampled_from(("wanted", "gone", "copy", "fail", "find")), st.integers(0, 6)), max_size=60
    )
)
@settings(max_examples=200, deadline=None)
def test_an_engine_finds_only_what_it_asks_for_and_nobody_writes_there(actions: list[Action]) -> None:
    """Whatever comes and goes: a copy that is found is of that block, and stays until the lease is over."""
    index = TierIndex(SLOTS * BYTES, BYTES)
    content: dict[int, bytes] = {}
    leased: dict[int, tuple[int, bytes]] = {}
    blocks = [sealed(number) for number in range(7)]
    for now, (action, number) in enumerate(actions):
        block = blocks[number]
        if action == "wanted":
            index.wanted(block)
        elif action == "gone":
            index.gone(block.key)
            block.key = b""
            blocks[number] = sealed(number)
        elif action == "find":
            offset = index.find(block, now + 5)
            if offset is not None:
                assert content[offset] == block.key
                leased[offset] = now + 5, block.key
        elif (found := index.next(now)) is not None:
            key, which, slot = found
            until, _ = leased.get(slot.offset, (0, b""))
            assert until <= now, "an engine may still be loading from there"
            assert slot.offset % ALIGNMENT == 0 and slot.offset + BYTES <= SLOTS * BYTES
            content[slot.offset] = key if action == "copy" else b"torn"
            if action == "copy":
                index.made(key, which, slot)
            else:
                index.failed(slot)
        assert len(index) <= SLOTS
        for offset, (until, key) in leased.items():
            assert until <= now or content[offset] == key


def fill(index: TierIndex, blocks: list[Block], now_ns: int = 0) -> list[Slot]:
    """Copy all that waits."""
    slots = []
    for block in blocks:
        index.wanted(block)
    while (found := index.next(now_ns)) is not None:
        index.made(*found)
        slots.append(found[2])
    return slots


def test_what_was_wanted_longest_ago_makes_room() -> None:
    """A system prompt that every conversation shares stays, the rest of an idle one goes."""
    index = TierIndex(SLOTS * BYTES, BYTES)
    prompt, old, new, newest = map(sealed, range(4))
    fill(index, [prompt, old, new])
    index.wanted(prompt)
    fill(index, [newest])
    assert [index.find(block, 1) is not None for block in (prompt, old, new, newest)] == [1, 0, 1, 1]


def test_a_tier_that_is_all_on_loan_waits() -> None:
    """Nothing is copied over what engines load from; it is once their leases are over."""
    index = TierIndex(SLOTS * BYTES, BYTES)
    blocks = [sealed(number) for number in range(SLOTS)]
    fill(index, blocks)
    for block in blocks:
        index.find(block, 10)
    index.gone(blocks[0].key)
    assert fill(index, [sealed(9)], 9) == [] and index.waits
    assert len(fill(index, [], 10)) == 1 and not index.waits


def test_a_block_that_went_while_it_was_copied_is_not_found() -> None:
    """Its bytes in the arena may be another's by then."""
    index = TierIndex(SLOTS * BYTES, BYTES)
    block = sealed(1)
    index.wanted(block)
    found = index.next(0)
    assert found is not None
    index.gone(block.key)
    block.key = b""
    index.made(*found)
    assert len(index) == 0 and index.find(sealed(1), 1) is None


def test_no_more_waits_than_there_is_room_for() -> None:
    """A flood of blocks costs bounded memory; blocks of another shape are none of its business."""
    index = TierIndex(SLOTS * BYTES, BYTES)
    assert len(fill(index, [sealed(number) for number in range(100)])) == SLOTS
    index.wanted(Block(0, BYTES // 2, key=b"small"))
    assert not index.waits
    assert fill(TierIndex(BYTES - 1, BYTES), [sealed(1)]) == []


@given(st.integers(0, MAX_TIERS - 1), st.integers(0, (1 << 44) - 1))
def test_an_extent_names_its_tier(tier: int, offset: int) -> None:
    """No offset into an arena looks like one into a tier, and it fits the local channel."""
    extent = in_tier(tier, offset)
    assert is_in_tier(extent) and tier_of(extent) == (tier, offset) and extent < 1 << 64
    assert not is_in_tier((1 << 46) - 1)

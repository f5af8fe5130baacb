"""What a store can still say of sequences that are over, and that this costs no memory to speak of."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.content_key import KEY_BYTES
from segue_daemon.ended import EndedSequences, Remains

SIZE, BYTES = 16, 100


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def note(ended: EndedSequences, seq: str, *numbers: int, epoch: int = 1) -> None:
    ended.note(seq, map(key, numbers), epoch=epoch, block_size=SIZE, block_bytes=BYTES)


def test_only_what_is_left_from_the_start_counts() -> None:
    """Behind a block that is gone nothing can be found any more."""
    ended = EndedSequences()
    note(ended, "s", 1, 2, 3, 4, epoch=7)
    pool = {key(number) for number in (1, 2, 4)}
    held = lambda name, nbytes: name in pool and nbytes == BYTES  # noqa: E731
    assert ended.remains("s", held) == Remains(7, 2 * SIZE, 2 * BYTES)
    pool.remove(key(1))
    assert ended.remains("s", held) is None
    pool.add(key(1))
    assert ended.remains("s", held) is None, "a record of nothing is not kept"
    assert len(ended) == ended.key_bytes == 0


def test_a_name_that_is_used_again_is_what_it_was_last() -> None:
    """An earlier life of it is forgotten, and a sequence without a full block leaves nothing."""
    ended = EndedSequences()
    note(ended, "s", 1, 2)
    note(ended, "s", 3, epoch=2)
    assert ended.remains("s", lambda name, _: name == key(3)) == Remains(2, SIZE, BYTES)
    note(ended, "s", epoch=3)
    assert ended.remains("s", lambda *_: True) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.booleans()), max_size=60),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_records_stay_within_their_bounds(
    script: list[tuple[int, int, bool]], sequences: int, keys: int
) -> None:
    """However many sequences end and however long they were; the one that ended last is there if it fits."""
    ended = EndedSequences(max_sequences=sequences, max_key_bytes=keys * KEY_BYTES)
    for number, blocks, forget in script:
        note(ended, f"s{number}", *range(blocks))
        assert len(ended) <= sequences and ended.key_bytes <= keys * KEY_BYTES
        left = ended.remains(f"s{number}", lambda *_: True)
        assert (left.tokens if left else 0) == (blocks * SIZE if blocks <= keys else 0)
        if forget:
            ended.forget(f"s{number}")
    assert ended.key_bytes == sum(
        left.nbytes // BYTES * KEY_BYTES
        for n in range(10)
        if (left := ended.remains(f"s{n}", lambda *_: True)) is not None
    )

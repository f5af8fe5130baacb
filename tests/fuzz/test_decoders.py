"""The pure decoders, by property: whatever the bytes, a message that is in bounds or one `ProtocolError`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from segue_core.errors import GeometryError, ProtocolError
from segue_core.framing import decode
from segue_core.geometry import AXES, Geometry, Region
from segue_core.messages.journal import Record
from segue_core.messages.local import ToDaemon
from segue_core.messages.peer import Bulk, Control, Delta, Part, PartKind
from segue_daemon.deltas import apply_patch, malformed, patch_fits
from segue_router.sse import SseSplitter

BLOCK_BYTES = 96
GUARD = 64
integers = st.one_of(st.integers(-2, 300), st.sampled_from([1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]))
leaves = st.one_of(st.none(), st.booleans(), integers, st.binary(max_size=40), st.text(max_size=20))
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=8), max_leaves=20)
tags = st.sampled_from(["B", "C", "register", "match", "hello", "nack", "delta", "end", "bulk"])


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.tuples(tags, trees).map(lambda t: packed([t[0], t[1]]))))
def test_no_decoder_raises_anything_but_a_protocol_error(raw: bytes) -> None:
    """Whatever arrives, its connection is closed with a reason."""
    for kind in (Record, ToDaemon, Control, Bulk):
        try:
            decode(raw, kind, peer="somebody")
        except ProtocolError as error:
            assert "somebody" in str(error)


def packed(tree: Any) -> bytes:
    return msgspec.msgpack.encode(tree)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([PartKind.ITEMS, PartKind.RUNS]),
    st.integers(0, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, (1 << 32) - 1)), max_size=12),
    st.integers(0, 64),
)
def test_a_patch_stays_inside_its_block(
    kind: PartKind, count: int, item_bytes: int, table: list[int], values: int
) -> None:
    """No list of changes reaches a byte before or after its block."""
    payload = np.frombuffer(np.array(table, "<u4").tobytes() + b"\xff" * values, np.uint8)
    part = Part(0, kind, b"", len(payload), count, item_bytes)
    delta = Delta(1, "s", 1, 1, b"f" * 16, b"", 4, BLOCK_BYTES, 1, bytes(4), (part,), 0)
    if malformed(delta) or not patch_fits(part, payload, BLOCK_BYTES):
        return
    memory = np.zeros(GUARD + BLOCK_BYTES + GUARD, np.uint8)
    apply_patch(memory[GUARD : GUARD + BLOCK_BYTES], part, payload)
    assert not memory[:GUARD].any() and not memory[GUARD + BLOCK_BYTES :].any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(AXES), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 8, 64])),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 70),
    st.sampled_from([1, 2, 4]),
)
def test_a_geometry_that_is_taken_names_no_byte_outside(
    axes: list[tuple[str, int, int]], offset: int, itemsize: int
) -> None:
    """Pages are read by it without more checks."""
    names, shape, strides = zip(*axes, strict=True)
    blocks = dict(zip(names, shape, strict=True)).get("block", 1)
    region = Region(0, offset, tuple(shape), tuple(strides), itemsize, tuple(names))
    try:
        geometry = Geometry(blocks, 2, (600,), (region,)).validate()
    except GeometryError:
        return
    assert sum(fragment.nbytes for fragment in geometry.fragments) == geometry.block_bytes
    for fragment in geometry.fragments:
        last = fragment.offset + (geometry.num_blocks - 1) * fragment.block_stride + fragment.nbytes
        assert fragment.offset >= 0 and last <= 600


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([b"data: x", b"data:", b":", b"\n", b"\r\n", b"\n\n", b"event: e", b"y"]), max_size=30
    )
)
def test_an_event_stream_is_the_same_however_it_is_cut(pieces: list[bytes]) -> None:
    """TCP's segments are nobody's business."""
    whole, cut = SseSplitter(1 << 16), SseSplitter(1 << 16)
    stream = b"".join(pieces)
    one_by_one = [payload for at in range(len(stream)) for payload in cut.feed(stream[at : at + 1])]
    assert whole.feed(stream) == one_by_one

"""`seguectl bench replicate` and `bench scale`, small, with real daemons: what they move is verified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from segue_ctl.bench_replicate_shapes import Shape, shapes, slot_index
from segue_ctl.cli import main


@pytest.mark.parametrize("shape", shapes(0), ids=lambda shape: shape.name)
def test_tokens_share_a_block_without_rest(shape: Shape) -> None:
    """Each item of a block is one token's: so what is compared is all there is."""
    geometry = shape.geometry
    items = np.concatenate([slot_index(shape, slot) for slot in range(geometry.block_size)])
    assert np.array_equal(np.sort(items), np.arange(geometry.block_bytes // 2))


def test_tails_are_verified_at_the_peer_and_cost_what_is_new(tmp_path: Path) -> None:
    """A row beside the socket pair's, with every figure that the documentation names; bytes on the wire per
    byte of new KV where a token's bytes lie together, and where they do not."""
    out = tmp_path / "out.json"
    small = ["--mib", "1", "--rounds", "1", "--samples", "4", "--pages-mib", "8", "--json", str(out)]
    assert main(["bench", "replicate", *small, "--shape", "8b-tail", "--only", "socket", "segue"]) == 0
    pair, segue = json.loads(out.read_text())["rows"]
    assert (pair["method"], segue["method"]) == ("socket", "segue")
    assert segue["verified"] is True
    assert 1 <= segue["wire_per_kv"] <= 1.05
    assert all(segue[key] > 0 for key in ("gb_per_s", "p50_us", "p99_us", "ratio_to_socket"))
    assert main(["bench", "replicate", *small, "--shape", "small-tail", "--only", "segue"]) == 0
    (opaque,) = json.loads(out.read_text())["rows"]
    assert opaque["verified"] is True
    assert 1 <= opaque["wire_per_kv"] <= 1.5


def test_a_herd_is_replicated_step_by_step(tmp_path: Path) -> None:
    """A row for each number of live sequences, every token of each step acked."""
    out = tmp_path / "out.json"
    small = ["--live", "20", "--active", "8", "--steps", "2", "--idle-s", "0.1"]
    assert main(["bench", "scale", *small, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["live"], row["active"]) == (20, 8)

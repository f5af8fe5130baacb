"""Journal records: what the engine did, in order.

`Begin` is written before a step may overwrite memory, `Commit` after the step's KV is complete.
Token ids and block ids are packed little-endian u32 arrays.
"""

from __future__ import annotations

import msgspec

from segue_core.messages.request import Replication


class SequenceBegin(msgspec.Struct, frozen=True, array_like=True):
    """A sequence as a whole: new, resumed after preemption, or announced anew.

    `computed` slots of `block_ids` already hold KV of `token_ids`; `salt` is whatever else the KV
    depends on (cache salt, adapter). `replication`: whether peers get it, and how soon beside others.
    """

    seq: str
    epoch: int
    salt: bytes
    token_ids: bytes
    block_ids: bytes
    computed: int
    replication: Replication = "normal"


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Token ids and blocks that a known sequence gained."""

    seq: str
    token_ids: bytes
    block_ids: bytes


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="B"):
    """Step `step` is about to run.

    `reset`: forget every sequence known so far. `assigned`: blocks that this step may overwrite,
    whoever owns them (protected sequence or not). `paused`: sequences that lost their blocks.
    """

    step: int
    reset: bool
    assigned: bytes
    begun: tuple[SequenceBegin, ...]
    updated: tuple[SequenceUpdate, ...]
    paused: tuple[str, ...]
    ended: tuple[str, ...]


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """Step `step` is complete: for each (seq, computed), KV of `computed` slots is in memory."""

    step: int
    computed: tuple[tuple[str, int], ...]


Record = Begin | Commit

"""What the simulated engine knows of a sequence, and what one of its steps does for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue_core.messages.journal import SequenceBegin
from segue_core.messages.request import Replication
from segue_daemon.arena import Bytes
from segue_daemon.replicas import MatchResult
from simulation.content import Writing


@dataclass(eq=False)
class Live:
    """One sequence on the engine. `ids[:told]` went to the journal; `blocks` hold the first `computed`."""

    seq: str
    epoch: int
    salt: bytes
    ids: list[int]
    writing: Writing
    replication: Replication = "normal"
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    told: int = 0
    ready: bool = False
    begun: bool = False
    load: MatchResult | None = None
    arena: Bytes | None = None


@dataclass(eq=False)
class Work:
    """What a step does for one sequence: it is done even if the client hangs up in the middle."""

    live: Live
    blocks: list[int]
    base: int
    upto: int
    load: MatchResult | None


def begin_of(live: Live, token_ids: bytes, block_ids: bytes, computed: int) -> SequenceBegin:
    """As the journal announces it: `computed` slots of the blocks hold KV of the ids, both packed."""
    return SequenceBegin(live.seq, live.epoch, live.salt, token_ids, block_ids, computed, live.replication)

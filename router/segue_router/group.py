"""What the daemons of one engine's ranks say together. Pure: statuses in, one status out, as of one daemon.

Invariant: a token counts only if every rank has it: of the same sequence, under the same epoch, beside an
engine of which all ranks live the same life. Who is missing or disagrees leaves nothing to restore; that an
engine is dead or stands still, one rank is enough to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from segue_core.messages.status import EngineState, EngineStatus, Promoted, SequenceStatus

ROLES = ("owner", "fenced", "replica", "cached")
"""What a rank's daemon may be to a sequence; of two that differ the later one holds for both."""
RESTORABLE = frozenset({"replica", "cached"})


@dataclass(frozen=True, slots=True)
class Heard:
    """The last word of one rank's daemon, and whether it still speaks."""

    status: EngineStatus | None = None
    fresh: bool = False


def engine_of(ranks: Sequence[Heard]) -> EngineStatus | None:
    """The engine as its daemons see it together; None: nothing was heard of it yet."""
    known = [heard.status for heard in ranks if heard.status is not None]
    if not known:
        return None
    state, incarnation, detail = _state(ranks)
    told = known if len(known) == len(ranks) else []
    exact = set.intersection(*(set(status.exact) for status in told)) if told else set()
    return msgspec.structs.replace(
        known[0],
        state=state,
        incarnation=incarnation,
        fingerprint="+".join(status.fingerprint for status in told),
        running=max(status.running for status in known),
        step=min(status.step for status in known),
        progress_age_ms=max(status.progress_age_ms for status in known),
        sequences=max(status.sequences for status in known),
        journal_dropped=sum(status.journal_dropped for status in known),
        journal_broken=sum(status.journal_broken for status in known),
        sequences_refused=sum(status.sequences_refused for status in known),
        detail=detail,
        exact=tuple(each for each in known[0].exact if each in exact),
        exact_detail="; ".join(dict.fromkeys(status.exact_detail for status in known if status.exact_detail)),
    )


def _state(ranks: Sequence[Heard]) -> tuple[EngineState, int, str]:
    """(state, incarnation, why). A rank that remembers an earlier life's death says nothing of this one."""
    words = [(number, heard.status) for number, heard in enumerate(ranks) if heard.status and heard.fresh]
    lives = {status.incarnation for _, status in words if status.state in ("running", "stalled")}
    life = lives.pop() if len(lives) == 1 else 0
    for number, status in words:
        if status.state == "dead" and (status.incarnation == life or not (life or lives)):
            return "dead", status.incarnation, f"rank {number}: {status.detail or 'its process ended'}"
    if lives:
        return "absent", 0, "its ranks are of different lives"
    for number, status in words:
        if status.state == "stalled":
            return "stalled", life, f"rank {number}: {status.detail or 'stands still'}"
    for number, heard in enumerate(ranks):
        if not heard.fresh:
            return "absent", life, f"the daemon of rank {number} does not answer"
    for number, status in words:
        if status.state != "running":
            return "absent", life, f"rank {number}: {status.detail or 'has not registered'}"
    return "running", life, ""


def sequence_of(ranks: Sequence[SequenceStatus | None], *, whole: bool) -> SequenceStatus | None:
    """What the ranks hold of one sequence; None: none knows it. `whole`: all ranks of the engine that could
    load it live the same life."""
    known = [status for status in ranks if status is not None]
    if not known:
        return None
    roles = {status.role for status in known}
    agreed = len(known) == len(ranks) and len({status.epoch for status in known}) == 1
    agreed = agreed and (len(roles) == 1 or roles <= RESTORABLE) and (whole or not roles <= RESTORABLE)
    peers = {
        peer: min(status.peers.get(peer, 0) for status in known) if agreed else 0 for peer in known[0].peers
    }
    least = min(status.watermark for status in known) if agreed else 0
    return SequenceStatus(
        seq=known[0].seq,
        role=max((status.role for status in known), key=ROLES.index),
        epoch=max(status.epoch for status in known),
        computed=min(status.computed for status in known) if agreed else 0,
        known=min(status.known for status in known),
        # Of one's own sequences no peer restores more than what it has of every rank.
        watermark=min(least, max(peers.values())) if peers else least,
        bytes=sum(status.bytes for status in known),
        peers=peers,
    )


def promoted_of(ranks: Sequence[Promoted | None], *, whole: bool) -> Promoted | None:
    """The answer to a promotion at every rank; None: one did not answer, and nothing can be loaded."""
    known = [promoted for promoted in ranks if promoted is not None]
    if len(known) < len(ranks):
        return None
    least = min(promoted.watermark for promoted in known) if whole else 0
    return msgspec.structs.replace(known[0], watermark=least)

"""The live table: what the engine works on, and how much of it the daemon has been told.

A pure state machine: plans in, journal records out; no ring, no clock, no torch. It keeps every live
sequence whole, so that all can be announced anew when a daemon comes (back) or a record was lost.

Invariant: a record mentions a sequence only if the daemon has its announcement, in this record or an
earlier one, since the last reset. So whatever is lost, the daemon knows less, never something wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from segue_core.messages.journal import Begin, Commit, SequenceBegin, SequenceUpdate
from segue_core.messages.request import Replication
from segue_shim.plan import StepPlan, unpack_u32

ANNOUNCEMENT_OVERHEAD_BYTES = 192
"""Upper bound of what an announcement takes beyond its ids, its name and its salt."""


@dataclass(slots=True)
class LiveSequence:
    """One protected sequence; `paused` ones hold no blocks.

    `known`: the daemon has an entry for it, since the last reset. `fenced`: the daemon said that it goes
    on elsewhere, and is not told about it any more.
    """

    epoch: int
    salt: bytes
    token_ids: bytearray
    block_ids: bytearray
    computed: int
    replication: Replication = "normal"
    known: bool = False
    fenced: bool = False
    paused: bool = False


class LiveTable:
    """All live protected sequences of an engine, in the order in which they began."""

    def __init__(self) -> None:
        self._live: dict[str, LiveSequence] = {}
        self._waiting: dict[str, None] = {}
        self._reset_due = False
        self._void: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def announce_all(self) -> None:
        """The daemon knows nothing (any more): announce everything, after a reset."""
        self._reset_due = True
        self._waiting.clear()
        for seq, live in self._live.items():
            live.known = False
            if not live.fenced and not live.paused:
                self._waiting[seq] = None

    def fence(self, seq: str, epoch: int) -> None:
        """`seq` went on elsewhere with `epoch`: stop talking about an older writer here."""
        live = self._live.get(seq)
        if live is not None and live.epoch < epoch:
            live.fenced = True
            self._waiting.pop(seq, None)

    def begin(self, plan: StepPlan, step: int, announce_bytes: int) -> Begin | None:
        """Take `plan` over and say it: the step's Begin record, or None if there is nothing to say.

        Announcements of at most `announce_bytes` go into it; the others follow with later steps. A
        sequence larger than that ever gets stays unannounced, that is, unprotected.
        """
        self._void.difference_update(unpack_u32(plan.assigned))
        ended = tuple(seq for seq in plan.ended if self._end(seq))
        paused = tuple(seq for seq in plan.paused if self._pause(seq))
        updated = tuple(update for update in plan.updated if self._update(update))
        stale = tuple(start.seq for start in plan.begun if self._start(start))
        reset, self._reset_due = self._reset_due, False
        begun = self._announce(announce_bytes)
        # Known under blocks that it no longer has, and not announced anew yet: it holds none.
        said = {start.seq for start in begun}
        paused = tuple(seq for seq in dict.fromkeys((*paused, *stale)) if seq not in said)
        if not (reset or plan.assigned or begun or updated or paused or ended):
            return None
        return Begin(
            step=step,
            reset=reset,
            assigned=plan.assigned,
            begun=begun,
            updated=updated,
            paused=paused,
            ended=tuple(seq for seq in ended if seq not in said),
        )

    def commit(
        self,
        plan: StepPlan,
        step: int,
        failed_blocks: Collection[int] = (),
        unsure_blocks: Collection[int] = (),
    ) -> Commit | None:
        """The step is complete: its Commit record, or None if no announced sequence got on.

        Sequences that have one of `failed_blocks` (replica blocks that could not be loaded) are left
        where they were: what the step computed for them is void. Those that have one of `unsure_blocks` may
        turn out to be: they stay where they were in this step, and the next one tells.
        """
        self._void.update(failed_blocks)
        doubtful = self._void.union(unsure_blocks)
        computed: list[tuple[str, int]] = []
        for seq, tokens in plan.computed:
            live = self._live.get(seq)
            if live is None or live.paused:
                continue
            if doubtful and not doubtful.isdisjoint(unpack_u32(live.block_ids)):
                continue
            live.computed = tokens
            if live.known and not live.fenced and seq not in self._waiting:
                computed.append((seq, tokens))
        return Commit(step=step, computed=tuple(computed)) if computed else None

    def _end(self, seq: str) -> bool:
        live = self._live.pop(seq, None)
        self._waiting.pop(seq, None)
        return live is not None and live.known

    def _pause(self, seq: str) -> bool:
        live = self._live.get(seq)
        if live is None:
            return False
        live.paused = True
        live.block_ids.clear()
        live.computed = 0
        self._waiting.pop(seq, None)
        return live.known

    def _update(self, update: SequenceUpdate) -> bool:
        live = self._live.get(update.seq)
        if live is None:
            return False
        live.token_ids += update.token_ids
        live.block_ids += update.block_ids
        return live.known and not live.fenced and update.seq not in self._waiting

    def _start(self, start: SequenceBegin) -> bool:
        """Returns whether the daemon knows the sequence, as it was before."""
        before = self._live.get(start.seq)
        fenced = before is not None and before.fenced and start.epoch <= before.epoch
        known = before is not None and before.known
        self._live[start.seq] = LiveSequence(
            epoch=start.epoch,
            salt=start.salt,
            token_ids=bytearray(start.token_ids),
            block_ids=bytearray(start.block_ids),
            computed=start.computed,
            replication=start.replication,
            known=known,
            fenced=fenced,
        )
        if not fenced:
            self._waiting[start.seq] = None
        return known

    def _announce(self, announce_bytes: int) -> tuple[SequenceBegin, ...]:
        begun: list[SequenceBegin] = []
        room = announce_bytes
        for seq in list(self._waiting):
            live = self._live[seq]
            need = len(live.token_ids) + len(live.block_ids) + len(live.salt) + 4 * len(seq)
            need += ANNOUNCEMENT_OVERHEAD_BYTES
            if need > room:
                continue
            room -= need
            del self._waiting[seq]
            live.known = True
            begun.append(
                SequenceBegin(
                    seq=seq,
                    epoch=live.epoch,
                    salt=live.salt,
                    token_ids=bytes(live.token_ids),
                    block_ids=bytes(live.block_ids),
                    computed=live.computed,
                    replication=live.replication,
                )
            )
        return tuple(begun)

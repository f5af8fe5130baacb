"""Publications of an engine's tables: what began, grew, moved and ended between two of them.

A pure state machine: whole tables in, the step in the journal's terms out. Believes nothing that contradicts
itself: a ValueError says what the engine did wrong.

Invariant: a sequence goes on unbroken only if it has lost nothing since the last publication: no block, no
id, no computed token. Whatever else happened to it, it begins anew, and older copies of it are void.
"""

from __future__ import annotations

from collections.abc import Iterable

from segue_core.messages.journal import SequenceBegin, SequenceUpdate
from segue_core.messages.request import MAX_SEQ_CHARS
from segue_shim.plan import StepPlan, unpack_u32

U32_BYTES = 4


class PublishedTables:
    """The tables as they were published last, by sequence."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.taken_back: tuple[str, ...] = ()
        """Sequences whose ids or salt changed under the same epoch in the latest publication: they count as
        ended in it, and as new in the next."""
        self.missed_steps = 0
        """Steps that ran without a publication before the latest one."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._last: dict[str, SequenceBegin] = {}
        self._step: int | None = None

    def publish(self, tables: Iterable[SequenceBegin], *, step: int, running: int) -> StepPlan:
        """What became of the tables up to step number `step`. Raises ValueError."""
        if self._step is not None and step < self._step:
            raise ValueError(f"step {step} was published after step {self._step}: steps only count up")
        self.missed_steps = max(0, step - self._step - 1) if self._step is not None else 0
        self._step = step
        before, self._last = self._last, {}
        begun: list[SequenceBegin] = []
        updated: list[SequenceUpdate] = []
        paused: list[str] = []
        computed: list[tuple[str, int]] = []
        taken_back: list[str] = []
        for now in tables:
            seq, last = now.seq, before.get(now.seq)
            if seq in self._last:
                raise ValueError(f"{seq} was published twice at once: name each sequence once")
            if last != now:
                self._check(now, last)
            if last is not None and _takes_back(last, now):
                taken_back.append(seq)
                continue
            self._last[seq] = now
            if not now.block_ids:
                if last is not None and last.block_ids:
                    paused.append(seq)
            elif last is None or not _goes_on(last, now):
                begun.append(now)
            elif last != now:
                ids = now.token_ids[len(last.token_ids) :]
                blocks = now.block_ids[len(last.block_ids) :]
                if ids or blocks:
                    updated.append(SequenceUpdate(seq, ids, blocks))
                if now.computed > last.computed:
                    computed.append((seq, now.computed))
        self.taken_back = tuple(taken_back)
        return StepPlan(
            begun=tuple(begun),
            updated=tuple(updated),
            paused=tuple(paused),
            ended=tuple(seq for seq in before if seq not in self._last),
            computed=tuple(computed),
            running=running,
        )

    def _check(self, now: SequenceBegin, last: SequenceBegin | None) -> None:
        if not 0 < len(now.seq) <= MAX_SEQ_CHARS:
            raise ValueError(f"a sequence name of {len(now.seq)} characters: 1 to {MAX_SEQ_CHARS}")
        if len(now.token_ids) % U32_BYTES or len(now.block_ids) % U32_BYTES:
            raise ValueError(f"{now.seq}: token ids and block ids are packed as u32 (see pack_u32)")
        if last is None or now.block_ids != last.block_ids:
            highest = max(unpack_u32(now.block_ids), default=0)
            if highest >= self._num_blocks:
                raise ValueError(f"{now.seq}: block {highest}, but the engine has {self._num_blocks}")
        room = len(now.block_ids) // U32_BYTES * self._block_size
        if not 0 <= now.computed <= room:
            raise ValueError(f"{now.seq}: {now.computed} tokens computed, in blocks for {room}")


def _takes_back(last: SequenceBegin, now: SequenceBegin) -> bool:
    return now.epoch == last.epoch and (now.salt != last.salt or not now.token_ids.startswith(last.token_ids))


def _goes_on(last: SequenceBegin, now: SequenceBegin) -> bool:
    return (
        bool(last.block_ids)
        and (now.epoch, now.replication) == (last.epoch, last.replication)
        and now.block_ids.startswith(last.block_ids)
        and now.computed >= last.computed
    )

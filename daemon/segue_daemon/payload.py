"""A delta's bytes, from a bulk connection to where they stay in the store.

Whole blocks are received straight into their place, changes are applied from where they were read; all is
verified there, and counts only then. Holds no policy: what is refused, and why, is the store's affair.
Invariant: afterwards the connection stands behind the payload, whether that was wanted or not; or it is
broken, and the store as it was.
"""

from __future__ import annotations

import asyncio

import numpy as np
import xxhash

from segue_core.clock import Clock
from segue_core.messages.peer import Delta, NackReason
from segue_daemon.arena import Bytes
from segue_daemon.bulk_reader import BulkReader
from segue_daemon.replicas import Refusal, Reservation
from segue_daemon.store import ReplicaStore

PARTS_AT_ONCE = 256


class Payloads:
    """Takes them in; `corrupt` counts those with a wrong checksum."""

    def __init__(self, store: ReplicaStore, clock: Clock) -> None:
        self.corrupt = 0
        self._store = store
        self._clock = clock

    async def receive(self, reader: BulkReader, writer: str, delta: Delta) -> int | Refusal:
        """Receive the payload of a delta from `writer`; the new watermark, or why it does not count."""
        reservation = self._store.reserve(delta, writer, self._clock.now_ns())
        if isinstance(reservation, Refusal):
            await reader.skip(sum(part.nbytes for part in delta.parts))
            return reservation
        try:
            return await self._fill(reader, delta, reservation)
        except BaseException:
            self._store.cancel(reservation)
            raise

    async def _fill(self, reader: BulkReader, delta: Delta, reservation: Reservation) -> int | Refusal:
        buffered: dict[int, Bytes] = {}
        last = len(delta.parts) - 1
        for index, part in enumerate(delta.parts):
            if index % PARTS_AT_ONCE == PARTS_AT_ONCE - 1:
                await asyncio.sleep(0)  # many small parts that are there already never make this wait
            target = self._store.room_for(reservation, index)
            if target is not None:
                await reader.fill(target.data)
            elif reservation.targets[index][1] is None:
                # What follows in the delta would overwrite a view of what was read ahead.
                view = await reader.view(part.nbytes)
                target = np.frombuffer(view, np.uint8)
                target = buffered[index] = target if index == last else target.copy()
            if target is not None and part.nbytes:
                reservation.digests[index] = xxhash.xxh3_64_intdigest(target.data)
        if reservation.checksum() != delta.checksum:
            self.corrupt += 1
            self._store.cancel(reservation)
            return Refusal(NackReason.CORRUPT, reservation.replica.watermark)
        return self._store.commit(reservation, buffered, self._clock.now_ns())

"""A delta's bytes, from a bulk connection to where they stay in the store.

Each part is received straight into its place, verified there, and counts only then. Holds no policy: what
is refused, and why, is the store's affair. Invariant: afterwards the connection stands behind the payload,
whether that was wanted or not; or it is broken, and the store as it was.
"""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import xxhash

from segue_core.clock import Clock
from segue_core.messages.peer import Delta, NackReason
from segue_daemon.arena import Bytes
from segue_daemon.replicas import Refusal, Reservation
from segue_daemon.store import ReplicaStore
from segue_daemon.tls import SecureReceiver
from segue_daemon.wire import recv_into

DRAIN_CHUNK = 1 << 20
PARTS_AT_ONCE = 256
Bulk = socket.socket | SecureReceiver


class Payloads:
    """Takes them in; `corrupt` counts those with a wrong checksum."""

    def __init__(self, store: ReplicaStore, clock: Clock) -> None:
        self.corrupt = 0
        self._store = store
        self._clock = clock

    async def receive(self, connection: Bulk, writer: str, delta: Delta) -> int | Refusal:
        """Receive the payload of a delta from `writer`; the new watermark, or why it does not count."""
        reservation = self._store.reserve(delta, writer, self._clock.now_ns())
        if isinstance(reservation, Refusal):
            await _discard(connection, sum(part.nbytes for part in delta.parts))
            return reservation
        try:
            return await self._fill(connection, delta, reservation)
        except BaseException:
            self._store.cancel(reservation)
            raise

    async def _fill(self, connection: Bulk, delta: Delta, reservation: Reservation) -> int | Refusal:
        buffered: dict[int, Bytes] = {}
        for index, part in enumerate(delta.parts):
            if index % PARTS_AT_ONCE == PARTS_AT_ONCE - 1:
                await asyncio.sleep(0)  # many small parts that are there already never make this wait
            target = self._store.room_for(reservation, index)
            if target is None and reservation.targets[index][1] is None:
                target = buffered[index] = np.empty(part.nbytes, np.uint8)
            if target is not None and part.nbytes:
                await recv_into(connection, target.data)
                reservation.digests[index] = xxhash.xxh3_64_intdigest(target.data)
        if reservation.checksum() != delta.checksum:
            self.corrupt += 1
            self._store.cancel(reservation)
            return Refusal(NackReason.CORRUPT, reservation.replica.watermark)
        return self._store.commit(reservation, buffered, self._clock.now_ns())


async def _discard(connection: Bulk, count: int) -> None:
    """Read past a payload that is not wanted."""
    sink = memoryview(bytearray(min(count, DRAIN_CHUNK)))
    while count:
        step = min(count, len(sink))
        await recv_into(connection, sink[:step])
        count -= step

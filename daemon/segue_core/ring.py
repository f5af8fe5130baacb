"""The journal: a single-producer single-consumer ring of records in shared memory.

The engine writes, the daemon reads. Writing never blocks; if the ring is full the record is
dropped and counted, and the producer announces its sequences anew when there is room (see
`segue_shim.exporter`). While the daemon is awake a write makes no system call; the reader sets
`sleeping` before it waits, and the writer then rings the doorbell (an eventfd) once.

Layout: a header page of little-endian u64 words (see `Word`), then `capacity` bytes of records.
A record is u32 length, u32 CRC-32 of the payload (seeded with its position), payload, padded to 8
bytes; a length of 0xFFFFFFFF says that the rest up to the end is unused. `head` and `tail` count
bytes since the start and never wrap.

Ordering: the payload is written before `head`. On x86-64 stores are not reordered; on weaker
machines the CRC turns a record seen too early into "not there yet" (its seed tells this lap of the
ring from the last one). The doorbell flag may in theory be missed in the store-load window, so a
reader never sleeps longer than its poll interval.
Invariant: whatever the bytes in the ring are, the reader returns a verified payload, None, or raises
`ProtocolError`; it never reads outside the ring.
"""

from __future__ import annotations

import mmap
import os
import zlib
from enum import IntEnum

from segue_core.errors import ProtocolError

MAGIC = 0x5345_4755_4552_4E47
VERSION = 2
HEADER_BYTES = 4096
RECORD_HEADER_BYTES = 8
SKIP = 0xFFFF_FFFF
DEFAULT_CAPACITY = 8 << 20
MAX_CAPACITY = 1 << 30
MAX_RECORD_BYTES = 1 << 26
"""The ids of more tokens than a context has: a record costs its reader many times its bytes."""


class Word(IntEnum):
    """Index of each u64 in the header. The producer owns those above TAIL, the consumer the rest."""

    MAGIC = 0
    VERSION = 1
    CAPACITY = 2
    HEAD = 8
    DROPPED = 9
    STEP_BEGUN = 10
    """Number of the newest step that was begun."""
    STEP_COMMITTED = 11
    """Number of the newest step whose KV is complete."""
    STEP_CHANGED_NS = 12
    """CLOCK_MONOTONIC when either step number last changed."""
    RUNNING = 13
    """Sequences (protected or not) that the engine works on."""
    TAIL = 64
    SLEEPING = 65
    SNAPSHOT_WANTED = 66
    """Set by the consumer: announce all sequences anew."""


class Ring:
    """One end of the ring over a mapped file descriptor; the descriptor stays the caller's."""

    def __init__(self, fd: int, *, create: int = 0) -> None:
        """Map the ring at `fd`; with `create` (a capacity in bytes) size and initialise it first.

        Raises ProtocolError if the memory is not a ring of this version, or too small for what
        its header says.
        """
        if create:
            if create % 8 or not 4096 <= create <= MAX_CAPACITY:
                raise ValueError(f"ring capacity {create}: a multiple of 8 from 4096 to 2**30")
            os.ftruncate(fd, HEADER_BYTES + create)
        size = os.fstat(fd).st_size
        if not HEADER_BYTES + 4096 <= size <= HEADER_BYTES + MAX_CAPACITY:
            raise ProtocolError(f"journal of {size} bytes is not a ring")
        self._map = mmap.mmap(fd, size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:HEADER_BYTES].cast("Q")
        if create:
            self._words[Word.CAPACITY] = create
            self._words[Word.VERSION] = VERSION
            self._words[Word.MAGIC] = MAGIC
        self.capacity = size - HEADER_BYTES
        if (
            self._words[Word.MAGIC] != MAGIC
            or self._words[Word.VERSION] != VERSION
            or self._words[Word.CAPACITY] != self.capacity
        ):
            self.close()
            raise ProtocolError("journal memory is not a Segue ring of this version")
        self._data = self._bytes[HEADER_BYTES:]
        self._position = self._words[Word.HEAD] if create else self._words[Word.TAIL]

    def get(self, word: Word) -> int:
        """Read one header word."""
        return self._words[word]

    def set(self, word: Word, value: int) -> None:
        """Write one header word (an aligned 8-byte store)."""
        self._words[word] = value

    # -- producer ---------------------------------------------------------------------------

    def free(self) -> int:
        """Bytes that the producer may still write, record headers and padding included."""
        used = self._position - self._words[Word.TAIL]
        return self.capacity - used if 0 <= used <= self.capacity else 0

    def fits(self, payload_bytes: int) -> bool:
        """Whether a record of this size can be appended now, wherever the ring's end falls."""
        return payload_bytes <= MAX_RECORD_BYTES and (
            2 * _padded(payload_bytes) <= self.free()
            or (
                _padded(payload_bytes) <= self.free()
                and self._position % self.capacity + _padded(payload_bytes) <= self.capacity
            )
        )

    def append(self, payload: bytes) -> bool:
        """Write one record; False (and counted) if there is no room. Never blocks."""
        need = _padded(len(payload))
        if not self.fits(len(payload)):
            # Said again, in case somebody wrote over it: the consumer hears of the loss, and goes on there.
            self._words[Word.HEAD] = self._position
            self._words[Word.DROPPED] = (self._words[Word.DROPPED] + 1) % (1 << 64)
            return False
        start = self._position % self.capacity
        if start + need > self.capacity:
            self._put_u32(start, SKIP)
            self._position += self.capacity - start
            start = 0
        body = start + RECORD_HEADER_BYTES
        self._data[body : body + len(payload)] = payload
        self._put_u32(start, len(payload))
        self._put_u32(start + 4, zlib.crc32(payload, self._position & 0xFFFF_FFFF))
        self._position += need
        self._words[Word.HEAD] = self._position
        return True

    def doorbell_wanted(self) -> bool:
        """Whether the consumer sleeps; asking clears the wish, so the bell is rung once."""
        if self._words[Word.SLEEPING]:
            self._words[Word.SLEEPING] = 0
            return True
        return False

    # -- consumer ---------------------------------------------------------------------------

    def read(self) -> bytes | None:
        """The next record's payload, or None if there is none (yet).

        Raises ProtocolError if the producer's bookkeeping makes no sense: the ring cannot be used
        any further and the engine must register again.
        """
        head = self._words[Word.HEAD]
        while self._position < head:
            pending = head - self._position
            start = self._position % self.capacity
            if pending > self.capacity or self._position % 8:
                raise ProtocolError(f"journal head {head} is impossible at tail {self._position}")
            length = self._get_u32(start)
            if length == SKIP:
                if self.capacity - start > pending:
                    raise ProtocolError(f"journal head {head} lies in the unused end of the ring")
                self._advance(self.capacity - start)
                continue
            need = _padded(length)
            if need > pending or start + need > self.capacity or length > MAX_RECORD_BYTES:
                raise ProtocolError(f"journal record of {length} bytes does not fit the ring")
            body = start + RECORD_HEADER_BYTES
            payload = bytes(self._data[body : body + length])
            if zlib.crc32(payload, self._position & 0xFFFF_FFFF) != self._get_u32(start + 4):
                return None
            self._advance(need)
            return payload
        return None

    @property
    def position(self) -> int:
        """Where this end is, in bytes since the start."""
        return self._position

    def unread(self) -> int:
        """Bytes that the producer says are there and that were not read."""
        return self._words[Word.HEAD] - self._position

    def skip(self) -> None:
        """Give up what is unread (it cannot be read) and go on with what is written from now on."""
        self._position = self._words[Word.HEAD] & ~7
        self._words[Word.TAIL] = self._position

    def _advance(self, count: int) -> None:
        self._position += count
        self._words[Word.TAIL] = self._position

    def _put_u32(self, at: int, value: int) -> None:
        self._data[at : at + 4] = value.to_bytes(4, "little")

    def _get_u32(self, at: int) -> int:
        return int.from_bytes(self._data[at : at + 4], "little")

    def close(self) -> None:
        """Unmap; safe to call twice."""
        for view in (getattr(self, "_data", None), self._words, self._bytes):
            if view is not None:
                view.release()
        self._map.close()


def _padded(length: int) -> int:
    return (RECORD_HEADER_BYTES + length + 7) & ~7

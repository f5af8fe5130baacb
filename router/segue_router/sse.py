"""Server-sent events out of bytes that arrive cut anywhere.

Owns framing only: it never looks into an event. Invariant: however the bytes are cut, the same
payloads come out in the same order, and an event that did not end is never one of them.
"""

from __future__ import annotations

DONE = b"[DONE]"
"""What OpenAI-compatible engines send last. It is not proof of success."""


class SseSplitter:
    """Feed bytes, get the payloads (`data:` lines joined by newlines) of the events that are complete.

    `broken` says why nothing more can be taken (an event over the limit); events before it count.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self.broken = ""
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    @property
    def unfinished(self) -> bool:
        """Whether the bytes so far end inside an event."""
        return bool(self._line or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that `chunk` completes."""
        if self.broken:
            return []
        if not self.unfinished:
            whole = self._whole_events(chunk)
            if whole is not None:
                return whole
        events: list[bytes] = []
        start = 0
        while not self.broken:
            end = chunk.find(b"\n", start)
            if end < 0:
                self._line += chunk[start:]
                self._check_size()
                break
            self._line += chunk[start:end]
            start = end + 1
            line = bytes(self._line).removesuffix(b"\r")
            self._line.clear()
            self._take_line(line, events)
            self._check_size()
        return events

    def _whole_events(self, chunk: bytes) -> list[bytes] | None:
        """The usual case, quickly: `chunk` is whole events of one data line each."""
        if not chunk.endswith(b"\n\n") or b"\r" in chunk or len(chunk) > self._max_event_bytes:
            return None
        if chunk.startswith(b"data: ") and chunk.find(b"\n") == len(chunk) - 2:
            return [chunk[6:-2]]
        parts = chunk[:-2].split(b"\n\n")
        if all(part.startswith(b"data: ") and b"\n" not in part for part in parts):
            return [part[6:] for part in parts]
        return None

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)

    def _check_size(self) -> None:
        if self._data_bytes + len(self._line) > self._max_event_bytes:
            self.broken = f"an event is larger than {self._max_event_bytes} bytes"


def event(payload: bytes) -> bytes:
    """`payload` (one line) as an event."""
    return b"data: " + payload + b"\n\n"

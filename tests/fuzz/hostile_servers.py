"""An engine and a daemon that answer the router as they like: raw HTTP servers with mutated answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from fuzz.mutate import Mutator
from segue_core.messages.status import EngineStatus, Promoted, SequenceStatus

HEAD_BYTES = 1 << 16
LONG_BYTES = 1 << 20
LINES = 5
Answer = Callable[[str, bytes], bytes]


class RawServer:
    """One request a connection; `answer(path, body)` is all that is sent back."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            _, _, rest = head.lower().partition(b"content-length: ")
            length = int(rest.partition(b"\r\n")[0] or b"0")
            body = await reader.readexactly(length)
            path = head.split(b" ", 2)[1].decode("latin-1")
            writer.write(self._answer(path, body))
            await writer.drain()
        writer.close()


def answered(
    body: bytes, kind: str = "application/json", status: str = "200 OK", *, sized: bool = True
) -> bytes:
    """An HTTP answer; without `sized` it ends with the connection."""
    length = f"Content-Length: {len(body)}\r\n" if sized else ""
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}Connection: close\r\n\r\n".encode() + body


class HostileDaemon:
    """What a daemon says of its engine and of sequences: nearly right."""

    def __init__(self, mutate: Mutator) -> None:
        self._mutate = mutate
        self.server = RawServer(self._answer)

    def _answer(self, path: str, _: bytes) -> bytes:
        mutate, rng = self._mutate, self._mutate.rng
        if mutate.chance(0.03):
            return mutate.octets(answered(b"{}"))
        if path.startswith("/v1/watch"):
            lines = [mutate.json(self._status()).replace(b"\n", b"") for _ in range(rng.randrange(LINES))]
            if mutate.chance(0.02):
                lines.append(b"x" * LONG_BYTES)
            return answered(b"\n".join(lines) + b"\n", "application/x-ndjson", sized=False)
        body: Any = SequenceStatus("s", "replica", 1, 5, 5, rng.randrange(9), 100, {"b": 3})
        if path.endswith("promote"):
            body = Promoted("s", 2, rng.randrange(9))
        status = rng.choice(("200 OK", "200 OK", "200 OK", "409 Conflict", "404 Not Found", "500 No"))
        said = mutate.json(msgspec.to_builtins(body))
        if mutate.chance(0.02):
            said = b" " * LONG_BYTES + said
        return answered(said, status=status)

    def _status(self) -> Any:
        rng = self._mutate.rng
        state = rng.choice(("running", "running", "running", "stalled", "dead", "absent"))
        status = EngineStatus(
            "e", state, incarnation=rng.randrange(3), fingerprint="f", running=1, step=rng.randrange(9)
        )
        extra = {
            "generation_defaults": {"max_tokens": 5.0},
            "exact": ["output", "seed"],
            "progress_age_ms": 3,
        }
        return msgspec.to_builtins(status) | extra

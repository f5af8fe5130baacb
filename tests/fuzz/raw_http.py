"""HTTP requests as bytes: right ones, and such as no client would send."""

from __future__ import annotations

import asyncio
import contextlib

from fuzz.mutate import Mutator

READ_BYTES = 1 << 16
ANSWER_S = 20.0
HALF_S = 0.02
"""How long a request that never ends is left hanging."""
METHODS = (
    "GET",
    "POST",
    "POST",
    "POST",
    "PUT",
    "HEAD",
    "OPTIONS",
    "DELETE",
    "TRACE",
    "CONNECT",
    "\xff",
    "get",
)
HEADERS = (
    "Content-Length: 5",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999999",
    "Content-Length: 1\r\nContent-Length: 2",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 3",
    "Transfer-Encoding: gzip, chunked",
    "Content-Encoding: gzip",
    "Content-Type: multipart/form-data; boundary=x",
    "Content-Type: text/plain; charset=utf-99",
    "Expect: 100-continue",
    "Expect: something",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Cookie: a=b; =; ;;",
    "Authorization: Bearer \xe9",
    "x-segue-failover: off",
    "x-segue-session: \xff",
    "Host:",
    ": nothing",
    " folded: line",
    "no colon",
    "X: " + "a" * 9000,
    "\r\n".join(f"X{n}: y" for n in range(300)),
)
CHUNKS = (
    b"0\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\nx",
    b"-1\r\n",
    b"5;a=b\r\nhel",
    b"zz\r\n",
)


def request(mutate: Mutator, path: str, body: bytes, method: str = "POST") -> bytes:
    """A request for `path`: half of them right but for their body."""
    rng = mutate.rng
    right = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    roll = rng.random()
    if roll < 0.55:
        return encoded(right) + body
    if roll < 0.7:
        return encoded([f"{rng.choice(METHODS)} {path} HTTP/1.1", *right[1:]]) + body
    if roll < 0.85:
        lines = [*right[:3], *rng.sample(HEADERS, rng.randrange(1, 3))]
        return encoded(lines) + (rng.choice(CHUNKS) if mutate.chance(0.5) else body)
    return mutate.octets(encoded(right) + body)


def encoded(lines: list[str]) -> bytes:
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


async def exchange(port: int, raw: bytes, *, at_most: int = READ_BYTES) -> bytes:
    """Send `raw`; what comes back until the other side closes, or a moment after nothing more comes."""
    answer = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(raw)
            async with asyncio.timeout(HALF_S if not complete(raw) else ANSWER_S):
                while len(answer) < at_most and (piece := await reader.read(READ_BYTES)):
                    answer += piece
    finally:
        writer.transport.abort()
    return answer


def complete(raw: bytes) -> bool:
    """Whether a server that reads `raw` has all that it waits for, as far as one can tell."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lowered = head.lower()
    if b"connection: close" not in lowered or lowered.count(b"content-length") != 1:
        return False
    length = lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return length.isdigit() and len(length) < 9 and len(body) >= int(length) and b"upgrade" not in lowered


def status_of(answer: bytes) -> int:
    """0: there is none."""
    word = answer[9:12]
    return int(word) if answer.startswith(b"HTTP/1.") and word.isdigit() else 0

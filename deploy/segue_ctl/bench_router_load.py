"""Both ends of the streams that measure a proxy: the engine that sends tokens and the client that gets them.

They share one event loop: one clock, and the client's arrivals can pace the engine. The engine sends what
vLLM 0.32 sends for a streamed chat: the same events, each in a chunk and a write of its own. A token's text
is the time at which it was sent, so the client knows how long each was under way.

A run has three parts, and only the middle one is measured: all streams begin, one after the other, and stop
after their first token; all tokens but the first and the last flow; all streams end. Tokens flow in one of
two ways. In lockstep (`rate` 0) a stream's next token is sent when one of the `window` under way has arrived:
as fast as the proxy can, but never in piles that no engine would make. Paced, the tokens of all streams are
spread evenly over time.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import cast

import msgspec

from segue_core.errors import SegueError
from segue_ctl.free_ports import LOOPBACK

MODEL = "bench"
CHAT_PATH = "/v1/chat/completions"
PROMPT_TOKENS = 100
SILENCE_S = 20.0
"""A run in which nothing arrives for so long has failed."""
_MARK = b"@"
"""Before each time stamp; nothing else that a proxy sends has it."""
_STAMP_CHARS = 18
_TOKEN_CHARS = len(_MARK) + _STAMP_CHARS
_ACCEPTED = b"HTTP/1.1 200 "
_CREATED = 1_700_000_000
_TICK_S = 0.001


class LoadError(SegueError):
    """A proxy did not deliver what the engine sent."""


class StreamOptions(msgspec.Struct):
    """What the engine reads of `stream_options`."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """What the engine reads of a request; `user` is the number of the stream."""

    user: str
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class Shape(msgspec.Struct, frozen=True):
    """One run. `rate`: tokens a second of all streams together; 0: in lockstep with `window`."""

    streams: int
    tokens: int
    rate: int = 0
    window: int = 1

    @property
    def measured_tokens(self) -> int:
        """Of all streams, without their first and last ones."""
        return self.streams * (self.tokens - 2)


def chunk(data: bytes) -> bytes:
    """`data` as one chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def stamped(now_ns: int) -> bytes:
    """A token's text: when it was sent."""
    return b"%b%0*d" % (_MARK, _STAMP_CHARS, now_ns)


class Events:
    """The events of one stream, as vLLM 0.32 sends them, in chunks; prebuilt but for a token's text."""

    def __init__(self, stream: int, request: ChatRequest) -> None:
        head = (
            f'data: {{"id":"chatcmpl-{stream:032x}","object":"chat.completion.chunk",'
            f'"created":{_CREATED},"model":"{MODEL}","choices":['
        )
        ids = str([1000 + stream]) if request.return_token_ids else "null"
        prompt = str(list(range(PROMPT_TOKENS))).replace(" ", "") if request.return_token_ids else "null"
        self.role = chunk(
            f'{head}{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}],"prompt_token_ids":{prompt},"prompt_text":null}}\n\n'.encode()
        )
        self._token = self._framed(
            f'{head}{{"index":0,"delta":{{"content":"',
            f'"}},"logprobs":null,"finish_reason":null,"token_ids":{ids}}}]}}\n\n',
        )
        self._last = self._framed(
            f'{head}{{"index":0,"delta":{{"content":"',
            f'"}},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":{ids}}}]}}\n\n',
        )
        self._usage_head = head if request.stream_options and request.stream_options.include_usage else ""

    @staticmethod
    def _framed(before: str, after: str) -> tuple[bytes, bytes]:
        size = len(before) + _TOKEN_CHARS + len(after)
        return b"%x\r\n%b" % (size, before.encode()), after.encode() + b"\r\n"

    def token(self, now_ns: int) -> bytes:
        """A token, sent now."""
        before, after = self._token
        return b"".join((before, stamped(now_ns), after))

    def last(self, now_ns: int, tokens: int) -> list[bytes]:
        """The last token and what follows it."""
        before, after = self._last
        parts = [b"".join((before, stamped(now_ns), after))]
        if self._usage_head:
            usage = (
                f'{self._usage_head}],"usage":{{"prompt_tokens":{PROMPT_TOKENS},'
                f'"total_tokens":{PROMPT_TOKENS + tokens},"completion_tokens":{tokens}}}}}\n\n'
            )
            parts.append(chunk(usage.encode()))
        return [*parts, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]


class Run:
    """One run through one proxy: opens the streams at `port` and lets tokens flow.

    `delays_ns`: of each measured token. `ttft_ns`: of each stream. `spin`: look at the clock all the time
    instead of every millisecond (on a core that nobody else needs).
    """

    def __init__(self, shape: Shape, port: int, *, spin: bool) -> None:
        self.shape = shape
        self.delays_ns = array("q")
        self.ttft_ns = array("q")
        self._port = port
        self._spin = spin
        self._senders: list[Callable[[bytes], None]] = []
        self._events: list[Events] = []
        self._sent = [1] * shape.streams
        self._flowing = False
        self._began_ns = 0
        self._paced = 0
        self._left = shape.measured_tokens
        self._news = asyncio.get_running_loop().create_future()
        self._clients: list[ClientEnd] = []

    async def begin(self) -> None:
        """Open all streams, one after the other; returns when each has its first token."""
        for stream in range(self.shape.streams):
            await self._open(stream)

    async def _open(self, stream: int) -> None:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: ClientEnd(self, stream), LOOPBACK, self._port)
        self._clients.append(client)
        await self._until(lambda: client.tokens == 1)

    async def flow(self) -> None:
        """Let the tokens between flow; returns when all have arrived."""
        self._flowing = True
        self._began_ns = time.monotonic_ns()
        if self.shape.rate:
            self._pace()
        else:
            for stream in range(self.shape.streams):
                for _ in range(self.shape.window):
                    self._send_next(stream)
        await self._until(lambda: not self._left)
        self._flowing = False

    async def end(self) -> None:
        """Send the ends; returns when every stream has its own."""
        now_ns = time.monotonic_ns()
        for sender, events in zip(self._senders, self._events, strict=True):
            for part in events.last(now_ns, self.shape.tokens):
                sender(part)
        await self._until(lambda: all(client.done for client in self._clients))

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises LoadError if nothing arrives any more, or a stream breaks."""
        while not condition():
            try:
                await asyncio.wait_for(asyncio.shield(self._news), SILENCE_S)
            except TimeoutError as error:
                raise LoadError(f"port {self._port}: nothing arrived for {SILENCE_S:.0f} s") from error
            self._news = asyncio.get_running_loop().create_future()

    # --- the engine's side ---

    def opened(self, stream: int, events: Events, send: Callable[[bytes], None]) -> None:
        """The engine got the request of `stream`."""
        if stream != len(self._senders):
            self.tell(LoadError(f"the request of stream {stream} came twice or out of order"))
            return
        self._senders.append(send)
        self._events.append(events)
        send(events.role)
        send(events.token(time.monotonic_ns()))

    def _send_next(self, stream: int) -> None:
        if self._sent[stream] < self.shape.tokens - 1:
            self._sent[stream] += 1
            self._senders[stream](self._events[stream].token(time.monotonic_ns()))

    def _pace(self) -> None:
        """Send what is due: token n of all is due n / rate seconds after the beginning."""
        total = self.shape.measured_tokens
        due = min(total, (time.monotonic_ns() - self._began_ns) * self.shape.rate // 1_000_000_000)
        for number in range(self._paced, due):
            self._send_next(number % self.shape.streams)
        self._paced = due
        if due < total and self._flowing:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._pace) if self._spin else loop.call_later(_TICK_S, self._pace)

    # --- the client's side ---

    def arrived(self, stream: int, sent_ns: int, now_ns: int) -> None:
        """A token of `stream`."""
        if not self._flowing:
            self.tell()
            return
        self.delays_ns.append(now_ns - sent_ns)
        self._left -= 1
        if not self._left:
            self.tell()
        elif not self.shape.rate:
            self._send_next(stream)

    def tell(self, error: LoadError | None = None) -> None:
        """Something that is waited for may have happened."""
        if self._news.done():
            return
        if error is None:
            self._news.set_result(None)
        else:
            self._news.set_exception(error)


class ClientEnd(asyncio.Protocol):
    """One stream at the client: asks, notes when each token arrives, parses nothing else."""

    def __init__(self, run: Run, stream: int) -> None:
        self.tokens = 0
        self.done = False
        self._run = run
        self._stream = stream
        self._rest = b""
        self._accepted = False
        self._asked_ns = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        body = msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "How fast are you?"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": self._run.shape.tokens,
                "temperature": 0,
                "user": str(self._stream),
            }
        )
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: {LOOPBACK}\r\nContent-Type: application/json\r\n"
        self._asked_ns = time.monotonic_ns()
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        text = self._rest + data
        if not self._accepted:
            if len(text) < len(_ACCEPTED):
                self._rest = text
                return
            if not text.startswith(_ACCEPTED):
                self._run.tell(LoadError(f"refused: {text[:300].decode(errors='replace')}"))
                return
            self._accepted = True
        start = 0
        while 0 <= (at := text.find(_MARK, start)) <= len(text) - _TOKEN_CHARS:
            start = at + _TOKEN_CHARS
            self.tokens += 1
            if self.tokens == 1:
                self._run.ttft_ns.append(now_ns - self._asked_ns)
            self._run.arrived(self._stream, int(text[at + len(_MARK) : start]), now_ns)
        if b"[DONE]" in text:
            self._end()
        self._rest = text[max(start, len(text) - _TOKEN_CHARS + 1) :]

    def _end(self) -> None:
        if self.tokens != self._run.shape.tokens:
            self._run.tell(LoadError(f"{self.tokens} tokens arrived of {self._run.shape.tokens}"))
        else:
            self.done = True
            self._run.tell()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done:
            self._run.tell(LoadError(f"a stream broke after {self.tokens} tokens: {exc}"))

    def close(self) -> None:
        """Close the connection; its end is no failure any more."""
        self.done = True
        if self._transport is not None:
            self._transport.close()

"""An OpenAI-compatible engine whose next token is a function of all ids before it.

So an answer that was continued rightly by another fake engine equals the uninterrupted one, token for
token, and a wrong prompt, a skipped or a repeated token shows. It speaks as vLLM 0.32 does, with its
traps: characters of several tokens, ids without text, the prompt leaked as text when it was cut inside a
character, and an empty chunk, an error event and `[DONE]` when it fails. Failures are injected by plan.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from system.router.fake_tokens import (
    EMOJI,
    MODEL,
    MODEL_LEN,
    encode,
    generate,
    piece,
    text_of,
)
from system.router.foreign_events import FOREIGN


@dataclass
class Fault:
    """What goes wrong in one request, after so many output tokens, or if set after so many events."""

    kind: str
    after: int = 0
    events: int | None = None
    status: int = 500
    delay_s: float = 0.0


@dataclass
class Seen:
    """One request as the engine got it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    aborted: bool = False
    finished: bool = False
    sent_tokens: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """Serve on a free port. `faults` (may be shared) are used up one a generation.

    cards: what `/v1/models` lists. api_key: wanted there. detokenizes, names_*: whether it does;
    detokenize_hangs: it never answers that question.
    lag: what a parser of chat answers holds back until the next token: the "token", or all but its "blank".
    hold: `/v1/held` answers once it is set.
    """

    def __init__(
        self,
        faults: deque[Fault] | None = None,
        *,
        chunk_tokens: int = 1,
        token_s: float = 0.0,
        always_streams: bool = False,
    ) -> None:
        self.faults: deque[Fault] = deque() if faults is None else faults
        self.seen: list[Seen] = []
        self.healthy = True
        self.probes_hang = False
        self.probe_s = 0.0
        self.chunk_tokens = chunk_tokens
        self.token_s = token_s
        self.cards: list[dict[str, Any]] = [{"id": MODEL, "object": "model", "max_model_len": MODEL_LEN}]
        self.api_key = ""
        self.detokenizes = True
        self.detokenize_hangs = False
        self.names_ids = self.names_usage = True
        self.lag = ""
        self.always_streams = always_streams
        self.detokenized = 0
        self.arrived = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._transports: set[asyncio.BaseTransport] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/responses", self._generate)
        app.router.add_post("/v1/messages", self._generate)
        app.router.add_post("/v1/held", self._held)
        app.router.add_post("/v1/broken", self._broken)
        app.router.add_route("*", "/v1/echo", self._echo)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def kill(self) -> None:
        """As SIGKILL does: nothing listens any more and every connection breaks."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        for transport in tuple(self._transports):
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
        await self.stop()

    async def _pause(self, seconds: float) -> None:
        """An engine that takes its time is what is under test."""
        if seconds:
            await asyncio.sleep(seconds)

    async def _health(self, http: web.Request) -> web.Response:
        await self._pause(self.probe_s)
        if self.probes_hang:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, http: web.Request) -> web.Response:
        if self.api_key and http.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"object": "list", "data": self.cards})

    async def _tokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"tokens": encode((await http.json())["prompt"])})

    async def _detokenize(self, http: web.Request) -> web.Response:
        self.detokenized += 1
        if self.detokenize_hangs:
            await asyncio.Event().wait()
        if not self.detokenizes:
            return web.json_response({"error": "Not Found"}, status=404)
        text = b"".join(map(piece, (await http.json())["tokens"])).decode("utf-8", errors="replace")
        return web.json_response({"prompt": text})

    async def _echo(self, http: web.Request) -> web.Response:
        return web.json_response(
            {
                "method": http.method,
                "query": http.rel_url.raw_query_string,
                "body": (await http.read()).decode(),
            }
        )

    async def _held(self, http: web.Request) -> web.Response:
        await self.hold.wait()
        return web.json_response({})

    async def _broken(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: {}\n\n")
        assert http.transport is not None
        http.transport.abort()
        return response

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        seen = Seen(http.path, body, dict(http.headers))
        self.seen.append(seen)
        self.arrived.set()
        transport = http.transport
        assert transport is not None
        self._transports.add(transport)
        fault = self.faults.popleft() if self.faults else Fault("none", after=-1)
        try:
            return await self._answer(http, body, fault, seen)
        except asyncio.CancelledError:
            seen.aborted = True
            raise
        except ConnectionError:
            seen.aborted = True
            return web.Response(status=499)
        finally:
            self._transports.discard(transport)
            seen.gone.set()

    async def _answer(
        self, http: web.Request, body: dict[str, Any], fault: Fault, seen: Seen
    ) -> web.StreamResponse:
        if fault.kind == "status":
            error = {"error": {"message": "injected", "type": "x", "param": None, "code": fault.status}}
            return web.json_response(error, status=fault.status, headers={"Retry-After": "1"})
        if fault.kind == "reset":
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if fault.kind == "slow_first":
            await self._pause(fault.delay_s)
        if http.path in FOREIGN:
            return await self._foreign(http, fault, seen)
        if not body.get("stream") and not self.always_streams:
            return await self._whole(http, body, fault)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        events = list(self._events(http.path, body))
        sent_tokens = 0
        harmless = fault.kind in ("none", "slow_first", "pause")
        for number, (tokens, event) in enumerate(events):
            due = sent_tokens >= fault.after if fault.events is None else number >= fault.events
            if fault.kind.endswith("_after_finish"):
                due = not event["choices"]
            if due and not harmless:
                await self._fail(http, response, fault, event)
                return response
            if fault.kind == "pause" and sent_tokens == fault.after and tokens:
                await self._pause(fault.delay_s)
            if tokens:
                await self._pause(self.token_s)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            seen.sent_tokens = sent_tokens = sent_tokens + tokens
        if not harmless:
            await self._fail(http, response, fault, None)
            return response
        await response.write(b"data: [DONE]\n\n")
        seen.finished = True
        await response.write_eof()
        return response

    async def _foreign(self, http: web.Request, fault: Fault, seen: Seen) -> web.StreamResponse:
        """A stream of an API that the router does not know; `after` counts events."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        for number, event in enumerate([*FOREIGN[http.path], {}]):
            if number == fault.after:
                await self._fail(http, response, fault, event)
                return response
            if event:
                await self._pause(self.token_s)
                name, data = event["type"], json.dumps(event)
                await response.write(f"event: {name}\ndata: {data}\n\n".encode())
                seen.sent_tokens += 1
        seen.finished = True
        await response.write_eof()
        return response

    async def _fail(
        self, http: web.Request, response: web.StreamResponse, fault: Fault, event: dict[str, Any] | None
    ) -> None:
        """Go wrong."""
        assert http.transport is not None
        kind = fault.kind.removesuffix("_after_finish")
        if kind == "die":
            http.transport.abort()
        elif kind in ("error_event", "client_fault"):
            empty = {"id": "x", "object": "y", "created": 1, "model": MODEL}
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": []}
            choice |= {"delta": {"content": ""}} if "chat" in http.path else {"text": ""}
            await response.write(b"data: " + json.dumps(empty | {"choices": [choice]}).encode() + b"\n\n")
            code = 400 if kind == "client_fault" else 500
            error = {"error": {"message": "EngineDeadError", "type": "x", "param": None, "code": code}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        elif kind == "abort":
            choice = {"index": 0, "logprobs": None, "finish_reason": "abort", "token_ids": []}
            choice |= {"delta": {"content": ""}} if "chat" in http.path else {"text": ""}
            last = {"id": "x", "object": "y", "created": 1, "model": MODEL, "choices": [choice]}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        elif kind == "half_chunk":
            data = b"data: " + json.dumps(event or {"choices": []}).encode()
            await response.write(data[: len(data) // 2])
            await self._pause(0.005)  # for the half to arrive
            http.transport.abort()
        elif kind == "half_eof":
            data = b"data: " + json.dumps(event or {"choices": []}).encode()
            await response.write(data[: len(data) // 2])
        elif kind == "malformed":
            await response.write(b"data: {oops\n\n")
        elif kind == "shape":
            await response.write(b'data: {"choices": [{"index": 0, "text": 5, "delta": 7}]}\n\n')
        elif kind == "not_object":
            await response.write(b"data: [1]\n\n")
        elif kind == "silent":
            await asyncio.Event().wait()
        elif kind == "comments":
            while True:
                await response.write(b": still here\n\n")
                await self._pause(0.02)
        elif kind == "eof":
            pass
        elif kind == "done_without_finish":
            await response.write(b"data: [DONE]\n\n")
        else:
            raise AssertionError(fault.kind)
        await response.write_eof()

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(output tokens in it, event) of an answer, as vLLM streams it."""
        prompt, output, finish = generate(path, body)
        chat = "chat" in path
        wants = bool(body.get("return_token_ids")) and self.names_ids
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {
            "id": f"id-{self.port}-{len(self.seen)}",
            "object": kind,
            "created": self.port,
            "model": MODEL,
        }
        options = body.get("stream_options") or {}

        def usage(done: int) -> dict[str, int]:
            total = len(prompt) + done
            return {"prompt_tokens": len(prompt), "total_tokens": total, "completion_tokens": done}

        for index in range(body.get("n") or 1):
            if chat:
                delta = {"role": "assistant", "content": ""}
                first: dict[str, Any] = {
                    "index": index,
                    "delta": delta,
                    "finish_reason": None,
                    "logprobs": None,
                }
                extra = {"prompt_token_ids": prompt} if wants else {}
                yield 0, head | {"choices": [first]} | extra
            pending = b""
            held = ""
            leaked = any(s <= prompt[-1] < s + len(e) - 1 for s, e in EMOJI.items())
            if leaked:
                pending = b"".join(map(piece, prompt))
            for start in range(0, len(output), self.chunk_tokens):
                ids = output[start : start + self.chunk_tokens]
                last = start + len(ids) == len(output)
                text = ""
                for token in ids:
                    pending += piece(token)
                    try:
                        text += pending.decode()
                        pending = b""
                    except UnicodeDecodeError:
                        continue
                if chat and self.lag:
                    given = len(text) - len(text.lstrip()) if self.lag == "blank" else 0
                    text, held = held + text[:given], text[given:]
                    if last:
                        text += held
                choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
                choice |= {"delta": {"content": text}} if chat else {"text": text}
                if last:
                    choice |= {"finish_reason": finish, "stop_reason": None}
                if wants:
                    choice["token_ids"] = ids
                    if start == 0 and not chat:
                        choice["prompt_token_ids"] = prompt
                event: dict[str, Any] = {**head, "choices": [choice]}
                if options.get("continuous_usage_stats"):
                    event["usage"] = usage(start + len(ids))
                yield len(ids), event
        if options.get("include_usage") and self.names_usage:
            yield 0, head | {"choices": [], "usage": usage(len(output) * (body.get("n") or 1))}

    async def _whole(self, http: web.Request, body: dict[str, Any], fault: Fault) -> web.StreamResponse:
        _, output, finish = generate(http.path, body)
        text = text_of(output)
        choices = []
        for index in range(body.get("n") or 1):
            choice: dict[str, Any] = {"index": index, "finish_reason": finish}
            content = {"message": {"role": "assistant", "content": text}}
            choices.append(choice | (content if "chat" in http.path else {"text": text}))
        if fault.kind == "abort":
            choices[-1]["finish_reason"] = "abort"
        raw = json.dumps({"id": "whole", "choices": choices}).encode()
        if fault.kind == "die":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = len(raw)
            await response.prepare(http)
            await response.write(raw[: len(raw) // 2])
            assert http.transport is not None
            http.transport.abort()
            return response
        return web.Response(body=raw, content_type="application/json")

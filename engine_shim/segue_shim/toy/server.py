"""The toy engine's HTTP: as much of vLLM's OpenAI-compatible API as the router needs.

`/health`, `/v1/models`, `/v1/completions` (streamed, token ids named), `/tokenize`, `/detokenize` and
`/metrics`, on the standard library alone, because the shim brings no packages into an engine. What stands
under `kv_transfer_params.segue` is taken as vLLM's connector takes it: delivered ids become output, said
again. Invariant: a request whose client has left, or that could not be read, keeps nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from typing import Any

import msgspec

from segue_core.messages.request import SegueParams, parse_params
from segue_shim.toy.batch import Request
from segue_shim.toy.engine import ToyEngine
from segue_shim.toy.model import BLOCK_SIZE, UNSEEDED, VOCABULARY, ids_of, text_of

MAX_MODEL_LEN = 4_096
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 4 << 20
IDLE_S = 0.002
"""How soon an idle engine notices a new request."""
LAST_WORDS_S = 1.0
"""How long an engine that stops waits for its clients to read the end of their answers."""
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large"}
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BadRequest(Exception):
    """The client's mistake."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(detail)
        self.status = status


class Server:
    """Serves `engine` under the name `model`; a step takes at least `step_s`."""

    def __init__(self, engine: ToyEngine, model: str, *, step_s: float) -> None:
        self._engine = engine
        self._model = model
        self._step_s = step_s
        self._requests: set[Request] = set()
        self._answering: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    async def run(self, host: str, port: int) -> None:
        """Until SIGTERM or SIGINT. Every answer that is under way then ends with `abort`, as vLLM's do."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        listening = await asyncio.start_server(
            self._serve, host, port, limit=MAX_HEAD_BYTES, reuse_address=True
        )
        await self._step_until_stopped()
        listening.close()
        for request in tuple(self._requests):
            request.emit([], "abort")
            self._engine.end(request)
        if self._answering:
            await asyncio.wait(self._answering, timeout=LAST_WORDS_S)
        self._engine.close()

    async def _step_until_stopped(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            if self._engine.idle:
                await asyncio.sleep(IDLE_S)
                continue
            self._engine.step()
            await asyncio.sleep(max(0.0, began + self._step_s - time.monotonic()))

    # -- connections --------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lost = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError)
        with contextlib.suppress(*lost):  # cancelled: the engine stops
            while await self._serve_one(reader, writer):
                pass
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether another may follow on the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, *_ = [*head[0].split(" "), "", ""]
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])
        }
        try:
            body = await reader.readexactly(_length(headers))
            if (method, path) == ("POST", "/v1/completions"):
                await self._complete(reader, writer, _json(body))
                return False
            status, kind, answer = 200, "application/json", self._answer(method, path, body)
            if isinstance(answer, str):
                kind, payload = "text/plain", answer.encode()
            else:
                payload = msgspec.json.encode(answer)
        except BadRequest as error:
            status, kind = error.status, "application/json"
            payload = msgspec.json.encode({"error": {"message": str(error), "code": status}})
        lines = [
            f"HTTP/1.1 {status} {REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(payload)}",
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)
        await writer.drain()
        return status == 200 and headers.get("connection", "").lower() != "close"

    def _answer(self, method: str, path: str, body: bytes) -> Any:
        if (method, path) == ("GET", "/health"):
            return {}
        if (method, path) == ("GET", "/metrics"):
            return self._engine.metrics()
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": self._model, "object": "model", "root": self._model, "max_model_len": MAX_MODEL_LEN}
            return {"object": "list", "data": [card]}
        if (method, path) == ("POST", "/tokenize"):
            ids = _ids(_json(body).get("prompt"))
            return {"tokens": ids, "count": len(ids), "max_model_len": MAX_MODEL_LEN}
        if (method, path) == ("POST", "/detokenize"):
            return {"prompt": text_of(_ids(_json(body).get("tokens")))}
        raise BadRequest(f"{method} {path} is not served here", 404)

    # -- generations --------------------------------------------------------------------------

    async def _complete(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> None:
        events: asyncio.Queue[tuple[list[int], str]] = asyncio.Queue()
        request = _request(body, self._engine.batch.num_blocks, events)
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
        self._engine.add(request)
        self._requests.add(request)
        answering = asyncio.current_task()
        assert answering is not None
        self._answering.add(answering)
        gone = asyncio.ensure_future(reader.read(1))
        gone.add_done_callback(lambda _: events.put_nowait(([], "gone")))
        try:
            await self._stream(writer, request, events, body)
        finally:
            self._requests.discard(request)
            self._answering.discard(answering)
            self._engine.end(request)
            gone.cancel()

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        request: Request,
        events: asyncio.Queue[tuple[list[int], str]],
        body: dict[str, Any],
    ) -> None:
        first = {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "text_completion",
            "created": int(time.time()),
        }
        first["model"] = self._model
        prompt: list[int] | None = request.prompt if body.get("return_token_ids") else None
        while True:
            ids, finish = await events.get()
            if finish == "gone":
                return
            choice: dict[str, Any] = {"index": 0, "text": text_of(ids), "logprobs": None}
            choice |= {"finish_reason": finish or None, "stop_reason": None}
            if body.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": prompt}
                prompt = None
            _event(writer, first | {"choices": [choice]})
            await writer.drain()
            if finish:
                break
        if (body.get("stream_options") or {}).get("include_usage"):
            done, asked = len(request.output), len(request.prompt)
            usage = {"prompt_tokens": asked, "completion_tokens": done, "total_tokens": asked + done}
            _event(writer, first | {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _request(body: dict[str, Any], num_blocks: int, events: asyncio.Queue[tuple[list[int], str]]) -> Request:
    """A generation as it was asked for. Raises BadRequest."""
    if body.get("stream") is not True or body.get("n") not in (None, 1):
        raise BadRequest("this engine streams one choice: set `stream` to true and leave `n` out")
    prompt, limit = _ids(body.get("prompt")), body.get("max_tokens", 16)
    seed = body.get("seed")
    if not isinstance(limit, int) or limit < 1 or not isinstance(seed, (int, type(None))):
        raise BadRequest("`max_tokens` is a number from 1, `seed` a number")
    longest = min(MAX_MODEL_LEN, (num_blocks - 1) * BLOCK_SIZE)
    if not prompt or len(prompt) + limit > longest:
        raise BadRequest(f"prompt and answer have 2 to {longest} tokens, not {len(prompt)} + {limit}")
    params = parse_params(body.get("kv_transfer_params")) or SegueParams(seq="", epoch=0)
    delivered = list(params.delivered[0].ids) if params.delivered else []
    greedy = body.get("temperature") == 0
    return Request(
        prompt,
        limit,
        lambda ids, finish: events.put_nowait((ids, finish)),
        seed=UNSEEDED if greedy or seed is None else seed,
        seq=params.seq,
        epoch=params.epoch,
        resume=params.resume,
        replication=params.replication,
        delivered=delivered,
    )


def _length(headers: dict[str, str]) -> int:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or "transfer-encoding" in headers:
        raise BadRequest("a body needs a Content-Length")
    if int(length) > MAX_BODY_BYTES:
        raise BadRequest(f"a body has at most {MAX_BODY_BYTES} bytes", 413)
    return int(length)


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found


def _ids(value: object) -> list[int]:
    if isinstance(value, str):
        return ids_of(value)
    if isinstance(value, list) and all(type(token) is int and 0 <= token < VOCABULARY for token in value):
        return value
    raise BadRequest(f"expected text, or a list of token ids below {VOCABULARY}")


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + msgspec.json.encode(event) + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

"""One request to one engine, relayed to the client until the answer is complete or the engine fails.

Owns what an engine's status and events mean: output, the client's own mistake, busy, or a failure. It never
decides what happens next. Invariant: what is good before a failure reaches the client first.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import ClientResponse, web

from segue_core.messages.request import choice_seq
from segue_router.chronicle import Chronicle
from segue_router.client import ClientStream, answer_headers
from segue_router.context import Context
from segue_router.engine import Engine
from segue_router.errors import (
    EngineFault,
    MalformedEvent,
    ReplayDiffers,
    UpstreamFailure,
    check_not_interrupted,
)
from segue_router.request import GenerationRequest
from segue_router.resume import Move, Restart
from segue_router.transcript import Transcript
from segue_router.upstream import Attempt, now_ms

BUSY_STATUS = frozenset({429, 503})
MAX_ERROR_BYTES = 1 << 20


class EngineAnswer(Exception):
    """An engine's own answer for the client: an error that is the client's affair, or the last word."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = headers


class Busy(UpstreamFailure):
    """429 or 503 before the first byte; `answer` is what the engine said."""

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__("http_status", f"the engine answers {answer.status}")
        self.answer = answer


class Rejected(UpstreamFailure):
    """The engine is well, but it cannot go on with this answer; `reason` is a label of a metric.

    rejected: 4xx to a resumed request. replay_differs: it says something else than what the client has.
    """

    def __init__(self, detail: str, reason: str = "rejected") -> None:
        super().__init__("http_status", detail)
        self.reason = reason


class Exchange:
    """Of one generation; `run` once for each engine. `attempt` is the latest."""

    def __init__(
        self,
        context: Context,
        request: GenerationRequest,
        seq: str,
        track: Transcript,
        client: ClientStream,
        chronicle: Chronicle,
        headers: dict[str, str],
    ) -> None:
        self.attempt: Attempt | None = None
        self.gained = False
        """Whether the client got something new from the latest engine."""
        self._engine: Engine | None = None
        self._context = context
        self._request = request
        self._seq = seq
        self._track = track
        self._client = client
        self._chronicle = chronicle
        self._headers = headers

    async def run(self, engine: Engine, plan: Move) -> web.Response | None:
        """Let `engine` go on by `plan`, to the end: the whole answer, or None if the track has it.

        Raises UpstreamFailure, EngineAnswer.
        """
        limits, timeouts = self._context.settings.limits, self._context.settings.timeouts
        whole = self._request.mode == "whole"
        self.attempt = attempt = Attempt(
            max_event_bytes=limits.max_event_bytes, whole=whole, count=self._delivered
        )
        self.gained = False
        self._engine = engine
        engine.attempts.add(attempt)
        leaves = False
        if self._context.cutting_off:  # nobody will say so any more: it was between two engines
            attempt.doom("router_stopping", "the router is shutting down")
        try:
            body = msgspec.json.encode(plan.body)
            self._chronicle.sent(engine.name)
            response = await attempt.open(
                self._context.data,
                "POST",
                engine.url + plan.path,
                body=body,
                headers=self._headers,
                connect_ms=timeouts.connect_ms,
            )
            if response.status != 200:
                await self._not_ok(attempt, response.status, answer_headers(response.headers), plan)
            if whole:
                return await self._whole(attempt, response)
            if response.content_type != "text/event-stream":
                raise UpstreamFailure("malformed_event", f"a stream of type {response.content_type}")
            await self._pump(engine, attempt, plan)
            return None
        except UpstreamFailure as failure:
            leaves = failure.cause == "drained"
            raise
        finally:
            if not leaves:
                self.let_go()

    def let_go(self) -> None:
        """Close the latest attempt, unless that is done. One that is drained stays open until the next
        engine's daemon has what it needs: closing it aborts the generation, and ends its replication."""
        if self._engine is not None and self.attempt is not None:
            self.attempt.close()
            self._engine.attempts.discard(self.attempt)
            self._engine = None

    async def _whole(self, attempt: Attempt, response: ClientResponse) -> web.Response:
        raw = await attempt.read_all(self._context.settings.limits.max_body_bytes)
        if response.content_type == "text/event-stream":
            raise UpstreamFailure("malformed_event", "a stream that was not asked for")
        try:
            for reason in _finish_reasons(raw):
                check_not_interrupted(reason)
        except EngineFault as fault:
            raise UpstreamFailure("error_event", str(fault)) from fault
        self._chronicle.gained(now_ms())
        self._chronicle.ends("ok")
        return self._client.answer(200, raw, answer_headers(response.headers))

    async def _not_ok(self, attempt: Attempt, status: int, headers: dict[str, str], plan: Move) -> None:
        raw = await attempt.read_all(MAX_ERROR_BYTES)
        answer = EngineAnswer(status, raw, headers)
        if status in BUSY_STATUS:
            raise Busy(answer)
        detail = f"the engine answers {status}: {raw[:300].decode(errors='replace')}"
        if status >= 500:
            raise UpstreamFailure("http_status", detail)
        raise answer if isinstance(plan, Restart) else Rejected(detail)

    async def _pump(self, engine: Engine, attempt: Attempt, plan: Move) -> None:
        """Relay events until `[DONE]`."""
        track = self._track
        while not track.done:
            payloads = await attempt.read()
            out: list[bytes] = []
            failure: UpstreamFailure | EngineAnswer | None = None
            gains = track.gains
            for payload in payloads:
                try:
                    out.append(track.absorb(payload))
                except ReplayDiffers as error:
                    failure = Rejected(str(error), "replay_differs")
                except MalformedEvent as error:
                    failure = UpstreamFailure("malformed_event", str(error))
                except EngineFault as fault:
                    failure = _meaning(fault, plan)
                if failure is not None or track.done:
                    break
            if isinstance(failure, EngineAnswer) and not track.progress.client_has:
                raise failure  # nothing but a preamble: there can still be an HTTP status
            data = out[0] if len(out) == 1 else b"".join(out)
            if track.gains > gains:
                attempt.streaming = True
                now = attempt.last_byte_ms or now_ms()
                engine.progressed(now)
                if data or not self._request.stream:
                    self._chronicle.gained(now)
                    self.gained = True
            if data:
                await self._client.write(data)
            if failure is not None:
                raise failure
        if track.finish_reason is None:
            raise UpstreamFailure("stream_eof", "[DONE] without a finish_reason")

    def _delivered(self) -> dict[str, int]:
        """Tokens (prompt and output) that have arrived, by sequence."""
        return {choice_seq(self._seq, index): tokens for index, tokens in self._track.arrived.items()}


def _meaning(fault: EngineFault, plan: Move) -> UpstreamFailure | EngineAnswer:
    """What an in-band error is: a failure, or the client's affair."""
    if not 400 <= fault.code < 500 or fault.code == 429:
        return UpstreamFailure("error_event", str(fault))
    if not isinstance(plan, Restart):
        return Rejected(str(fault))
    return EngineAnswer(fault.code, msgspec.json.encode(fault.body), {"Content-Type": "application/json"})


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


def _finish_reasons(raw: bytes) -> list[Any]:
    """Of an ordinary answer; none if it is not one (the client may make sense of it)."""
    try:
        return [choice.finish_reason for choice in msgspec.json.decode(raw, type=_Answer).choices]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []

"""Errors as clients of the OpenAI API know them, and the failures of engines the router tells apart."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from segue_core.errors import SegueError

Cause = Literal[
    "stream_eof",
    "error_event",
    "malformed_event",
    "stalled",
    "daemon_dead",
    "connect",
    "http_status",
    "router_stopping",
    "drained",
]
"""How a failure was detected. stream_eof: the connection broke, or the stream ended without a finish.
daemon_dead: the daemon said so while the stream was still open. connect: nothing listens there. drained: no
failure: the engine is being emptied, and the answer moves on purpose."""


class ClientError(SegueError):
    """The request cannot be served as it is; `status` and `code` are for the client."""

    def __init__(self, status: int, message: str, *, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind


class UpstreamFailure(SegueError):
    """An engine's answer failed; what was good before it counts."""

    def __init__(self, cause: Cause, detail: str, *, refused: bool = False) -> None:
        super().__init__(detail)
        self.cause: Cause = cause
        self.refused = refused


class MalformedEvent(SegueError):
    """An event of an engine's stream is not JSON or not of the expected shape."""


class ReplayDiffers(MalformedEvent):
    """An engine that went on with an answer says something else than what the client has of it."""


class EngineFault(SegueError):
    """An engine said in-band that the request failed. `code`: its HTTP-like code, 0 if it gave none."""

    def __init__(self, message: str, code: int, body: dict[str, Any]) -> None:
        super().__init__(message)
        self.code = code
        self.body = body


def error_body(message: str, *, kind: str, code: str | int | None) -> bytes:
    """The OpenAI form of an error."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def fault_in(body: dict[str, Any]) -> EngineFault | None:
    """The error that `body` carries, or None if it is not an error."""
    error = body.get("error")
    if error is None and body.get("object") != "error":
        return None
    fields = error if isinstance(error, dict) else body
    message = fields.get("message")
    code = fields.get("code")
    text = message if isinstance(message, str) else str(error)
    number = code if isinstance(code, int) else 0
    if isinstance(code, str) and re.fullmatch("[0-9]{1,9}", code):
        number = int(code)
    return EngineFault(text[:2000], number, body)


INTERRUPTED = frozenset({"abort", "error"})
"""Values of `finish_reason` with which an engine ends what it has not finished: vLLM says `abort` to every
request when it is stopped, paused or put to sleep."""


def check_not_interrupted(finish_reason: object) -> None:
    """Raise EngineFault if the engine broke the answer off instead of finishing it."""
    if isinstance(finish_reason, str) and finish_reason in INTERRUPTED:
        raise EngineFault(f"the engine broke the answer off (finish_reason {finish_reason!r})", 0, {})

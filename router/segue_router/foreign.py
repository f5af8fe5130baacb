"""The APIs that the router passes through without reading them: how each says that something failed.

Owns the form of errors (OpenAI Responses, Anthropic Messages, anything else) and the cutting of a passed
stream into whole events. Invariants: bytes are passed on unchanged; half an event is passed on only at an
orderly end; a stream that breaks before its API's last event gets an error instead, after that event none.
Sources: the streaming events of OpenAI's Responses API and of Anthropic's Messages API.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from segue_router.errors import ClientError, UpstreamFailure, error_body

Api = Literal["responses", "messages", "other"]
LAST_EVENT: dict[Api, re.Pattern[bytes]] = {
    "responses": re.compile(
        rb"^event: ?(?:response\.(?:completed|failed|incomplete)|error)\r?$"
        rb'|^data: ?\{"type": ?"(?:response\.(?:completed|failed|incomplete)|error)"',
        re.MULTILINE,
    ),
    "messages": re.compile(
        rb'^event: ?(?:message_stop|error)\r?$|^data: ?\{"type": ?"(?:message_stop|error)"', re.MULTILINE
    ),
    "other": re.compile(rb"^data: ?\[DONE\]\r?$", re.MULTILINE),
}
"""After one of these nothing is missing. Text of an answer cannot look so: JSON has no raw line breaks."""
NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
END_OF_EVENT = (b"\n\n", b"\r\n\r\n", b"\r\r")
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def api_of(path: str) -> Api:
    """Whose errors a client of `path` understands."""
    if path == "/v1/responses" or path.startswith("/v1/responses/"):
        return "responses"
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "messages"
    return "other"


def error_json(api: Api, error: ClientError) -> bytes:
    """The body of an error answer, before anything else was sent."""
    if api == "messages":
        return _anthropic(ANTHROPIC_TYPES.get(error.status, "api_error"), str(error))
    return error_body(str(error), kind=error.kind, code=error.code)


class PassedStream:
    """One stream of events on its way through."""

    def __init__(self, api: Api, max_event_bytes: int) -> None:
        self.ended = False
        """Whether the event came with which the API ends a stream."""
        self._api = api
        self._max_event_bytes = max_event_bytes
        self._half = b""
        self._number = -1

    @property
    def truncated(self) -> bool:
        """Whether an end now is not the answer's. Of unknown APIs nobody can say."""
        return not self.ended and self._api != "other"

    def take(self, chunk: bytes) -> bytes:
        """The whole events up to here. Raises UpstreamFailure beyond the limit of one event."""
        data = self._half + chunk
        end = max(at + len(mark) if (at := data.rfind(mark)) >= 0 else 0 for mark in END_OF_EVENT)
        whole, self._half = data[:end], data[end:]
        if len(self._half) > self._max_event_bytes:
            raise UpstreamFailure("malformed_event", f"an event is larger than {self._max_event_bytes} bytes")
        if whole:
            self.ended = self.ended or LAST_EVENT[self._api].search(whole) is not None
            if self._api == "responses" and (numbers := NUMBER.findall(whole)):
                self._number = int(numbers[-1])
        return whole

    def rest(self) -> bytes:
        """What is left at an orderly end, such as a last event without its empty line."""
        rest, self._half = self._half, b""
        return rest

    def error(self, message: str, code: str) -> bytes:
        """The event that says that the stream ends too early."""
        if self._api == "messages":
            data = _anthropic("api_error", message)
        elif self._api == "responses":
            fields: dict[str, Any] = {"type": "error", "code": code, "message": message, "param": None}
            data = msgspec.json.encode(fields | {"sequence_number": self._number + 1})
        else:
            data = error_body(message, kind="server_error", code=code)
        return b"event: error\ndata: " + data + b"\n\n"


def _anthropic(kind: str, message: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

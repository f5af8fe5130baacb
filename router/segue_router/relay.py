"""The relay: a stream the router cannot continue (several choices, echo...), passed on event by event.

Owns honesty only: a failure is never passed on as output, and `[DONE]` is only said when every choice
finished. Events without content wait for the first that has some, so that an engine that fails before
it can be replaced unnoticed.
"""

from __future__ import annotations

from typing import Any

from segue_router.errors import MalformedEvent, check_not_interrupted
from segue_router.request import GenerationRequest
from segue_router.resume import Progress
from segue_router.sse import DONE, event
from segue_router.transcript import PLAIN_DELTA, decode_event


class Relay:
    """Same interface as Transcript, for requests of mode `relay`."""

    def __init__(self, request: GenerationRequest) -> None:
        self.done = False
        self.delivered_tokens = 0
        self.gains = 0
        """Events that brought something of the answer."""
        self.prompt_ids: list[int] | None = None
        self._request = request
        self._held: list[bytes] = []
        self._sent = self._usage_sent = False
        self._finished: set[int] = set()

    @property
    def finish_reason(self) -> str | None:
        """Of the answer as a whole: set once every choice has its own."""
        return "stop" if len(self._finished) == self._request.choices else None

    @property
    def progress(self) -> Progress:
        """What is known now, for the decision how to resume."""
        return Progress(
            client_has=self._sent,
            finish_reason=self.finish_reason,
            closable=self._usage_sent or not self._request.include_usage,
            ids_known=False,
        )

    def next_engine(self, *, by_ids: bool, given_back: int = 0) -> None:
        """Another engine starts from the beginning; the client has nothing yet."""
        assert not by_ids and not self._sent
        self.done = False
        self._held, self._finished = [], set()

    def absorb(self, payload: bytes) -> bytes:
        """Take one event; returns what the client gets for it. Raises MalformedEvent, EngineFault."""
        if payload == DONE:
            self.done = True
            return b""
        choices = decode_event(payload).get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise MalformedEvent("an event without `choices`")
        for choice in choices:
            check_not_interrupted(choice.get("finish_reason"))
        self._usage_sent = self._usage_sent or not choices
        for choice in choices:
            if choice.get("finish_reason") is not None:
                self._finished.add(choice.get("index", 0))
        self._held.append(event(payload.replace(b"\n", b"")))
        if all(map(_is_quiet, choices)) and choices:
            return b""
        self.gains += 1
        self._sent = True
        out = b"".join(self._held)
        self._held = []
        return out

    def finish(self, reason: str) -> bytes:
        """Nothing to say: every choice said its own finish."""
        return b""

    def closing(self) -> bytes:
        """The end of the stream."""
        return event(DONE)


def _is_quiet(choice: dict[str, Any]) -> bool:
    """Nothing in it that a client would miss: what engines send before the first token and before failing."""
    if choice.get("finish_reason") is not None or choice.get("logprobs") is not None or choice.get("text"):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return True
    return not delta.get("content") and not any(v for k, v in delta.items() if k not in PLAIN_DELTA)

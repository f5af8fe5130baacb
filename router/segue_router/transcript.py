"""The transcript: what the client has and what the engines said, joined into one stream.

Events of the first engine and of those that took over go in; bytes for the client come out. Invariants:
one id, one `created`, one model, one role preamble a choice; no id or text twice; ids are recorded before
their text is handed out; text is handed out only up to the last whole character, so that what the client has
is always a place where another engine can go on. It never decides what to do about a failure.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from segue_router import events
from segue_router.choice import Choice, Piece
from segue_router.errors import MalformedEvent, ReplayDiffers, check_not_interrupted
from segue_router.events import PLAIN_DELTA, choices_in, decode_event, event_without_ids, piece_in
from segue_router.obstacles import Api
from segue_router.request import GenerationRequest
from segue_router.resume import Progress
from segue_router.seam import REPLACEMENT
from segue_router.sse import DONE, event

ABOUT_ITSELF = ("system_fingerprint", "metrics")
"""What an engine says of itself beside an answer."""
MAX_CHOICES = 1_024
UNCOUNTABLE = frozenset({"several_prompts", "n", "beam_search"})
"""Obstacles with which the ids that engines name are not all that usage counts."""
How = Literal["restart", "exact", "by_ids"]


class Transcript:
    """Of one answer. Feed events with `absorb`; call `next_engine` before another engine's."""

    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self.done = False
        self.prompt_ids: list[int] | None = None
        self.choices = [Choice(index) for index in range(min(request.choices, MAX_CHOICES))]
        self.gains = 0
        """Events that brought something new of the answer."""
        self.id: Any = None
        self.created: Any = None
        self.model: Any = None
        self.extra: dict[str, Any] = {}
        self.role = "assistant"
        self._request = request
        self._max_tokens = max_tokens
        self._kept = 0
        self._how: How = "restart"
        self._first = True
        """The client's stream is the engine's own: nothing has to be renamed."""
        self._client_has = self._joined = self._parsed = self._overflow = False
        self._ids_known = True
        self._usage_chunk: dict[str, Any] | None = None
        self._object = "chat.completion.chunk" if request.api == "chat" else "text_completion"
        self._quick = events.quick_chat if request.api == "chat" else events.quick_text

    @property
    def finish_reason(self) -> str | None:
        """Of the answer as a whole: set once every choice has its own."""
        reasons = [choice.finish_reason for choice in self.choices]
        if any(reason is None for reason in reasons) or len(reasons) < self._request.choices:
            return None
        return reasons[0]

    @property
    def delivered_tokens(self) -> int:
        """Tokens whose text was handed out, over all choices."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def progress(self) -> Progress:
        """What is known now, for the decision how to resume."""
        first = self.choices[0]
        return Progress(
            client_has=self._client_has and self._request.stream,
            prompt_ids=self.prompt_ids,
            choices=tuple(choice.progress for choice in self.choices),
            finish_reason=self.finish_reason,
            closable=self._counted or self._usage_chunk is not None or not self._owes_usage,
            counted=self._request.api == "chat" and self._owes_usage and self._usage_chunk is None,
            ids_known=self._ids_known and self.prompt_ids is not None,
            overflow=self._overflow,
            whole_characters=first.whole,
            parsed=self._parsed,
            single=first.single,
            text_may_lag=not first.single or (self._request.api == "chat" and self._how != "by_ids"),
            recent_text=first.recent_text,
        )

    @property
    def _api(self) -> Api:
        """In whose form the present engine speaks."""
        return "completions" if self._how == "by_ids" else self._request.api

    @property
    def _owes_usage(self) -> bool:
        return self._request.include_usage or not self._request.stream

    @property
    def _counted(self) -> bool:
        request = self._request
        countable = request.exact_obstacle not in UNCOUNTABLE and request.choices == len(self.choices)
        return countable and self._ids_known and self.prompt_ids is not None

    @property
    def arrived(self) -> dict[int, int]:
        """Tokens (prompt and output) that came, by unfinished choice; empty if engines do not name all."""
        if not self._ids_known or self.prompt_ids is None:
            return {}
        prompt = len(self.prompt_ids)
        return {choice.index: prompt + choice.arrived for choice in self.choices if not choice.finish_reason}

    @property
    def usage(self) -> dict[str, Any] | None:
        """One for the whole answer: the engine's own if it counted all of it, else counted. None: unknown."""
        if self._usage_chunk is not None and not self._joined:
            own: dict[str, Any] = self._usage_chunk["usage"]
            return own
        if not self._counted:
            return None
        prompt, completion = len(self.prompt_ids or ()), self.delivered_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }

    def next_engine(self, how: How, *, given_back: int = 0) -> None:
        """Another engine goes on: from the start, by saying it all again, or after what was delivered."""
        self.done = False
        self._how = how
        self._usage_chunk = None
        self._first = self._first and self.id is None
        self._joined = how == "by_ids"
        if how == "exact":
            for choice in self.choices:
                choice.replay()
        elif how == "by_ids":
            self.choices[0].go_on_after(given_back, keep_sent=self._request.wants_ids)
        else:
            assert not (self._client_has and self._request.stream), "the client has part of the answer"
            for choice in self.choices:
                choice.forget()
            self.prompt_ids = None
            self.extra = {}
            self._kept = 0
            self._client_has = self._parsed = self._overflow = False
            self._ids_known = True

    def absorb(self, payload: bytes) -> bytes:
        """Take one event; returns what the client gets for it.

        Raises MalformedEvent (ReplayDiffers), EngineFault.
        """
        if payload == DONE:
            self.done = True
            return b""
        if self._first and (quick := self._take_quickly(payload)) is not None:
            return quick
        chunk = decode_event(payload)
        choices = choices_in(chunk)
        if self.id is None:
            self.id, self.created, self.model = chunk.get("id"), chunk.get("created"), chunk.get("model")
            self._object = chunk.get("object") or self._object
        if not choices:
            return self._take_usage(chunk)
        if len(choices) == 1:
            return self._take_choice(chunk, choices[0])
        for raw in choices:  # before any of them counts: a failure in one must not cost what another said
            self._choice(raw.get("index", 0))
            check_not_interrupted(piece_in(self._api, raw)[0].finish_reason)
        return b"".join(self._take_choice(dict(chunk), choice) for choice in choices)

    def finish(self, reason: str) -> bytes:
        """Say that the answer is complete, if the client has not heard it yet."""
        out = b""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = reason
                raw = {"index": choice.index, "logprobs": None, "finish_reason": reason}
                out += self._emit({}, raw, choice, Piece(finish_reason=reason))
        return out

    def closing(self) -> bytes:
        """The end of a stream whose finish was said: the usage if asked for and known, and [DONE]."""
        out = b""
        if self._request.include_usage and self.usage is not None:
            chunk = dict(self._usage_chunk or {"choices": []})
            chunk.update(id=self.id, object=self._object, created=self.created, model=self.model)
            chunk["usage"] = self.usage
            out = event(msgspec.json.encode(chunk))
        return out + event(DONE)

    def _take_quickly(self, payload: bytes) -> bytes | None:
        """The usual event of the first engine: its bytes, less the ids. None: it is not a usual one."""
        found = self._quick(payload)
        if found is None or self.id is None:
            return None
        index, text, ids = found
        if not 0 <= index < len(self.choices) or not text or not ids or text[-1] == REPLACEMENT:
            return None
        choice = self.choices[index]
        if not choice.plain or not choice.prompt_sent:
            return None
        out: bytes | None = b""
        if self._request.stream:
            out = event(payload) if self._request.wants_ids else event_without_ids(payload)
            if out is None or b"\n" in payload:
                return None
        choice.take_plain(text, ids)
        self.gains += 1
        self._client_has = True
        self._keep(len(ids), choice)
        return out

    def _take_usage(self, chunk: dict[str, Any]) -> bytes:
        self._note_extra(chunk)
        if isinstance(chunk.get("usage"), dict):
            self._usage_chunk = chunk
        return b""

    def _take_choice(self, chunk: dict[str, Any], raw: dict[str, Any]) -> bytes:
        choice = self._choice(raw.get("index", 0))
        piece, role, named = piece_in(self._api, raw)
        check_not_interrupted(piece.finish_reason)
        prompt = None if self._how == "by_ids" else self._prompt_in(chunk, raw)
        if self._request.echoed and prompt is not None:
            piece.text = self._request.echoed + piece.text
        says = piece.brings or piece.finish_reason is not None
        if choice.over or (choice.finish_reason is not None and not says):
            return b""
        preamble = self._preamble(chunk, raw, choice, role) if role else b""
        if role and not says:
            self._note_prompt(prompt)
            return preamble
        known = len(choice.ids)
        new = choice.take(piece)
        self._note_prompt(prompt)
        self._note_extra(chunk)
        if piece.finish_reason is not None and isinstance(chunk.get("usage"), dict):
            self._usage_chunk = {**chunk, "choices": []}  # some engines say it there
        self._ids_known = self._ids_known and (named or not piece.brings) and not piece.odd
        if new is None:
            self.gains += len(choice.ids) > known
            return preamble
        self._parsed = self._parsed or new.parsed
        if new.brings or new.finish_reason is not None:
            self.gains += 1
            self._client_has = True
        return preamble + self._hand_out(chunk, raw, choice, new)

    def _hand_out(self, chunk: dict[str, Any], raw: dict[str, Any], choice: Choice, new: Piece) -> bytes:
        out = b""
        said = new.text or new.parsed or new.logprobs or new.finish_reason
        if said or (new.ids and self._request.wants_ids):
            out = self._emit(chunk, raw, choice, new)
        self._keep(len(new.ids), choice)
        return out

    def _choice(self, index: object) -> Choice:
        """The choice of that number. An engine may have its own idea of how many were asked for."""
        if type(index) is not int or not 0 <= index < MAX_CHOICES:
            raise MalformedEvent("an event of a choice that cannot be")
        if index >= len(self.choices):
            if self._request.choices == 1 and not self._request.exact_obstacle:
                raise MalformedEvent("an event whose choice is not choice 0")
            self.choices += [Choice(number) for number in range(len(self.choices), index + 1)]
        return self.choices[index]

    def _preamble(self, chunk: dict[str, Any], raw: dict[str, Any], choice: Choice, role: str) -> bytes:
        """The role, once a choice; the event's other content goes on without it."""
        raw["delta"].pop("role")
        if choice.role_sent:
            return b""
        choice.role_sent, self.role = True, role
        first = {"index": choice.index, "delta": {"role": role, "content": ""}}
        first |= {"logprobs": None, "finish_reason": None}
        return self._emit(dict(chunk), first, choice, Piece())

    def _prompt_in(self, chunk: dict[str, Any], raw: dict[str, Any]) -> list[int] | None:
        """The prompt's ids, if the event has them. Raises ReplayDiffers if they are another prompt's."""
        source = chunk if self._request.api == "chat" else raw
        prompt = events.ids_in(source.get("prompt_token_ids"))
        if self._how == "exact" and prompt is not None and prompt != self.prompt_ids:
            raise ReplayDiffers("another prompt than the one the answer began with")
        return prompt

    def _note_prompt(self, prompt: list[int] | None) -> None:
        if self.prompt_ids is None and prompt is not None:
            self.prompt_ids = prompt
            self._overflow = self._overflow or len(prompt) > self._max_tokens

    def _note_extra(self, chunk: dict[str, Any]) -> None:
        self.extra |= {key: chunk[key] for key in ABOUT_ITSELF if chunk.get(key)}

    def _keep(self, tokens: int, choice: Choice) -> None:
        """Bound what is kept for a continuation: an answer beyond it goes on, unprotected."""
        self._kept += tokens
        if self._overflow or self._kept + len(self.prompt_ids or ()) > self._max_tokens:
            self._overflow = True
            owed = not self._request.stream
            choice.shed(ids=not (owed and self._request.wants_ids), texts=not owed)

    def _emit(self, chunk: dict[str, Any], raw: dict[str, Any], choice: Choice, new: Piece) -> bytes:
        """The event for the client, in its own API's form and with its own stream's names."""
        request = self._request
        prompt = chunk.pop("prompt_token_ids", None) or raw.pop("prompt_token_ids", None)
        raw.pop("prompt_token_ids", None)
        first, choice.prompt_sent = not choice.prompt_sent, True
        if not request.stream:
            return b""
        chunk["id"], chunk["created"], chunk["model"] = self.id, self.created, self.model
        chunk["object"] = self._object
        raw.pop("token_ids", None)
        raw["logprobs"] = new.logprobs
        if request.api == "chat":
            self._to_chat(raw, new)
        else:
            raw["text"] = new.text
        if request.wants_ids:
            if first and (prompt or self.prompt_ids) is not None:
                (chunk if request.api == "chat" else raw)["prompt_token_ids"] = prompt or self.prompt_ids
            if new.ids or "role" not in raw.get("delta", ()):
                raw["token_ids"] = new.ids
        chunk["choices"] = [raw]
        if not request.continuous_usage:
            chunk.pop("usage", None)
        elif self._joined or "usage" not in chunk:
            chunk["usage"] = self.usage
        return event(msgspec.json.encode(chunk))

    def _to_chat(self, raw: dict[str, Any], new: Piece) -> None:
        delta = {} if self._how == "by_ids" else raw.get("delta", {"content": ""})
        raw.pop("text", None)
        raw.pop("prompt_logprobs", None)
        for name in [name for name, value in delta.items() if value and name not in PLAIN_DELTA]:
            if isinstance(delta[name], str) and name not in new.more:
                del delta[name]
        delta.update(new.more)
        if "tool_calls" in delta:
            delta["tool_calls"] = new.calls
            if not new.calls:
                del delta["tool_calls"]
        if new.text or self._how == "by_ids" or delta.get("content") is not None:
            delta["content"] = new.text
        raw["delta"] = delta

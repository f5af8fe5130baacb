"""The transcript: what the client has and what the engines said, joined into one stream.

Events of the first engine and of those that took over go in; bytes for the client come out. Invariants:
one id, one `created`, one model, one role preamble; no id or text twice; ids are recorded before their
text is handed out; text is handed out only up to the last whole character, so that what the client has
is always a place where another engine can go on. It never decides what to do about a failure.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from segue_router.errors import MalformedEvent, check_not_interrupted, fault_in
from segue_router.request import GenerationRequest
from segue_router.resume import Progress
from segue_router.seam import REPLACEMENT, SEAM_IDS
from segue_router.sse import DONE, event

MAX_HELD_TOKENS = 16
"""Text that still ends in U+FFFD after so many tokens is meant: it is handed out as it is."""
ABOUT_ITSELF = ("system_fingerprint", "metrics")
"""What an engine says of itself beside an answer."""
PLAIN_DELTA = frozenset({"role", "content"})


class Transcript:
    """Of one answer with one choice. Feed events with `absorb`; call `next_engine` before another one's."""

    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self.done = False
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.prompt_ids: list[int] | None = None
        self.delivered_ids: list[int] = []
        self.delivered_tokens = 0
        self.gains = 0
        """Events that brought something of the answer."""
        self.texts: dict[str, list[str]] = {}
        """Only of an answer that is assembled: pieces by field (content, reasoning...)."""
        self.id: Any = None
        self.created: Any = None
        self.model: Any = None
        self.extra: dict[str, Any] = {}
        self.role = "assistant"
        self._request = request
        self._max_tokens = max_tokens
        self._held_ids: list[int] = []
        self._held_text = ""
        self._role_sent = self._prompt_ids_sent = False
        self._client_has = self._by_ids = self._joined = False
        self._ids_known = self._whole = self._single = True
        self._parsed = self._overflow = False
        self._usage_chunk: dict[str, Any] | None = None
        self._recent: deque[str] = deque(maxlen=SEAM_IDS)
        self._again: list[int] = []
        """Ids that the client has and that were given back: they are not handed out twice."""

    @property
    def progress(self) -> Progress:
        """What is known now, for the decision how to resume."""
        return Progress(
            client_has=self._client_has and self._request.stream,
            prompt_ids=self.prompt_ids,
            delivered_ids=self.delivered_ids,
            held_tokens=len(self._held_ids),
            finish_reason=self.finish_reason,
            closable=self._counted or self._usage_chunk is not None or not self._owes_usage,
            ids_known=self._ids_known and self.prompt_ids is not None,
            overflow=self._overflow,
            whole_characters=self._whole,
            parsed=self._parsed,
            single=self._single,
            text_may_lag=not self._single or (self._request.api == "chat" and not self._by_ids),
            recent_text="".join(self._recent),
        )

    @property
    def _owes_usage(self) -> bool:
        return self._request.include_usage or not self._request.stream

    @property
    def _counted(self) -> bool:
        return self._ids_known and self.prompt_ids is not None

    @property
    def usage(self) -> dict[str, Any] | None:
        """One for the whole answer: the engine's own if it was not joined, else counted. None: not known."""
        if self._usage_chunk is not None and not self._joined:
            own: dict[str, Any] = self._usage_chunk["usage"]
            return own
        if not self._counted:
            return None
        prompt = len(self.prompt_ids or ())
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.delivered_tokens,
            "completion_tokens": self.delivered_tokens,
        }

    def next_engine(self, *, by_ids: bool, given_back: int = 0) -> None:
        """Another engine goes on: after what was delivered less `given_back` ids, or from the start."""
        self.done = False
        self._by_ids = by_ids
        self._held_ids, self._held_text = [], ""
        self._usage_chunk = None
        if by_ids:
            self._joined = True
            if given_back:
                self._again = self.delivered_ids[-given_back:] + self._again
                del self.delivered_ids[-given_back:]
                self.delivered_tokens -= given_back
            return
        assert not (self._client_has and self._request.stream), "the client has part of the answer"
        self.prompt_ids = None
        self.delivered_ids, self.delivered_tokens = [], 0
        self.texts = {}
        self.extra = {}
        self._recent.clear()
        self._again = []
        self._client_has = self._joined = self._parsed = self._overflow = False
        self._ids_known = self._whole = self._single = True

    def absorb(self, payload: bytes) -> bytes:
        """Take one event; returns what the client gets for it. Raises MalformedEvent, EngineFault."""
        if payload == DONE:
            self.done = True
            return b""
        chunk = decode_event(payload)
        choices = chunk.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            raise MalformedEvent("an event without `choices`, or with more than were asked for")
        if self.id is None:
            self.id, self.created, self.model = chunk.get("id"), chunk.get("created"), chunk.get("model")
        if not choices:
            return self._take_usage(chunk)
        choice = choices[0]
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise MalformedEvent("an event whose choice is not choice 0")
        return self._take_choice(chunk, choice)

    def finish(self, reason: str) -> bytes:
        """Say that the answer is complete, if the client has not heard it yet."""
        if self.finish_reason is not None:
            return b""
        self.finish_reason = reason
        return self._emit({}, self._blank_choice(), "", [])

    def closing(self) -> bytes:
        """The end of a stream whose finish was said: the usage if asked for and known, and [DONE]."""
        out = b""
        if self._request.include_usage and self.usage is not None:
            chunk = dict(self._usage_chunk or {"choices": []})
            chunk.update(id=self.id, object=self._object, created=self.created, model=self.model)
            chunk["usage"] = self.usage
            out = event(msgspec.json.encode(chunk))
        return out + event(DONE)

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._request.api == "chat" else "text_completion"

    def _take_usage(self, chunk: dict[str, Any]) -> bytes:
        self._note_extra(chunk)
        if isinstance(chunk.get("usage"), dict):
            self._usage_chunk = chunk
        return b""

    def _take_choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes:
        text, role, parsed = self._text_of(choice)
        ids = _ids(choice.get("token_ids"))
        finish = choice.get("finish_reason")
        if finish is not None and not isinstance(finish, str):
            raise MalformedEvent("`finish_reason` is not a string")
        check_not_interrupted(finish)
        if self.finish_reason is not None:
            raise MalformedEvent("output after the finish")
        self._note_prompt(chunk, choice)
        preamble = b""
        if role:
            preamble = self._take_role(chunk, choice, role)
            if not text and not ids and not finish and not parsed:
                return preamble
        if ids is None and (text or parsed):
            self._ids_known = False
        new = ids or []
        self._note_extra(chunk)
        if text or new or parsed:
            self.gains += 1
        decorated = parsed or choice.get("logprobs") is not None
        if finish is None and not decorated and not self._is_whole(text, new):
            self._held_ids += new
            self._held_text += text
            return preamble
        text, new = self._held_text + text, self._held_ids + new
        repeated = self._count_again(new)
        self._single = len(ids or ()) == 1
        self._whole = not text.endswith(REPLACEMENT)
        self._held_ids, self._held_text = [], ""
        self.finish_reason = finish
        self.stop_reason = choice.get("stop_reason")
        self._record(text, new, parsed, choice)
        return preamble + self._emit(chunk, choice, text, new[repeated:])

    def _count_again(self, ids: list[int]) -> int:
        """How many of `ids` the client has already. Raises MalformedEvent if others came in their place."""
        if not self._again or not self._request.wants_ids:
            return 0
        count = min(len(ids), len(self._again))
        if ids[:count] != self._again[:count]:
            raise MalformedEvent("other ids than those the client has for an unfinished piece of text")
        del self._again[:count]
        return count

    def _take_role(self, chunk: dict[str, Any], choice: dict[str, Any], role: str) -> bytes:
        """The preamble, once; the event's other content goes on without it."""
        choice["delta"].pop("role")
        if self._role_sent:
            return b""
        self._role_sent, self.role = True, role
        first = {"index": 0, "delta": {"role": role, "content": ""}, "logprobs": None, "finish_reason": None}
        return self._emit(dict(chunk), first, "", [])

    def _text_of(self, choice: dict[str, Any]) -> tuple[str, str, bool]:
        """(text, role, whether the engine's parsers put anything beside plain content)."""
        if self._request.api == "completions" or self._by_ids:
            text = choice.get("text")
            if not isinstance(text, str):
                raise MalformedEvent("a completion event without text")
            return text, "", False
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            raise MalformedEvent("a chat event without delta")
        content, role = delta.get("content"), delta.get("role")
        if content is not None and not isinstance(content, str):
            raise MalformedEvent("a chat event whose content is not text")
        parsed = any(value for key, value in delta.items() if key not in PLAIN_DELTA)
        return content or "", role if isinstance(role, str) else "", parsed

    def _note_prompt(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        if self.prompt_ids is None and not self._by_ids:
            source = chunk if self._request.api == "chat" else choice
            self.prompt_ids = _ids(source.get("prompt_token_ids"))
            if self.prompt_ids is not None and len(self.prompt_ids) > self._max_tokens:
                self._overflow = True

    def _note_extra(self, chunk: dict[str, Any]) -> None:
        self.extra |= {key: chunk[key] for key in ABOUT_ITSELF if chunk.get(key)}

    def _is_whole(self, text: str, ids: list[int]) -> bool:
        """Whether the client may have this piece: it has text, and the text ends with a whole character."""
        if not text:
            return False
        return not text.endswith(REPLACEMENT) or len(self._held_ids) + len(ids) > MAX_HELD_TOKENS

    def _record(self, text: str, ids: list[int], parsed: bool, choice: dict[str, Any]) -> None:
        self._client_has = True
        self._parsed = self._parsed or parsed
        self.delivered_tokens += len(ids)
        owed = self._request.wants_ids and not self._request.stream
        if not self._overflow or owed:
            self.delivered_ids += ids
            self._overflow = len(self.delivered_ids) + len(self.prompt_ids or ()) > self._max_tokens
        if text:
            self._recent.append(text)
        if not self._request.stream:
            self._keep("content", text)
            delta = choice.get("delta") if parsed else None
            for key, value in (delta or {}).items():
                if key not in PLAIN_DELTA and isinstance(value, str):
                    self._keep(key, value)

    def _keep(self, field: str, text: str) -> None:
        if text:
            self.texts.setdefault(field, []).append(text)

    def _blank_choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        if self._request.api == "completions" or self._by_ids:
            choice["text"] = ""
        else:
            choice["delta"] = {"content": ""}
        return choice

    def _emit(self, chunk: dict[str, Any], choice: dict[str, Any], text: str, ids: list[int]) -> bytes:
        """The event for the client, in its own API's form and with its own stream's names."""
        request = self._request
        if not request.stream:
            return b""
        chunk["id"], chunk["created"], chunk["model"] = self.id, self.created, self.model
        chunk["object"] = self._object
        choice.pop("prompt_token_ids", None)
        chunk.pop("prompt_token_ids", None)
        choice.pop("token_ids", None)
        if request.api == "chat":
            self._to_chat(choice, text)
        else:
            choice["text"] = text
        if request.wants_ids:
            if not self._prompt_ids_sent and self.prompt_ids is not None:
                self._prompt_ids_sent = True
                (chunk if request.api == "chat" else choice)["prompt_token_ids"] = self.prompt_ids
            if ids or "role" not in choice.get("delta", ()):
                choice["token_ids"] = ids
        chunk["choices"] = [choice]
        if not request.continuous_usage:
            chunk.pop("usage", None)
        elif self._joined or "usage" not in chunk:
            chunk["usage"] = self.usage
        return event(msgspec.json.encode(chunk))

    def _to_chat(self, choice: dict[str, Any], text: str) -> None:
        if self._by_ids:
            choice.pop("text", None)
            choice.pop("prompt_logprobs", None)
            choice["delta"] = {"content": text}
            return
        delta = choice["delta"]
        if delta.get("content") is not None or text:
            delta["content"] = text


def decode_event(payload: bytes) -> dict[str, Any]:
    """An event's JSON object. Raises MalformedEvent, or EngineFault if it says that the request failed."""
    try:
        chunk = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEvent(f"an event is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise MalformedEvent("an event is not a JSON object")
    fault = fault_in(chunk)
    if fault is not None:
        raise fault
    return chunk


def _ids(value: object) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise MalformedEvent("token ids are not a list of integers")
    return value

"""An engine's stream as the router reads it: cut anywhere, of wrong types, wrongly said again by the next.

Real: `SseSplitter`, `Transcript`, the plan to resume, the assembled answer. What is passed on is whole events
of JSON, and nothing but the two errors that the router knows comes out of any stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fuzz.mutate import Mutator
from fuzz.target import Target, demand
from segue_core.messages.request import SegueParams
from segue_core.messages.status import Exact
from segue_router.assemble import response_object
from segue_router.errors import EngineFault, MalformedEvent
from segue_router.request import GenerationRequest, parse_request
from segue_router.resume import ByIds, Finish, Refuse, Restart, how_to_resume
from segue_router.resume import Target as Takeover
from segue_router.sse import SseSplitter
from segue_router.transcript import MAX_CHOICES, Transcript

MAX_EVENT_BYTES = 1 << 16
MAX_TOKENS = 200
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = (" w", "é", "\ufffd", "😀", "<", "", "a\nb", "\u2028")


class TranscriptTarget(Target):
    """See the module."""

    name = "transcript"
    world_frames = 20_000

    def __init__(self, mutate: Mutator) -> None:
        super().__init__(mutate)
        self.passed = self.refused = self.finished = 0

    async def feed(self) -> int:
        """One answer, by up to four engines."""
        request = self._request()
        track = Transcript(request, MAX_TOKENS)
        frames = 0
        for _ in range(self.rng.randrange(4)):
            frames += self._engine(request, track)
            if not self._moves(request, track):
                break
        else:
            frames += self._engine(request, track)
        demand(len(track.choices) <= MAX_CHOICES, "more choices than can be")
        if track.finish_reason is not None or self.mutate.chance(0.2):
            self._passed_on(request, track.finish("stop") + track.closing())
            self.finished += 1
        if len(track.choices) == 1:
            msgspec.json.encode(response_object(request, track))
        _ = track.usage, track.arrived, track.delivered_tokens
        return max(1, frames)

    def _moves(self, request: GenerationRequest, track: Transcript) -> bool:
        """Another engine goes on, if one may."""
        exact: frozenset[Exact] = (
            frozenset(("output", "seed", "grammar")) if self.mutate.chance(0.7) else frozenset()
        )
        target = Takeover(
            max_model_len=300, model="m", exact=exact, give_back=self.rng.choice((0, 0, 1, None))
        )
        plan = how_to_resume(request, track.progress, target, SegueParams("q", 2, resume=True))
        if isinstance(plan, (Refuse, Finish)):
            return False
        msgspec.json.encode(plan.body)
        if isinstance(plan, ByIds):
            track.next_engine("by_ids", given_back=plan.given_back)
        else:
            track.next_engine("restart" if isinstance(plan, Restart) else "exact")
        return True

    def _request(self) -> GenerationRequest:
        rng = self.rng
        path = rng.choice((CHAT, COMPLETIONS))
        body: dict[str, Any] = {"model": "m", "stream": self.mutate.chance(0.8)}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": "x"}]
        else:
            body["prompt"] = rng.choice(("x", [1, 2]))
        if self.mutate.chance(0.3):
            body |= {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        if self.mutate.chance(0.3):
            body["return_token_ids"] = True
        if self.mutate.chance(0.2):
            body |= {"n": rng.choice((1, 2, 3))}
        return parse_request(path, msgspec.json.encode(body))

    def _engine(self, request: GenerationRequest, track: Transcript) -> int:
        """One engine's stream; how many events it had."""
        events = [self._event(request, number) for number in range(self.rng.randrange(1, 12))]
        if self.mutate.chance(0.5):
            events.append(b"[DONE]")
        stream = b"".join(b"data: " + event + b"\n\n" for event in events)
        if self.mutate.chance(0.1):
            stream = self.mutate.octets(stream)
        if self.mutate.chance(0.05):
            stream = stream.replace(b"\n", b"\r\n")
        splitter = SseSplitter(MAX_EVENT_BYTES)
        for piece in self.mutate.cuts(stream):
            for payload in splitter.feed(piece):
                try:
                    out = track.absorb(payload)
                except (MalformedEvent, EngineFault):
                    self.refused += 1
                    return len(events)
                self._passed_on(request, out)
                if track.done:
                    return len(events)
            kept = len(splitter._line) + splitter._data_bytes
            demand(splitter.broken or kept <= MAX_EVENT_BYTES + len(piece), "half an event grows")
        return len(events)

    def _passed_on(self, request: GenerationRequest, out: bytes) -> None:
        """What the client gets is whole events, each one JSON."""
        if not out:
            return
        demand(request.stream or not out.startswith(b"data: {"), "events for a client that asked for none")
        demand(out.endswith(b"\n\n"), "half an event is passed on")
        for part in out[:-2].split(b"\n\n"):
            demand(part.startswith(b"data: ") and b"\n" not in part, f"no event: {part[:100]!r}")
            if part != b"data: [DONE]":
                msgspec.json.decode(part[6:].decode(), type=dict[str, msgspec.Raw])
                self.passed += 1

    def _event(self, request: GenerationRequest, number: int) -> bytes:
        rng = self.rng
        text = rng.choice(WORDS) + rng.choice(WORDS)
        choice: dict[str, Any] = {"index": rng.randrange(request.choices), "token_ids": [rng.randrange(99)]}
        if request.api == "chat":
            choice["delta"] = {"content": text}
            if number == 0:
                choice["delta"] = {"role": "assistant", "content": ""}
            elif self.mutate.chance(0.1):
                call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": text}}
                choice["delta"] = {"tool_calls": [call], "reasoning": text}
        else:
            choice["text"] = text
        if self.mutate.chance(0.1):
            choice["finish_reason"] = rng.choice(("stop", "length", "abort", "error", ""))
        if self.mutate.chance(0.1):
            entries = [{"token": text, "logprob": -1.5, "bytes": [1]}]
            choice["logprobs"] = {"content": entries} if request.api == "chat" else {"tokens": [text]}
        event: dict[str, Any] = {"id": "x", "object": "o", "created": 1, "model": "m", "choices": [choice]}
        if number == 0:
            (event if request.api == "chat" else choice)["prompt_token_ids"] = [1, 2]
        if self.mutate.chance(0.1):
            event["usage"] = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        if self.mutate.chance(0.05):
            event = {"error": {"message": "no", "code": rng.choice((400, 500, "400", "²", None))}}
        if self.mutate.chance(0.5):
            return msgspec.json.encode(event)
        return self.mutate.json(event).replace(b"\n", b" ")

    def effects(self) -> dict[str, int]:
        return {"events passed on": self.passed, "streams refused": self.refused, "answers": self.finished}

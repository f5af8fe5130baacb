"""What happened to each request, for `/v1/segue/requests/{seq}`: a bounded ring, oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from segue_core.messages.status import Move, RequestStory


@dataclass(slots=True)
class Story:
    """A request while it runs."""

    seq: str
    path: str
    outcome: str = "active"
    engines: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    delivered_tokens: int = 0
    moves: list[Move] = field(default_factory=list)
    ttft_ms: float | None = None
    detail: str = ""

    def told(self) -> RequestStory:
        """As the contract has it."""
        return RequestStory(
            seq=self.seq,
            path=self.path,
            outcome=self.outcome,
            engines=tuple(self.engines),
            prompt_tokens=self.prompt_tokens,
            delivered_tokens=self.delivered_tokens,
            moves=tuple(self.moves),
            ttft_ms=self.ttft_ms,
            detail=self.detail,
        )


class Stories:
    """The last `limit` requests that ended, and those still running (bounded by the router's own limit)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: dict[str, Story] = {}
        self._ended: OrderedDict[str, Story] = OrderedDict()

    def begin(self, story: Story) -> None:
        """A request started."""
        self._running[story.seq] = story

    def end(self, story: Story) -> None:
        """It ended; the oldest one that did is forgotten at the limit."""
        self._running.pop(story.seq, None)
        self._ended[story.seq] = story
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def find(self, seq: str) -> RequestStory | None:
        """The story of `seq`, if it is still known."""
        story = self._running.get(seq) or self._ended.get(seq)
        return story.told() if story else None

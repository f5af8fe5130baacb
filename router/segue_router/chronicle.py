"""What happens to one request, as it happens: into its story and the metrics.

Owns the clock readings between arrival, sending, tokens and failures; it decides nothing.
"""

from __future__ import annotations

import time
from typing import Literal

from msgspec.structs import replace

from segue_core.messages.status import Move
from segue_router.errors import UpstreamFailure
from segue_router.metrics import Metrics
from segue_router.resume import Progress
from segue_router.stories import Stories, Story
from segue_router.upstream import Attempt, now_ms

OUTCOMES = Literal["active", "ok", "client_error", "client_left", "failed", "refused"]


class Chronicle:
    """Of one request; begins with its arrival."""

    def __init__(self, stories: Stories, metrics: Metrics, seq: str, path: str) -> None:
        self.story = Story(seq=seq, path=path)
        self._stories = stories
        self._metrics = metrics
        self._arrived_ms = now_ms()
        self._sent_ms = self._failed_ms = self._arrived_ms
        self._failed_ns = 0
        self._detect_ms: float | None = None
        self._token_ms: float | None = None
        self._gained_here = False
        self._undecided = False
        stories.begin(self.story)

    def sent(self, engine: str) -> None:
        """The request goes to `engine`."""
        story = self.story
        self._sent_ms = now_ms()
        self._gained_here = False
        if not story.engines:
            self._metrics.added_latency.observe((self._sent_ms - self._arrived_ms) / 1000)
        if not story.engines or story.engines[-1] != engine:
            story.engines.append(engine)
        if self._undecided:
            self._undecided = False
            story.moves[-1] = replace(story.moves[-1], decide_ms=_round(self._sent_ms - self._failed_ms))

    def gained(self, now: float) -> None:
        """The client gets something new (or will, in its whole answer) that arrived at `now`."""
        story = self.story
        if story.ttft_ms is None:
            story.ttft_ms = _round(now - self._arrived_ms)
        if not self._gained_here and story.moves:
            gap_ms = None if self._token_ms is None else _round(now - self._token_ms)
            if gap_ms is not None:
                self._metrics.gap.observe(gap_ms / 1000)
            first_token_ms = _round(now - self._sent_ms)
            story.moves[-1] = replace(story.moves[-1], first_token_ms=first_token_ms, gap_ms=gap_ms)
        self._token_ms = now
        self._gained_here = True

    def failed(self, attempt: Attempt) -> None:
        """The attempt failed now. Silence counts from the last gain there, else from its last byte."""
        self._failed_ms, self._failed_ns = now_ms(), time.monotonic_ns()
        last_ms = self._token_ms if self._gained_here else attempt.last_byte_ms
        self._detect_ms = None if last_ms is None else _round(self._failed_ms - last_ms)

    def moves(
        self,
        engine: str,
        to: str,
        failure: UpstreamFailure,
        how: Literal["restart", "exact", "by_ids"],
        progress: Progress,
        dropped_tokens: int,
        watermark: int,
    ) -> None:
        """After `failure` of `engine` it will go on at `to`."""
        self._metrics.resume(how)
        self._undecided = True
        move = Move(
            from_engine=engine,
            to=to,
            detected_by=failure.cause,
            at_monotonic_ns=self._failed_ns,
            detect_ms=self._detect_ms,
            watermark=watermark,
            how=how,
            delivered_tokens=progress.delivered_tokens,
            dropped_tokens=dropped_tokens,
            decide_ms=0.0,
        )
        self.story.moves.append(move)

    def is_at(self, prompt_tokens: int, delivered_tokens: int) -> None:
        """How far the answer is."""
        self.story.prompt_tokens = prompt_tokens
        self.story.delivered_tokens = delivered_tokens

    def ends(self, outcome: OUTCOMES, detail: str = "") -> None:
        """How it ends; the first word counts."""
        if self.story.outcome == "active":
            self.story.outcome, self.story.detail = outcome, detail[:500]

    def close(self) -> None:
        """It is over."""
        self.ends("failed")
        self._stories.end(self.story)
        self._metrics.request(self.story.path, self.story.outcome)


def _round(milliseconds: float) -> float:
    return round(milliseconds, 3)

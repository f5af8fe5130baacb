"""What came of the streams: each compared with what it had to be, token by token, and added up.

Pure. A stream is *failed* if it ended in an error, whatever the error says: the plan leaves engines that can
serve. What it got before that must still be right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from segue_core.messages.status import RequestStory
from segue_ctl.openai_stream import Answer
from segue_ctl.seam import compare

MAX_EXAMPLES = 20


@dataclass(frozen=True)
class Stream:
    """One that is over. `expected`: all of its tokens and their text; `error`: how it failed."""

    number: int
    prompt_tokens: int
    expected: Sequence[int]
    expected_text: str
    answer: Answer
    error: str
    story: RequestStory | None


@dataclass
class Tally:
    """Of all streams so far. `examples`: the first of those that were not as they must be."""

    streams: int = 0
    tokens: int = 0
    failovers: int = 0
    lost: int = 0
    repeated: int = 0
    unequal: int = 0
    failed: int = 0
    moved_streams: int = 0
    recomputed: int = 0
    untold: int = 0
    """Streams of which the router tells no story; their moves are not counted."""
    gaps_ms: list[float] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, stream: Stream) -> str:
        """One more that is over; returns what is wrong with it, empty if nothing is."""
        got, expected = stream.answer.token_ids, list(stream.expected)
        self.streams += 1
        self.tokens += len(got)
        self._moves(stream)
        if stream.error:
            self.failed += 1
            self.errors[stream.error[:200]] += 1
            expected = expected[: len(got)]
        verdict = compare(expected, got, reported=None, asked=len(expected))
        self.lost += verdict.lost
        self.repeated += verdict.repeated
        wrong = not verdict.equal or (not stream.error and not _complete(stream))
        self.unequal += wrong
        if not wrong and not stream.error:
            return ""
        example = _example(stream, verdict.diverged_at)
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)
        return example

    def _moves(self, stream: Stream) -> None:
        if stream.story is None:
            self.untold += 1
            return
        moves, times = stream.story.moves, stream.answer.token_at_ns
        self.failovers += len(moves)
        self.moved_streams += bool(moves)
        for move in moves:
            self.causes[move.detected_by] += 1
            self.ways[move.how] += 1
            if move.how != "restart":
                known = stream.prompt_tokens + move.delivered_tokens
                self.recomputed += max(0, known - move.watermark)
        for seam in sorted({move.delivered_tokens for move in moves}):
            if 0 < seam < len(times):
                self.gaps_ms.append((times[seam] - times[seam - 1]) / 1e6)


def _complete(stream: Stream) -> bool:
    """Whether the answer is said to be what it is: its text, its finish, its usage."""
    answer, tokens = stream.answer, len(stream.expected)
    return (
        answer.text == stream.expected_text
        and answer.finish_reason == "length"
        and answer.completion_tokens == tokens
        and answer.prompt_tokens == stream.prompt_tokens
    )


def _example(stream: Stream, diverged_at: int) -> str:
    story = stream.story
    moves = ", ".join(
        f"{move.from_engine}>{move.to} ({move.detected_by}, {move.how}, at {move.delivered_tokens},"
        f" watermark {move.watermark})"
        for move in (story.moves if story else ())
    )
    answer = stream.answer
    what = f"differs at {diverged_at}" if diverged_at >= 0 else "its end is not what it must be"
    what = stream.error or what
    return (
        f"stream {stream.number} ({answer.headers.get('x-segue-seq', 'no name')}): {what}; "
        f"{len(answer.token_ids)} of {len(stream.expected)} tokens after {stream.prompt_tokens}, "
        f"finish {answer.finish_reason!r}, usage {answer.prompt_tokens} + {answer.completion_tokens}; "
        f"moves: {moves or 'none'}"
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

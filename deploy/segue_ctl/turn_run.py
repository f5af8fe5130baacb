"""Two turns of one conversation, measured from the outside: what the second one had to compute, and when its
first token came.

For the benchmark and the tests. Tokens by source are vLLM's own counts at the engine that answered; which
engine that was is the router's story of the request. Nothing here decides what is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from segue_core.messages.status import RequestStory
from segue_ctl import metrics
from segue_ctl.cluster import Cluster
from segue_ctl.cluster_checks import router_status
from segue_ctl.failure_run import Question, counters, settled_counters, story_of, uninterrupted
from segue_ctl.openai_stream import Answer, StreamFailed
from segue_ctl.waiting import wait_for

FOLLOW_UP = "Thank you. Now tell me in full sentences which of these days was the hardest, and why."
NOTICE_S = 10.0
"""How long a router may take to know that an engine is dead."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn took. `engine` answered; of its `prompt_tokens` so many were computed there, loaded from
    its daemon (external) and found in its own prefix cache."""

    engine: str
    prompt_tokens: int
    computed_tokens: int
    external_tokens: int
    cached_tokens: int
    ttft_ms: float


@dataclass(frozen=True)
class Said:
    """A turn that is over: what was asked and answered, and what it took."""

    question: Question
    answer: Answer
    turn: Turn

    @property
    def tokens(self) -> int:
        """Of the conversation so far."""
        return self.answer.prompt_tokens + len(self.answer.token_ids)


async def take_turn(cluster: Cluster, router_url: str, question: Question) -> Said:
    """Ask and wait for the whole answer. Raises StreamFailed."""
    before = await counters(cluster)
    answer = await uninterrupted(cluster, router_url, question)
    story = await story_of(cluster, router_url, answer.headers.get("x-segue-seq", ""))
    if story is None or not story.engines:
        raise StreamFailed(f"{router_url} tells no story of the request")
    after = await settled_counters(cluster)
    return Said(question, answer, turn_of(story, answer, before, after))


def turn_of(story: RequestStory, answer: Answer, before: dict[str, str], after: dict[str, str]) -> Turn:
    """From the answer, its story, and the metrics of all engines before and after it."""
    engine = story.engines[-1]
    name, label = metrics.PROMPT_TOKENS_BY_SOURCE, "source"
    was = metrics.sum_by_label(before.get(engine, ""), name, label)
    now = metrics.sum_by_label(after.get(engine, ""), name, label)
    grown = {source: int(value - was.get(source, 0.0)) for source, value in now.items()}
    return Turn(
        engine=engine,
        prompt_tokens=answer.prompt_tokens,
        computed_tokens=grown.get("local_compute", 0),
        external_tokens=grown.get("external_kv_transfer", 0),
        cached_tokens=grown.get("local_cache_hit", 0),
        ttft_ms=round(answer.ttft_ms, 1),
    )


def next_question(said: Said, follow_up: str = FOLLOW_UP) -> Question:
    """All that was said so far, and one question more."""
    messages: Sequence[dict[str, str]] = [
        *said.question.messages,
        {"role": "assistant", "content": said.answer.text},
        {"role": "user", "content": follow_up},
    ]
    return replace(said.question, messages=messages)


async def lose_engine(cluster: Cluster, router_url: str, name: str) -> None:
    """SIGKILL to an engine between two turns; returns once the router knows."""

    async def noticed() -> str:
        status = await router_status(cluster.session, router_url)
        if isinstance(status, str):
            return status
        states = {engine.name: engine.state for engine in status.engines}
        return "" if states.get(name) == "down" else f"the router says that {name} is {states.get(name)}"

    cluster.kill_engine(name)
    await wait_for(f"the router knows that {name} is dead", noticed, timeout_s=NOTICE_S)

"""The part of a storm that real vLLM takes: few engines, few faults, and answers that were asked for
beforehand.

Owns what is asked of real engines and what it has to be: each question is answered once by one engine with
nothing in its way, and every later answer is compared with that. (Engines compute alike only one answer at a
time; a storm over vLLM has one stream.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from segue_ctl import article
from segue_ctl.chaos.crowd import Ask
from segue_ctl.chaos.plan import HOLD_MS, Weather
from segue_ctl.cluster import Cluster
from segue_ctl.failure_run import Question, chat_url, uninterrupted
from segue_ctl.openai_stream import Answer

WEATHER = Weather(
    {
        "engine_kill": 6,
        "engine_stop": 4,
        "engine_cut": 4,
        "peer_cut": 1,
        "peer_slow": 1,
        "daemon_stop": 1,
    },
    {**HOLD_MS, "engine_stop": (1_000, 6_000)},
    pause_ms=(1_000, 5_000),
)
"""An engine that was killed takes half a minute to come back, and faults of engines wait for it: the others
are rare, or no copy would ever be whole."""
ENGINE_ARGS = ("--dtype", "float32")
"""Where no copy is there yet an answer is computed again, and a prompt rounds differently than a decode: in
bfloat16 that decides tokens."""
STREAMS = 1
QUESTIONS = 3
MAX_TOKENS = 160
ENTRIES = 3
"""Of the article a prompt is made of: some hundred tokens."""
ROUTER: dict[str, Any] = {"failover": {"max_moves": 100}, "timeouts": {"failover_ms": 300_000}}
DAEMON: dict[str, Any] = {}
"""Real time-outs: a step of vLLM on a busy CPU takes its time."""


class Prepared:
    """Questions with their answers. `ask` first, then `asks`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: list[tuple[Question, Answer]] = []

    async def ask(self) -> None:
        """Have every question answered in peace. Raises StreamFailed."""
        engine = next(iter(self._cluster.specs))
        for number in range(QUESTIONS):
            question = Question(article.messages(ENTRIES + number), MAX_TOKENS, f"storm-{number}")
            answer = await uninterrupted(self._cluster, self._cluster.engine_url(engine), question)
            self._known.append((question, answer))

    def asks(self) -> Iterator[Ask]:
        """One after the other, for ever."""
        for number, (question, answer) in enumerate(cycle(self._known), 1):
            yield Ask(
                number,
                question.body(self._cluster.model),
                lambda answer=answer: (answer.token_ids, answer.text),  # type: ignore[misc]
                chat_url(""),
            )

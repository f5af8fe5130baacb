"""One streamed answer whose engine is failed on purpose, measured from the outside.

For the demo, the benchmarks and the tests. What the client saw is taken from its own stream; what the
standby recomputed from vLLM's own counters; how the failure was found from the router's story of the
request. Nothing here decides what is good.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from segue_core.messages.status import RequestStory, RouterStatus
from segue_ctl import metrics
from segue_ctl.cluster import Cluster
from segue_ctl.cluster_checks import router_status
from segue_ctl.openai_stream import Answer, Piece, StreamFailed, open_stream
from segue_ctl.seam import compare
from segue_ctl.waiting import get_json

OnPiece = Callable[[Piece], None]
OnFailure = Callable[[str, int], None]
"""Called with the engine's name and the tokens delivered so far, right after the signal is sent."""
LOADED_BYTES = "segue_loaded_bytes_total"
"""A daemon's count of bytes written into its engine's blocks."""
_SETTLE_S = 3.0


@dataclass(frozen=True)
class Question:
    """A chat, answered greedily with exactly `max_tokens` tokens.

    salt: keeps the prefix caches of different runs apart, so that no run finds another's KV.
    """

    messages: Sequence[dict[str, str]]
    max_tokens: int
    salt: str

    def body(self, model: str) -> dict[str, Any]:
        """The request's body."""
        return {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": self.salt,
        }


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one failure cost: the objects `segue` and `replay` of `seguectl demo --json`.

    delivered_tokens: at the seam. watermark_tokens: verified at the standby. recomputed_tokens: computed
    by the standby's engine for the resumed request, by its own metric; external and cached are the rest of
    its prompt. Milliseconds: detect from the signal to the router's detection, decide from there to the
    new request, first_token from there to the standby's first token; gap at the client, last token before
    to first token after. diverged_at: first token unlike the reference, -1 if none.
    """

    detected_by: str
    detect_ms: float
    prompt_tokens: int
    delivered_tokens: int
    watermark_tokens: int
    recomputed_tokens: int
    loaded_bytes: int
    gap_ms: float
    lost_tokens: int
    repeated_tokens: int
    equal_tokens: bool
    equal_text: bool
    external_tokens: int
    cached_tokens: int
    decide_ms: float
    first_token_ms: float
    how: str
    moves: int
    diverged_at: int
    killed_after_ms: float
    engine: str
    standby: str
    seq: str


@dataclass(frozen=True)
class FailureRun:
    """An answer, when the signal was sent, to which engine, and the counters on both sides of it."""

    answer: Answer
    signalled_ns: int
    engine: str
    story: RequestStory | None
    before: dict[str, str]
    after: dict[str, str]


def chat_url(base: str) -> str:
    """The endpoint that questions go to."""
    return f"{base}/v1/chat/completions"


async def uninterrupted(
    cluster: Cluster, base_url: str, question: Question, on_piece: OnPiece = lambda _: None
) -> Answer:
    """The answer when nothing fails. Raises StreamFailed."""
    async with open_stream(cluster.session, chat_url(base_url), question.body(cluster.model)) as stream:
        answer = Answer(headers=stream.headers, started_ns=stream.started_ns)
        async for piece in stream.pieces():
            answer.add(piece)
            on_piece(piece)
    return answer


async def interrupted(
    cluster: Cluster,
    router_url: str,
    question: Question,
    *,
    after_tokens: int,
    number: signal.Signals = signal.SIGKILL,
    on_piece: OnPiece = lambda _: None,
    on_failure: OnFailure = lambda _name, _count: None,
) -> FailureRun:
    """The answer when the engine's process group gets `number` once `after_tokens` tokens have arrived.

    Raises StreamFailed if the answer does not come to its end or the signal was never sent.
    """
    before = await counters(cluster)
    engine, signalled_ns = "", 0
    async with open_stream(cluster.session, chat_url(router_url), question.body(cluster.model)) as stream:
        answer = Answer(headers=stream.headers, started_ns=stream.started_ns)
        serving: asyncio.Task[str] | None = None
        try:
            async for piece in stream.pieces():
                answer.add(piece)
                on_piece(piece)
                if serving is None:
                    serving = asyncio.create_task(_serving_engine(cluster, router_url))
                if not signalled_ns and len(answer.token_ids) >= after_tokens:
                    engine = await serving
                    signalled_ns = cluster.kill_engine(engine, number)
                    on_failure(engine, len(answer.token_ids))
        finally:
            if serving is not None:
                serving.cancel()
    if not signalled_ns:
        raise StreamFailed(f"the answer ended after {len(answer.token_ids)} tokens, before the failure")
    after = await settled_counters(cluster, engine)
    story = await story_of(cluster, router_url, answer.headers.get("x-segue-seq", ""))
    return FailureRun(answer, signalled_ns, engine, story, before, after)


def measure(run: FailureRun, reference: Answer, question: Question) -> Measured:
    """The numbers of one failure, against the uninterrupted answer."""
    answer = run.answer
    moves = run.story.moves if run.story else ()
    move = next((m for m in moves if m.from_engine == run.engine), None)
    standby = move.to if move else ""
    seam = move.delivered_tokens if move else longest_wait(answer, run.signalled_ns)
    sources = _difference(run, standby, metrics.PROMPT_TOKENS_BY_SOURCE, "source")
    loaded = _difference(run, f"daemon-{standby}", LOADED_BYTES)
    verdict = compare(
        reference.token_ids,
        answer.token_ids,
        reported=answer.completion_tokens,
        asked=question.max_tokens if answer.finish_reason == "length" else None,
    )
    times = answer.token_at_ns
    return Measured(
        detected_by=move.detected_by if move else "",
        detect_ms=round((move.at_monotonic_ns - run.signalled_ns) / 1e6, 1) if move else 0.0,
        prompt_tokens=answer.prompt_tokens,
        delivered_tokens=seam,
        watermark_tokens=move.watermark if move else 0,
        recomputed_tokens=int(sources.get("local_compute", 0)),
        loaded_bytes=int(loaded.get("", 0)),
        gap_ms=round((times[seam] - times[seam - 1]) / 1e6, 1) if 0 < seam < len(times) else 0.0,
        lost_tokens=verdict.lost,
        repeated_tokens=verdict.repeated,
        equal_tokens=verdict.equal,
        equal_text=answer.text == reference.text,
        external_tokens=int(sources.get("external_kv_transfer", 0)),
        cached_tokens=int(sources.get("local_cache_hit", 0)),
        decide_ms=round(move.decide_ms, 1) if move else 0.0,
        first_token_ms=round(move.first_token_ms or 0.0, 1) if move else 0.0,
        how=move.how if move else "",
        moves=len(moves),
        diverged_at=verdict.diverged_at,
        killed_after_ms=round((run.signalled_ns - answer.started_ns) / 1e6, 1),
        engine=run.engine,
        standby=standby,
        seq=answer.headers.get("x-segue-seq", ""),
    )


def longest_wait(answer: Answer, signalled_ns: int) -> int:
    """Index of the token with the longest wait before it among those that came after the signal.

    Where the gap must be if the router tells no story.
    """
    times = answer.token_at_ns
    waits = [(times[i] - times[i - 1], i) for i in range(1, len(times)) if times[i] > signalled_ns]
    return max(waits)[1] if waits else len(times)


async def count_tokens(cluster: Cluster, engine: str, messages: Sequence[dict[str, str]]) -> int:
    """Tokens of a chat, by the engine's own tokenizer."""
    body = {"model": cluster.model, "messages": list(messages)}
    async with cluster.session.post(f"{cluster.engine_url(engine)}/tokenize", json=body) as answer:
        if answer.status != 200:
            raise StreamFailed(f"{answer.url} answers {answer.status}: {(await answer.text())[:300]}")
        count: int = (await answer.json())["count"]
    return count


async def _serving_engine(cluster: Cluster, router_url: str) -> str:
    """The engine that writes the only stream there is: the one that the router has work on."""
    status = await router_status(cluster.session, router_url)
    if isinstance(status, RouterStatus):
        for engine in status.engines:
            if engine.active and engine.name in cluster.specs:
                return engine.name
    raise StreamFailed(f"the router does not tell which engine answers: {status}")


async def story_of(cluster: Cluster, router_url: str, seq: str) -> RequestStory | None:
    """What the router tells of one request."""
    code, body = await get_json(cluster.session, f"{router_url}/v1/segue/requests/{seq}")
    try:
        return msgspec.convert(body, RequestStory) if code == 200 else None
    except msgspec.ValidationError as error:
        raise StreamFailed(f"{router_url}: unexpected story of {seq}: {error}") from error


async def counters(cluster: Cluster, without: str = "") -> dict[str, str]:
    """The metrics of every engine (but `without`) and daemon that answers."""
    urls = {name: cluster.engine_url(name) for name in cluster.specs if name != without}
    urls |= {f"daemon-{name}": cluster.daemon_url(name) for name in cluster.daemons_alive()}
    texts = await asyncio.gather(*(metrics.scrape(cluster.session, url) for url in urls.values()))
    return dict(zip(urls, texts, strict=True))


async def settled_counters(cluster: Cluster, failed: str = "") -> dict[str, str]:
    """The counters once they stand still: vLLM publishes a step's numbers a little after the step."""
    deadline = time.monotonic() + _SETTLE_S
    seen: dict[str, float] = {}
    while True:
        texts = await counters(cluster, without=failed)
        now = {
            f"{name} {source}": value
            for name, text in texts.items()
            if name in cluster.specs
            for source, value in metrics.sum_by_label(text, metrics.PROMPT_TOKENS_BY_SOURCE, "source").items()
        }
        if (now and now == seen) or time.monotonic() > deadline:
            return texts
        seen = now
        await asyncio.sleep(0.1)


def _difference(run: FailureRun, name: str, metric: str, label: str = "") -> dict[str, float]:
    before = metrics.sum_by_label(run.before.get(name, ""), metric, label)
    after = metrics.sum_by_label(run.after.get(name, ""), metric, label)
    return {key: value - before.get(key, 0.0) for key, value in after.items()}

"""The numbers of a conversation's second turn, from made-up stories and counters."""

from __future__ import annotations

from segue_core.messages.status import RequestStory
from segue_ctl.bench_turns import TurnRun, render
from segue_ctl.failure_run import Question
from segue_ctl.openai_stream import Answer
from segue_ctl.turn_run import Said, Turn, next_question, turn_of

METRIC = 'vllm:prompt_tokens_by_source_total{{engine="0",source="{0}"}} {1}\n'
SOURCES = ("local_compute", "external_kv_transfer", "local_cache_hit")


def counters(*values: int) -> str:
    samples = (METRIC.format(source, value) for source, value in zip(SOURCES, values, strict=True))
    return "# TYPE vllm:prompt_tokens_by_source counter\n" + "".join(samples)


def answer(prompt_tokens: int, ttft_ms: int) -> Answer:
    made = Answer(started_ns=0, prompt_tokens=prompt_tokens, text="so it was")
    made.token_ids, made.token_at_ns = [7, 8], [ttft_ms * 1_000_000, 1 << 40]
    return made


def turn(engine: str, computed: int, ttft_ms: float) -> Turn:
    return Turn(
        engine=engine,
        prompt_tokens=120,
        computed_tokens=computed,
        external_tokens=120 - computed,
        cached_tokens=0,
        ttft_ms=ttft_ms,
    )


def test_what_a_turn_computed_is_counted_at_the_engine_that_answered_it() -> None:
    """By vLLM's own difference; if it moved, at the last one. Others' counters do not matter."""
    story = RequestStory("s", "/v1/chat/completions", "ok", ("a", "b"), 120, 2, ())
    before = {"a": counters(5, 0, 0), "b": counters(100, 10, 1)}
    after = {"a": counters(999, 0, 0), "b": counters(124, 106, 1)}
    got = turn_of(story, answer(120, 35), before, after)
    assert (got.engine, got.computed_tokens, got.external_tokens, got.cached_tokens) == ("b", 24, 96, 0)
    assert (got.prompt_tokens, got.ttft_ms) == (120, 35.0)


def test_the_next_question_repeats_what_was_said() -> None:
    """As a client of the chat API does; under the same salt."""
    question = Question([{"role": "user", "content": "why?"}], 2, "salt")
    said = Said(question, answer(10, 1), turn("a", 10, 1))
    following = next_question(said, "and then?")
    assert [message["role"] for message in following.messages] == ["user", "assistant", "user"]
    assert following.messages[1]["content"] == "so it was"
    assert (following.salt, following.max_tokens, said.tokens) == ("salt", 2, 12)


def test_the_table_shows_each_way_beside_the_others() -> None:
    """Medians, the worst, and how many answers were those of the engine that never failed."""
    runs = [TurnRun("same engine", 100, 18, None, turn("a", 20, 10))]
    runs += [TurnRun("segue", 100, 18, equal, turn("b", 20, ms)) for equal, ms in ((True, 11), (False, 31))]
    runs += [TurnRun("replay", 100, 18, True, turn("b", 120, 90))]
    lines = render(runs).splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["same", "segue", "replay"]
    assert "21" in lines[2] and "31" in lines[2] and "1/2" in lines[2]
    assert "0/0" in lines[1] and "120" in lines[3]

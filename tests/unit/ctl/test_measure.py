"""The numbers of a failure, from made-up streams, stories and counters."""

from __future__ import annotations

from segue_core.messages.status import Move, RequestStory
from segue_ctl.article import fit, messages
from segue_ctl.failure_run import FailureRun, Question, longest_wait, measure
from segue_ctl.metrics import sum_by_label
from segue_ctl.openai_stream import Answer

MS = 1_000_000
METRIC = (
    "# TYPE vllm:prompt_tokens_by_source counter\n"
    'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {0}\n'
    'vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {1}\n'
)


def _answer(times_ms: list[int]) -> Answer:
    return Answer(
        text="x",
        token_ids=list(range(len(times_ms))),
        token_at_ns=[t * MS for t in times_ms],
        prompt_tokens=100,
        finish_reason="length",
        completion_tokens=len(times_ms),
    )


def test_the_gap_is_the_wait_across_the_failure() -> None:
    """Tokens still under way when the signal is sent count as delivered before the gap."""
    answer = _answer([0, 10, 20, 31, 200, 210, 220])
    assert longest_wait(answer, 22 * MS) == 4


def test_a_failure_after_the_last_token_has_no_gap() -> None:
    """Then nothing had to go on."""
    assert longest_wait(_answer([0, 10]), 50 * MS) == 2


def test_measured_values_come_from_stream_story_and_vllm_counters() -> None:
    """Detection is counted from the signal; recomputed tokens are vLLM's own difference."""
    answer = _answer([0, 10, 20, 31, 200, 210])
    move = Move("a", "b", "eof", 100 * MS, 69.0, 102, "by_ids", 4, 0, 5.0, 60.0, 169.0)
    story = RequestStory("s-1", "/v1/chat/completions", "ok", ("a", "b"), 100, 6, (move,))
    run = FailureRun(
        answer, 22 * MS, "a", story, {"b": METRIC.format(1000, 5)}, {"b": METRIC.format(1002, 107)}
    )
    got = measure(run, answer, Question([], 6, "s"))
    assert (got.detect_ms, got.gap_ms, got.delivered_tokens) == (78.0, 169.0, 4)
    assert (got.recomputed_tokens, got.external_tokens, got.watermark_tokens) == (2, 102, 102)
    assert (got.equal_tokens, got.equal_text, got.lost_tokens, got.repeated_tokens) == (True, True, 0, 0)


def test_metric_values_are_added_up_by_label() -> None:
    """Several engines of one server are one sum."""
    text = METRIC.format(1, 2) + 'vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 4\n'
    name = "vllm:prompt_tokens_by_source_total"
    assert sum_by_label(text, name, "source") == {"local_compute": 5.0, "external_kv_transfer": 2.0}
    assert sum_by_label(text, name) == {"": 7.0}


async def test_the_question_is_as_long_as_asked_and_always_the_same() -> None:
    """The longest text that fits; the same tokens in every run, so that answers can be compared."""

    async def count(chat: object) -> int:
        return len(str(chat).split())

    chat = await fit(2000, count)
    size = await count(chat)
    assert 1950 <= size <= 2000
    assert chat == await fit(2000, count) and messages(3) != messages(4)

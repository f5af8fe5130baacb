"""The rows of the grid: request features, which requests have them, and what is to be expected of each.

Data only. Answers are short: each cell is a request to a real engine. The prompts and the model are made
up; what matters is that answers vary, end where the row says, and hold tokens without text of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from support.cut_proxy import Cut, How

Api = Literal["completions", "chat"]
Column = Literal["exact", "by_ids"]
Body = dict[str, Any]
Point = str | int
"""Where an answer is cut: a name of POINTS, or after so many tokens (counted from the end if negative)."""

PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
EOS, END_OF_THINKING = 1, 2045
PROMPT = "bada kolu"

FIRST, ROLE, LAST = "before the first token", "after the role chunk", "at the last token"
USAGE, DONE = "before the usage chunk", "before [DONE]"
THIRD, HALF, TWO_THIRDS = "at a third", "at half", "at two thirds"
POINTS: dict[str, float | None] = {
    FIRST: None,
    ROLE: None,
    THIRD: 1 / 3,
    HALF: 1 / 2,
    TWO_THIRDS: 2 / 3,
    LAST: None,
    USAGE: None,
    DONE: None,
}
MIDDLE: tuple[Point, ...] = (THIRD, TWO_THIRDS, LAST)
ALL: tuple[Point, ...] = (FIRST, ROLE, 1, THIRD, TWO_THIRDS, LAST, USAGE, DONE)
ENDS: tuple[Point, ...] = (FIRST, ROLE, USAGE, DONE)
WAYS: tuple[How, ...] = ("reset", "eof", "error", "malformed")
SILENCE: How = "silence"


@dataclass(frozen=True)
class Uncut:
    """The answer to a row's request without its `made` fields: what those are made from."""

    text: str
    ids: list[int]
    word_of: Callable[[int], str]
    """The text of two tokens from there on, if the tokenizer gives them back for it; else empty."""


Made = Callable[[Uncut], Body]


@dataclass(frozen=True)
class Row:
    """One feature. `completions` and `chat`: fields for that API alone; None: not there.

    exact, by_ids: the reason with which it is refused once output was delivered; empty: it is continued.
    at: where it is cut, beside one of ENDS. made: fields that depend on the answer.
    """

    name: str
    fields: Body = field(default_factory=dict)
    completions: Body | None = field(default_factory=dict)
    chat: Body | None = field(default_factory=dict)
    streams: tuple[bool, ...] = (True, False)
    exact: str = ""
    by_ids: str = ""
    at: tuple[Point, ...] = MIDDLE
    made: Made | None = None
    usage: bool = True
    """Streams ask for the usage chunk."""

    @property
    def slug(self) -> str:
        """For the test's id."""
        return "".join(c if c.isalnum() else "_" for c in self.name)

    def kinds(self) -> list[tuple[Api, bool]]:
        """(API, streamed) of its requests."""
        apis: list[tuple[Api, Body | None]] = [("completions", self.completions), ("chat", self.chat)]
        return [(api, stream) for api, own in apis if own is not None for stream in self.streams]

    def request(self, api: Api, stream: bool, model: str, made: Mapping[str, Any]) -> Body:
        """The client's body. Half of the requests ask for token ids: answers differ a little by that."""
        body: Body = {"model": model, "temperature": 0, "max_tokens": 24}
        if api == "completions":
            body["prompt"] = PROMPT
        else:
            body["messages"] = [{"role": "user", "content": PROMPT}]
        if stream:
            body["stream"] = True
            if self.usage:
                body["stream_options"] = {"include_usage": True}
        if stream == (api == "completions"):
            body["return_token_ids"] = True
        own = self.completions if api == "completions" else self.chat
        return {**body, **self.fields, **(own or {}), **made}

    def points(self, column: Column, turn: int, *, stream: bool) -> list[Point]:
        """Where it is cut; with `turn`, every one of ENDS comes round.

        Fewer where less can go wrong: an ordinary answer is not with the client before its end, and what is
        refused is refused anywhere.
        """
        at = list(self.at)
        if not stream or (column == "by_ids" and self.by_ids):
            at = [at[len(at) // 2], at[-1]] if len(at) > 1 else at
        if column == "by_ids" and not stream:
            at = at[-1:]
        if column == "exact":
            ends = [end for end in ENDS if stream or end in (FIRST, USAGE)]
            at.append(ends[turn % len(ends)])
        return list(dict.fromkeys(at))


def cut_at(point: Point, tokens: int, api: Api, how: How) -> Cut:
    """The cut of an answer of so many tokens."""
    if isinstance(point, int):
        return Cut("tokens", point if point > 0 else max(1, tokens + point), how)
    share = POINTS[point]
    if share is not None:
        return Cut("tokens", max(1, round(tokens * share)), how)
    after: dict[str, Any] = {FIRST: "request", LAST: "before_finish", USAGE: "finish", DONE: "usage"}
    return Cut(after.get(point, "role" if api == "chat" else "headers"), 0, how)


def _stop_string(uncut: Uncut) -> Body:
    """Nine characters from the middle on: some three tokens, so that a seam can go through them."""
    text = uncut.text
    for start in range(len(text) // 2, len(text) - 9):
        stop = text[start : start + 9]
        if text.index(stop) == start and "\ufffd" not in stop:
            return {"stop": [stop]}
    raise AssertionError(f"no stop string in {text!r}")


def _stop_token(uncut: Uncut) -> Body:
    ids = uncut.ids
    at = next(i for i in range(len(ids) // 2, len(ids)) if ids.index(ids[i]) == i)
    return {"stop_token_ids": [ids[at]]}


def _bad_words(uncut: Uncut) -> Body:
    """A word of two tokens, of which the first is the last one before a cut at a third."""
    third = round(len(uncut.ids) / 3)
    words = [word for start in (third - 1, third, third + 1) if (word := uncut.word_of(start))]
    assert words, f"no word of two tokens in {uncut.ids}"
    return {"bad_words": words}


SCHEMA: Body = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{4,8}$"},
        "kind": {"enum": ["alpha", "beta"]},
        "count": {"type": "integer", "minimum": 100, "maximum": 9999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "description": "finds", "parameters": SCHEMA, "strict": True},
    },
    {
        "type": "function",
        "function": {"name": "keep", "description": "keeps", "parameters": SCHEMA, "strict": True},
    },
]
CALL = (
    r'<tool_call>\n\{"name": "find", "arguments": '
    r'\{"name": "[a-z]{4,9}", "count": [0-9]{2,4}\}\}\n</tool_call>'
)
LONG = {"max_tokens": 90}
SAMPLED = {"temperature": 1.0, "seed": 7}
THINKING = {
    "chat_template_kwargs": {"thinking": True},
    "logit_bias": {str(END_OF_THINKING): 6},
    **SAMPLED,
}
BYTES = [66, 67, 162, 123, 256, 174, 255, 248, 224, 222]
"""Tokens of single bytes, of letters and of parts of characters."""


def _regex(pattern: str, **more: Any) -> Body:
    return {"structured_outputs": {"regex": pattern}, **more}


ROWS: tuple[Row, ...] = (
    Row("max_tokens", at=ALL),
    Row("no usage asked for", usage=False, streams=(True,), at=ALL),
    Row("return_token_ids", {"return_token_ids": True}),
    Row(
        "continuous_usage_stats",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        streams=(True,),
        at=(ROLE, THIRD, TWO_THIRDS, LAST, USAGE),
    ),
    Row("prompt as token ids", completions={"prompt": [222, 411, 417, 500, 77]}, chat=None),
    Row(
        "min_tokens, EOS as the very next token",
        {"min_tokens": 12, "logit_bias": {str(EOS): 100}},
        at=(6, 11, 12, LAST),
    ),
    Row(
        "ignore_eos, skip_special_tokens off",
        {"ignore_eos": True, "skip_special_tokens": False, "logit_bias": {str(EOS): 5}},
    ),
    Row("stop strings across the seam", made=_stop_string, by_ids="stop", at=(THIRD, -4, -3, -2, LAST)),
    Row(
        "include_stop_str_in_output",
        {"include_stop_str_in_output": True},
        made=_stop_string,
        by_ids="stop",
        at=(THIRD, -3, -2, LAST),
    ),
    Row("stop_token_ids", made=_stop_token),
    Row("characters of several tokens", {"allowed_token_ids": BYTES}, at=(4, 5, 6, 7, 8, LAST)),
    Row(
        "characters of several tokens, forced",
        _regex("[你好世界😀🎉]{6}"),
        by_ids="structured_output",
        at=(4, 5, 6, 7, LAST),
    ),
    Row(
        "logprobs", completions={"logprobs": 3}, chat={"logprobs": True, "top_logprobs": 3}, by_ids="logprobs"
    ),
    Row(
        "logprobs, characters of several tokens",
        {"allowed_token_ids": BYTES},
        completions={"logprobs": 2},
        chat={"logprobs": True, "top_logprobs": 2},
        by_ids="logprobs",
        at=(5, 6, 7, LAST),
    ),
    Row("echo", completions={"echo": True}, chat=None, by_ids="echo"),
    Row("echo with logprobs", completions={"echo": True, "logprobs": 2}, chat=None, by_ids="echo"),
    Row(
        "echo, continue_final_message",
        completions=None,
        chat={
            "messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "mona"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "echo": True,
        },
        exact="echo",
        by_ids="echo",
    ),
    Row("temperature with a seed", {**SAMPLED, "top_p": 0.95, "top_k": 500}, by_ids="seed", at=(1, *MIDDLE)),
    Row("presence_penalty", {"presence_penalty": 1.7}, by_ids="penalties"),
    Row("frequency_penalty, sampled", {"frequency_penalty": 1.5, **SAMPLED}, by_ids="penalties"),
    Row("repetition_penalty", {"repetition_penalty": 1.4}),
    Row("logit_bias", {"logit_bias": {"500": 4, "1573": -100}}),
    Row("bad_words", made=_bad_words, by_ids="bad_words"),
    Row("n > 1", {"n": 3, **SAMPLED, "max_tokens": 16}, by_ids="n", at=(1, *MIDDLE)),
    Row(
        "n > 1, choices that finish early",
        {"n": 3, "temperature": 1.0, "seed": 5, "logit_bias": {str(EOS): 5}, "min_tokens": 3},
        by_ids="n",
        at=(12, HALF, TWO_THIRDS, LAST),
    ),
    Row(
        "json_schema",
        {**LONG, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        by_ids="structured_output",
    ),
    Row("json_object", {"response_format": {"type": "json_object"}, **SAMPLED}, by_ids="seed"),
    Row("regex", _regex("[a-f]{3,9}-[0-9]{4,9}(,[a-z]+)*", max_tokens=24), by_ids="structured_output"),
    Row("regex, sampled", _regex("[a-f]{3,9}-[0-9]{4,9}", **SAMPLED), by_ids="seed"),
    Row(
        "choice",
        {"structured_outputs": {"choice": ["bada kolu mona ripe done", "bada zeru"]}},
        by_ids="structured_output",
    ),
    Row(
        "grammar",
        {"structured_outputs": {"grammar": 'root ::= "a" [b-e]{5,9} " = " item+\nitem ::= [0-9]{2,5} ";"'}},
        by_ids="structured_output",
    ),
    Row(
        "tools, arguments cut in the middle",
        completions=None,
        chat={**LONG, "tools": TOOLS, **_regex(f"ok {CALL}")},
        by_ids="structured_output",
        at=(4, THIRD, HALF, TWO_THIRDS, LAST),
    ),
    Row(
        "tools, two calls",
        completions=None,
        chat={"max_tokens": 150, "tools": TOOLS, **_regex(rf"{CALL}\n{CALL}")},
        by_ids="structured_output",
    ),
    Row(
        "tool_choice required",
        completions=None,
        chat={**LONG, "tools": TOOLS, "tool_choice": "required"},
        by_ids="tools",
    ),
    Row(
        "tool_choice by name",
        completions=None,
        chat={**LONG, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "keep"}}},
        by_ids="tools",
    ),
    Row("reasoning, cut half open", completions=None, chat={**THINKING, "max_tokens": 40}, by_ids="seed"),
    Row(
        "reasoning and a grammar",
        completions=None,
        chat={**THINKING, "max_tokens": 50, **_regex("[a-f]{12}")},
        by_ids="seed",
        at=(THIRD, HALF, TWO_THIRDS, LAST),
    ),
    Row(
        "reasoning and a tool call",
        completions=None,
        chat={**LONG, **THINKING, "tools": TOOLS, **_regex(CALL), "max_tokens": 110},
        by_ids="seed",
    ),
    Row(
        "another model name, cache_salt, priority, user, unknown fields",
        {"model": "other", "cache_salt": "salt", "priority": 3, "user": "somebody", "x_unknown": {"a": [1]}},
    ),
    Row(
        "several prompts",
        completions={"prompt": ["bada kolu", "mona"], "max_tokens": 12},
        chat=None,
        exact="n",
        by_ids="n",
    ),
    Row("beam search", {"use_beam_search": True, "n": 2, "max_tokens": 8}, streams=(False,), at=(LAST,)),
    Row("vllm_xargs", {"vllm_xargs": {"key": 1}}, exact="output_state", by_ids="output_state"),
    Row(
        "repetition_detection",
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}},
        exact="output_state",
        by_ids="output_state",
    ),
)

OWN_TESTS: tuple[str, ...] = (
    "temperature without a seed",
    "every way of breaking",
    "several failures of one request",
    "more failures than allowed",
    "failover off for one request",
    "the client leaves during the failover",
    "/v1/responses, /v1/messages",
)
"""Rows with tests of their own."""

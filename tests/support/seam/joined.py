"""What a client makes of an answer: a stream's events joined, an ordinary answer as it is. Pure.

Two answers to the same request are compared as trees. Left out is only what differs between any two runs:
the names and times of answers and tool calls (that one stream has one of each is part of the tree), and how
output was divided among events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOGPROB_TOLERANCE = 1e-4
OF_THE_RUN = frozenset(
    {"id", "created", "kv_transfer_params", "service_tier", "system_fingerprint", "metrics"}
)

Tree = Any


class Broken(Exception):
    """A stream that is no answer of the API: what a client's library would stumble over."""


@dataclass
class Joined:
    """A stream, event by event. `error`: the error event, if there was one; `done`: the `[DONE]`s."""

    error: dict[str, Any] | None = None
    done: int = 0
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    whole: dict[str, set[Any]] = field(default_factory=dict)
    prompts: list[Any] = field(default_factory=list)
    usage: list[Any] = field(default_factory=list)
    call_ids: dict[tuple[int, int], set[str]] = field(default_factory=dict)

    def tree(self) -> Tree:
        """For comparison. Raises Broken where one answer has several names, or usage does not add up."""
        for key in ("id", "created"):
            if len(self.whole.get(key, ())) != 1:
                raise Broken(f"{key}: {self.whole.get(key)}")
        for (choice, call), names in self.call_ids.items():
            if len(names) != 1:
                raise Broken(f"choice {choice}, tool call {call}: ids {names}")
        return {
            "choices": self.choices,
            "model": sorted(self.whole["model"]),
            "object": sorted(self.whole["object"]),
            "prompts": self.prompts,
            "usage": self.usage[-1:],
            "usage_events": bool(self.usage),
            "done": self.done,
        }

    def add(self, data: bytes) -> None:
        """One event's payload. Raises Broken."""
        if data == b"[DONE]":
            self.done += 1
            return
        body = json.loads(data)
        if "error" in body:
            if self.error is not None:
                raise Broken("two error events")
            self.error = body["error"]
            return
        if self.done:
            raise Broken("output after [DONE]")
        for key in ("id", "created", "model", "object"):
            self.whole.setdefault(key, set()).add(body.get(key))
        if body.get("prompt_token_ids") is not None:
            self.prompts.append(body["prompt_token_ids"])
        for choice in body["choices"]:
            self._add_choice(choice)
        if body.get("usage") is not None:
            self._add_usage(body["usage"], body["choices"])

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        mine = self.choices.setdefault(
            index, {"text": "", "reasoning": "", "roles": [], "calls": {}, "finishes": [], "logprobs": {}}
        )
        if mine["finishes"]:
            raise Broken(f"choice {index}: output after its finish")
        delta = choice.get("delta") or choice
        mine["text"] += delta.get("content") or delta.get("text") or ""
        mine["reasoning"] += delta.get("reasoning") or ""
        if delta.get("role"):
            mine["roles"].append(delta["role"])
        for call in delta.get("tool_calls") or ():
            self._add_call(index, mine["calls"], call)
        for key in ("token_ids", "prompt_token_ids"):
            if choice.get(key) is not None:
                mine.setdefault(key, []).extend(choice[key])
        for key, values in (choice.get("logprobs") or {}).items():
            if values is not None:
                mine["logprobs"].setdefault(key, []).extend(values)
        if choice.get("finish_reason"):
            mine["finishes"].append([choice["finish_reason"], choice.get("stop_reason")])

    def _add_call(self, choice: int, calls: dict[int, Any], call: dict[str, Any]) -> None:
        mine = calls.setdefault(call["index"], {"type": [], "name": [], "arguments": ""})
        function = call.get("function") or {}
        mine["arguments"] += function.get("arguments") or ""
        for key, value in (("type", call.get("type")), ("name", function.get("name"))):
            if value:
                mine[key].append(value)
        if call.get("id"):
            self.call_ids.setdefault((choice, call["index"]), set()).add(call["id"])

    def _add_usage(self, usage: dict[str, Any], choices: Sequence[dict[str, Any]]) -> None:
        """`continuous_usage_stats`: each event counts the tokens of its choice so far."""
        counted = usage.get("completion_tokens", 0)
        if usage.get("total_tokens") != usage.get("prompt_tokens", 0) + counted:
            raise Broken(f"usage does not add up: {usage}")
        for choice in choices:
            known = self.choices[choice["index"]].get("token_ids")
            if known is not None and len(known) != counted:
                raise Broken(f"usage counts {counted} tokens after {len(known)}")
        self.usage.append(usage)


def join(payloads: Sequence[bytes]) -> Joined:
    """Raises Broken."""
    joined = Joined()
    for payload in payloads:
        joined.add(payload)
    return joined


def plain(answer: Tree) -> Tree:
    """An ordinary answer without what differs between runs; what is absent and null is the same."""
    if isinstance(answer, Mapping):
        return {
            key: plain(value)
            for key, value in answer.items()
            if value is not None and key not in OF_THE_RUN and value != []
        }
    if isinstance(answer, list):
        return [plain(value) for value in answer]
    return answer


def differences(expected: Tree, found: Tree, where: str = "") -> list[str]:
    """Where two trees differ; numbers may by LOGPROB_TOLERANCE."""
    if isinstance(expected, float) or isinstance(found, float):
        close = (
            isinstance(expected, (int, float))
            and isinstance(found, (int, float))
            and abs(expected - found) <= LOGPROB_TOLERANCE
        )
        return [] if close else [f"{where}: {expected!r} != {found!r}"]
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return [
            line
            for key in {**expected, **found}
            for line in (
                differences(expected[key], found[key], f"{where}.{key}")
                if key in expected and key in found
                else [f"{where}.{key}: only {'expected' if key in expected else 'found'}"]
            )
        ]
    if isinstance(expected, list) and isinstance(found, list):
        lines = [
            line
            for i, (left, right) in enumerate(zip(expected, found, strict=False))
            for line in differences(left, right, f"{where}[{i}]")
        ]
        if len(expected) != len(found):
            lines.append(f"{where}: {len(expected)} != {len(found)} entries")
        return lines
    return [] if expected == found else [f"{where}: {expected!r} != {found!r}"]


def not_a_prefix(expected: Joined, found: Joined) -> list[str]:
    """Where what was received of a broken answer is not how the whole one begins."""
    lines: list[str] = []
    for index, mine in found.choices.items():
        whole = expected.choices.get(index)
        if whole is None:
            return [f"choice {index} does not exist"]
        lines += _no_prefix(f"choice {index}", whole, mine)
        for call, part in mine["calls"].items():
            lines += _no_prefix(f"choice {index} call {call}", whole["calls"].get(call, {}), part)
        for key, values in mine["logprobs"].items():
            expected_values = whole["logprobs"].get(key, [])[: len(values)]
            lines += differences(expected_values, values, f"choice {index} {key}")
    return lines


def _no_prefix(where: str, whole: Mapping[str, Any], part: Mapping[str, Any]) -> list[str]:
    return [
        f"{where}: {key} {value!r} does not begin {whole.get(key)!r}"
        for key, value in part.items()
        if isinstance(value, (str, list)) and value and (whole.get(key) or "")[: len(value)] != value
    ]

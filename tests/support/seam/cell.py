"""One cell of the grid: a request whose answer is cut at one point, judged against the uncut one.

The result is one of: `equal`, `restarted` (equal too, nothing had been delivered), `refused` (one clear error
and nothing wrong before it). Everything else is a problem, with the words to find it by.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from support.cut_proxy import Asked, How
from support.seam.cases import PATHS, Api, Column, Point, Row, cut_at
from support.seam.joined import Broken, differences, join, not_a_prefix, plain
from support.seam.stage import Got, Reference, Stage

LACKING = re.compile(r"\.usage(\[0\])?\.completion_tokens_details: only expected")
"""Continued by ids, or counted by the router, a chat's usage does not say how much of it was reasoning."""
OWN_FIELDS = frozenset(
    {"kv_transfer_params", "stream", "stream_options", "return_token_ids", "seed", "prompt", "messages"}
)
"""Of an engine's request: what the router may say differently from the client (prompt: by ids only)."""


@dataclass
class Result:
    """What became of a cell."""

    result: str = ""
    reason: str = ""
    how: tuple[str, ...] = ()
    detected_by: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


async def run_cell(
    stage: Stage, column: Column, row: Row, api: Api, point: Point, *, stream: bool, how: How
) -> Result:
    """Ask, cut, judge."""
    reference = await stage.reference(row, api, stream=stream)
    body = row.request(api, stream, stage.cluster.model, reference.made)
    await stage.ready(column)
    stage.breaker.arm(cut_at(point, reference.tokens, api, how))
    try:
        got = await stage.ask(stage.url(column), PATHS[api], body)
    except TimeoutError:
        return Result(problems=["no answer in time"])
    served = stage.breaker.served
    if not served or not served[0].cut:
        return Result(problems=["the answer was over before the cut"])
    result = judge(reference, got, stream=stream, without=lacking(column, row))
    moves = await stage.moves(column, got.seq)
    result.how = tuple(move.how for move in moves)
    result.detected_by = tuple(move.detected_by for move in moves)
    if result.result == "equal" and set(result.how) == {"restart"}:
        result.result = "restarted"
    result.problems += _passed_on(served, body, result.how)
    return result


def lacking(column: Column, row: Row) -> re.Pattern[str] | None:
    """Differences that do not count: where nothing is continued exactly."""
    return LACKING if column == "by_ids" or row.exact else None


def judge(reference: Reference, got: Got, *, stream: bool, without: re.Pattern[str] | None = None) -> Result:
    """Compare what the client got with the reference; differences like `without` do not count."""

    def verdict(lines: list[str]) -> Result:
        lines = [line for line in lines if without is None or not without.fullmatch(line)]
        return Result("equal" if not lines else "", problems=lines)

    if not stream or not got.payloads:
        if got.status == 200:
            return verdict(differences(plain(reference.got.body), plain(got.body)))
        return _error(got.status, (got.body or {}).get("error"))
    try:
        found, expected = got.joined(), reference.got.joined()
        if got.cut_off:
            return Result(problems=["the stream was cut off without a word"])
        if found.error is None:
            return verdict(differences(expected.tree(), found.tree()))
    except Broken as broken:
        return Result(problems=[f"broken stream: {broken}"])
    result = _error(502, found.error)
    if found.done:
        result.problems.append("[DONE] after an error")
    result.problems += not_a_prefix(expected, found)
    return result


def _error(status: int, error: Any) -> Result:
    code = str((error or {}).get("code"))
    if status not in (502, 503) or not code.startswith("cannot_resume_"):
        return Result(problems=[f"status {status}, error {error}"])
    return Result("refused", code.removeprefix("cannot_resume_"))


def _passed_on(served: list[Asked], body: dict[str, Any], how: tuple[str, ...]) -> list[str]:
    """What the client asked for must reach every engine that continues the request itself."""
    lines = []
    for before, asked, way in zip(served, served[1:], how, strict=False):
        if way == "by_ids":
            continue
        for key, value in body.items():
            if key not in OWN_FIELDS and asked.body.get(key) != value:
                lines.append(f"{way}: the engine was asked with {key}={asked.body.get(key)!r}")
        if way == "exact":
            lines += _went_with_it(before, asked)
    return lines


def _went_with_it(before: Asked, asked: Asked) -> list[str]:
    """Exact: the same generation under a higher epoch, with all ids that the engine before had said."""
    ours, theirs = (each.body["kv_transfer_params"]["segue"] for each in (before, asked))
    lines = []
    if ours["seq"] != theirs["seq"] or ours["epoch"] >= theirs["epoch"]:
        lines.append(f"seq and epoch: {ours['seq']} {ours['epoch']}, then {theirs['seq']} {theirs['epoch']}")
    if before.body.get("seed") != asked.body.get("seed"):
        lines.append(f"seeds {before.body.get('seed')} and {asked.body.get('seed')}")
    said = join([event.removeprefix(b"data: ") for event in before.events]).choices
    given = [choice.get("ids", []) for choice in theirs["delivered"]]
    expected = [said.get(index, {}).get("token_ids", []) for index in range(len(given))]
    if given != expected or not any(given):
        lines.append(f"delivered: {given}, although the engine before had said {expected}")
    return lines

"""Real vLLM: every kind of request, cut where it hurts, against the same request without a failure.

Each cell ends in one of: equal, restarted (nothing had been delivered), refused with the reason that its row
says. Anything else fails. `exact`: engines with the shim. `by_ids`: the router knows of no shim.
"""

from __future__ import annotations

import pytest

from support.seam.cases import DONE, ROWS, USAGE, WAYS, Api, Column, Row
from support.seam.cell import Result, run_cell
from support.seam.results import Record
from support.seam.stage import Stage

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

GRID = [
    pytest.param(
        column,
        row,
        api,
        stream,
        number + turn,
        id=f"{column}-{row.slug}-{api}-{'stream' if stream else 'whole'}",
    )
    for column in ("exact", "by_ids")
    for number, row in enumerate(ROWS)
    for turn, (api, stream) in enumerate(row.kinds())
]


@pytest.mark.parametrize(("column", "row", "api", "stream", "turn"), GRID)
async def test_a_cut_answer_is_the_same_or_refused(
    stage: Stage, record: Record, column: Column, row: Row, api: Api, stream: bool, turn: int
) -> None:
    """Ids, text, log probabilities, calls, reasoning, finish, usage: all of it, or one clear error."""
    if column == "exact":
        assert await stage.can_continue() >= {"output", "seed", "grammar"}
    expected = row.exact if column == "exact" else row.by_ids
    problems, refused = [], 0
    for at, point in enumerate(row.points(column, turn, stream=stream)):
        way = WAYS[(turn + at) % len(WAYS)]
        result = await run_cell(stage, column, row, api, point, stream=stream, how=way)
        lines = result.problems + unexpected(result, column, expected, late=point in (USAGE, DONE))
        asked = f"{api}, {'streamed' if stream else 'whole'}"
        record(row.name, column, asked, str(point), "failed" if lines else result.result, result.reason)
        problems += [f"{point} ({way}; {'+'.join(result.how)}): {line}" for line in lines]
        refused += result.result == "refused"
    if expected and stream:
        assert refused or problems, f"never refused, although its row says: {expected}"
    assert not problems, "\n".join(problems)


def unexpected(result: Result, column: Column, expected: str, *, late: bool) -> list[str]:
    """Where the result is not what the row says. What needs no engine any more may be ended by the router."""
    allowed = {expected, "unknown_usage"} if expected and late else {expected}
    if result.result == "refused" and (not expected or result.reason not in allowed):
        return [f"refused with {result.reason!r}, expected: {expected or 'equal'}"]
    if result.result == "equal" and expected and not late and result.how:
        return [f"continued ({'+'.join(result.how)}), although its row says: {expected}"]
    if result.result == "equal" and not set(result.how) <= {column}:
        return [f"continued in another way than {column}: {'+'.join(result.how)}"]
    return []

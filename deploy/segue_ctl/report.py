"""What the demo has to say at the end: the table, segue beside replay, and the verdict. Pure."""

from __future__ import annotations

import msgspec

from segue_ctl.failure_run import Measured
from segue_ctl.output import Style, table


class DemoResult(msgspec.Struct, frozen=True):
    """What `seguectl demo --json` writes. Fields are only ever added."""

    segue: Measured
    replay: Measured
    model: str
    asked_tokens: int
    ok: bool


def passed(segue: Measured, replay: Measured) -> bool:
    """Nothing lost or repeated by either, and with Segue the same text as without the failure."""
    counts = (segue.lost_tokens, segue.repeated_tokens, replay.lost_tokens, replay.repeated_tokens)
    return not any(counts) and segue.equal_text and segue.equal_tokens


def render(result: DemoResult, style: Style) -> str:
    """The table."""
    pair = (result.segue, result.replay)
    rows = [
        _row("engine killed", [f"{m.engine}, {_s(m.killed_after_ms)} into the request" for m in pair]),
        _row("detected by", [m.detected_by or "-" for m in pair]),
        _row("detected after the kill", [_ms(m.detect_ms) for m in pair]),
        _row("resumed on", [f"{m.standby or '-'} ({m.how or '-'})" for m in pair]),
        _row("prompt", [f"{m.prompt_tokens:,} tokens" for m in pair]),
        _row("delivered before the gap", [f"{m.delivered_tokens:,} tokens" for m in pair]),
        _row("watermark at the standby", [f"{m.watermark_tokens:,} tokens" for m in pair]),
        _row("recomputed (vLLM's count)", [f"{m.recomputed_tokens:,} tokens" for m in pair]),
        _row("loaded by the standby", [f"{m.loaded_bytes / (1 << 20):,.1f} MiB" for m in pair]),
        _row("gap the client saw", [style.bold(_ms(m.gap_ms)) for m in pair]),
        _row("  detect | decide | first token", [_split(m) for m in pair]),
        _row("lost / repeated tokens", [f"{m.lost_tokens} / {m.repeated_tokens}" for m in pair]),
        _row("token ids as uninterrupted", [_equal(m.equal_tokens, m, style) for m in pair]),
        _row("text as uninterrupted", [_equal(m.equal_text, m, style) for m in pair]),
    ]
    return table(rows, header=("", "segue", "replay"))


def verdict(result: DemoResult, style: Style) -> str:
    """One closing line."""
    segue, replay = result.segue, result.replay
    if not result.ok:
        if segue.lost_tokens or segue.repeated_tokens or replay.lost_tokens or replay.repeated_tokens:
            return style.bad("failed: tokens were lost or repeated")
        return style.bad(
            f"failed: the answer differs from the uninterrupted one at token {segue.diverged_at}"
        )
    faster = f", {replay.gap_ms / segue.gap_ms:.1f} times shorter than replay's" if segue.gap_ms else ""
    return style.good(
        f"The answer went on after {_ms(segue.gap_ms)}{faster}; nothing lost, nothing repeated."
    )


def _row(name: str, cells: list[str]) -> list[str]:
    return [name, *cells]


def _split(m: Measured) -> str:
    return f"{_ms(m.detect_ms)} | {_ms(m.decide_ms)} | {_ms(m.first_token_ms)}"


def _equal(equal: bool, m: Measured, style: Style) -> str:
    return style.good("equal") if equal else style.bad(f"differs from token {m.diverged_at}")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms"


def _s(value: float) -> str:
    return f"{value / 1e3:.1f} s"

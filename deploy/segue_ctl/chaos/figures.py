"""The figures of a storm: the contract of `seguectl bench chaos --json`, and a table for people. Pure."""

from __future__ import annotations

import msgspec

from segue_ctl.output import table


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`seguectl bench chaos --help` explains the first ones. Fields are only ever added.

    recomputed_tokens: what watermarks left to compute, over all moves that continued an answer. kv_loads:
    replicas that engines loaded; each of their bytes (verified_kv_bytes) decides the tokens that follow.
    left_behind: what was still there after everything had ended. reached: whether there were as many
    failovers as were asked for.
    """

    failovers: int
    streams: int
    lost_tokens: int
    repeated_tokens: int
    unequal_streams: int
    failed_streams: int
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    leaked_replicas: int
    leaked_fds: int
    tokens: int = 0
    moved_streams: int = 0
    recomputed_tokens: int = 0
    kv_loads: int = 0
    verified_kv_bytes: int = 0
    failed_loads: int = 0
    preemptions: int = 0
    memory_high_water_bytes: dict[str, int] = {}
    faults: dict[str, int] = {}
    detected_by: dict[str, int] = {}
    ways: dict[str, int] = {}
    errors: dict[str, int] = {}
    leaked_fd_kinds: str = ""
    left_behind: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    untold_streams: int = 0
    engines: int = 0
    seed: int = 0
    duration_s: float = 0.0
    settle_s: float = 0.0
    reached: bool = True

    @property
    def clean(self) -> bool:
        """Whether everything is 0 that must be."""
        return self.reached and not (
            self.lost_tokens
            or self.repeated_tokens
            or self.unequal_streams
            or self.failed_streams
            or self.leaked_replicas
            or self.leaked_fds
            or self.left_behind
        )


def render(figures: Figures) -> str:
    """For people."""
    rows = [
        ("failovers", f"{figures.failovers:,}" + ("" if figures.reached else " (asked for more)")),
        (
            "streams",
            f"{figures.streams:,} of {figures.tokens:,} tokens, {figures.moved_streams:,} of them moved",
        ),
        ("tokens lost", str(figures.lost_tokens)),
        ("tokens repeated", str(figures.repeated_tokens)),
        ("streams not equal", str(figures.unequal_streams)),
        ("streams failed", str(figures.failed_streams) + _listed(figures.errors)),
        (
            "gap",
            f"p50 {figures.gap_ms_p50:,.0f}, p99 {figures.gap_ms_p99:,.0f}, max {figures.gap_ms_max:,.0f} ms",
        ),
        ("tokens computed again", f"{figures.recomputed_tokens:,}"),
        (
            "replicas loaded",
            f"{figures.kv_loads:,}, {figures.verified_kv_bytes / 1e6:,.1f} MB that decide tokens",
        ),
        ("loads that failed", f"{figures.failed_loads:,}"),
        ("preemptions", f"{figures.preemptions:,}"),
        ("replicas leaked", str(figures.leaked_replicas)),
        (
            "descriptors leaked",
            str(figures.leaked_fds) + (f" ({figures.leaked_fd_kinds})" * bool(figures.leaked_fds)),
        ),
        ("left behind", ", ".join(figures.left_behind) or "nothing"),
        (
            "most memory",
            ", ".join(
                f"{kind} {size / 1e6:,.0f} MB" for kind, size in figures.memory_high_water_bytes.items()
            ),
        ),
        ("faults", f"{sum(figures.faults.values()):,}" + _listed(figures.faults)),
        ("detected by", _listed(figures.detected_by).strip(" ()")),
        ("continued", _listed(figures.ways).strip(" ()")),
        ("run", f"seed {figures.seed}, {figures.engines} engines, {figures.duration_s:,.0f} s of storm"),
        ("nothing left after", f"{figures.settle_s:,.1f} s"),
    ]
    return table(rows)


def _listed(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return " (" + ", ".join(f"{name} {count:,}" for name, count in ordered) + ")"

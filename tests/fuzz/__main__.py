"""`make fuzz`: feed frames from a terminal, and print what came of it as a table."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import sys
import time

from fuzz.run import Report, run_target
from fuzz.targets import TARGETS


def main() -> int:
    """0: nothing was found."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument(
        "--frames", type=int, default=100_000, help="how many, over all targets (default 100,000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="where they come from (default 0)")
    parser.add_argument("--target", choices=sorted(TARGETS), help="only this one")
    parser.add_argument("--world", type=int, help="only this world of it: runs a failing frame again")
    options = parser.parse_args()
    if options.world is not None and options.target is None:
        parser.error("--world belongs to one --target")
    faulthandler.enable()
    chosen = [options.target] if options.target else list(TARGETS)
    shares = {name: TARGETS[name][1] for name in chosen}
    reports = []
    for name in chosen:
        kind = TARGETS[name][0]
        frames = max(1, options.frames * shares[name] // sum(shares.values()))
        if options.world is not None:
            frames = kind.world_frames
        progress = Progress()
        reports.append(
            asyncio.run(run_target(kind, frames, options.seed, first=options.world or 0, say=progress.say))
        )
        print_row(reports[-1])
    total = sum(report.frames for report in reports)
    problems = [problem for report in reports for problem in report.problems]
    print(f"{total:,} frames in {sum(r.seconds for r in reports):,.0f} s, {len(problems)} problems")
    return 1 if problems else 0


class Progress:
    """A line now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 10

    def say(self, line: str) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 10
            print(line, flush=True)


def print_row(report: Report) -> None:
    print(
        f"{report.name:<12} {report.frames:>9,} frames {report.worlds:>4} worlds {report.seconds:>6.0f} s"
        f"  grown {report.grown_bytes / (1 << 20):>6.1f} MiB, {report.grown_files} files"
        f"  longest pause {report.pause_ms:>5.0f} ms",
        flush=True,
    )
    for problem in report.problems:
        print(problem, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Many frames into many targets: worlds one after another, growth measured from the first to the last.

Invariant: a world follows from target, seed and number alone; `again` is the line that makes it once more.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from fuzz.mutate import Mutator
from fuzz.target import Target, Violation, Watchdog, check_sizes, demand, open_files, resident_bytes

GROWTH_BYTES = 48 << 20
"""More than Python's allocator keeps of what was freed; a leak of 100 bytes a frame shows in 500,000."""
SETTLE_S = 20.0
"""What ends by itself (threads, connections that were cut) has ended by then."""


EFFECT_FRAMES = 2_000
"""So many frames have all the effects that a target names."""


@dataclass
class Report:
    """What came of one target. Growth: after the last world, less after the first."""

    name: str
    frames: int = 0
    worlds: int = 0
    seconds: float = 0.0
    grown_bytes: int = 0
    grown_files: int = 0
    pause_ms: float = 0.0
    """The longest that the event loop did not come round."""
    problems: list[str] = field(default_factory=list)


def again(name: str, seed: int, world: int) -> str:
    """The line that runs one world again."""
    return f"make fuzz TARGET={name} SEED={seed} WORLD={world}"


async def run_world(kind: type[Target], seed: int, number: int, frames: int, report: Report) -> None:
    """One world from its start to its end. Raises Violation."""
    target = kind(Mutator(f"{kind.name}/{seed}/{number}"))
    with Watchdog() as watchdog:
        watchdog.on_loop(asyncio.get_running_loop())
        await target.start()
        beat = asyncio.create_task(_beat(report))
        try:
            done = 0
            while done < frames:
                try:
                    fed = await target.feed()
                except Violation:
                    watchdog.check()  # what was logged says more
                    raise
                done += fed
                report.frames += fed
                watchdog.check()
                check_sizes(target)
            if done >= EFFECT_FRAMES:
                for what, count in target.effects().items():
                    demand(count, f"nothing happened: {what}")
        finally:
            beat.cancel()
            await target.stop()
        watchdog.check()


async def _beat(report: Report) -> None:
    """Notice when nobody else gets to run."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.002)
        report.pause_ms = max(report.pause_ms, (time.monotonic() - before) * 1000 - 2)


async def run_target(
    kind: type[Target], frames: int, seed: int, *, first: int = 0, say: Callable[[str], None] | None = None
) -> Report:
    """As many worlds as it takes; stops at the first that fails."""
    report = Report(kind.name)
    started = time.monotonic()
    settled = (0, 0)
    while report.frames < frames:
        number = first + report.worlds
        left = min(kind.world_frames, frames - report.frames)
        before = report.frames
        try:
            await run_world(kind, seed, number, left, report)
        except Exception as error:
            what = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            frame = report.frames - before
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            report.problems.append(
                f"{kind.name}: after frame {frame}: {what[:2000]}\n{where}  {again(kind.name, seed, number)}"
            )
            break
        report.worlds += 1
        if report.worlds == 1:
            settled = (resident_bytes(), open_files())
        if say is not None:
            say(
                f"{kind.name}: {report.frames:,} of {frames:,} frames,"
                f" {report.frames / (time.monotonic() - started):,.0f}/s"
            )
    if report.worlds > 1 and not report.problems:
        await _measure(report, settled)
    report.seconds = time.monotonic() - started
    return report


async def _measure(report: Report, settled: tuple[int, int]) -> None:
    """Growth since the first world; what is still on its way out is waited for."""
    deadline = time.monotonic() + SETTLE_S
    while (grown := open_files() - settled[1]) > 0 and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    report.grown_files = grown
    report.grown_bytes = resident_bytes() - settled[0]
    if report.grown_files > 0:
        report.problems.append(
            f"{report.name}: {report.grown_files} more open files than after the first world"
        )
    if report.grown_bytes > GROWTH_BYTES:
        report.problems.append(
            f"{report.name}: {report.grown_bytes >> 20} MiB more than after the first world"
        )

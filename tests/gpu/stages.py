"""What is tried, one function a stage: each starts its processes, and gives rows for the table."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from gpu.busy import no_torch
from gpu.ends import DAEMON, TORCH, Bench
from gpu.rows import Row, equal, failed, measured, not_run
from gpu.shapes import AT_ONCE, TAILS_AT_ONCE, Shape, large, small
from segue_core.messages.probe import ShareKind
from support.cuda_process import CudaProcess
from support.waiting import last_of

TESTS = Path(__file__).resolve().parents[1]
SUITE_S = 120
TAILS_A_STEP, STEP_MS = 64, 20.0
"""Decode rates: 64 sequences, a token each 20 ms."""
TURNS = 5
"""Measurements of the engine's work, alone and beside a daemon, in turn."""
MOST_SLOWED = 0.01
RETURNED_S = 15.0
KEPT_BYTES = 64 << 20
"""What the driver may keep for itself of a GPU's memory that was given back."""
FROM, TO = "from_gpu_gb_per_s", "to_gpu_gb_per_s"
NAMES: dict[ShareKind, str] = {"cuda_ipc": "IPC handle", "cuda_vmm": "descriptor"}


def conformance(bench: Bench) -> Iterator[Row]:
    """The suite that host pages pass too, on this driver."""
    what = "every promise of Pages, by host memory, IPC handle and descriptor"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "conformance")]
    try:
        done = subprocess.run(
            command, cwd=TESTS.parent, capture_output=True, text=True, timeout=SUITE_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield failed("conformance", what, f"not over within {SUITE_S} s")
        return
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    skipped = re.search(r"(\d+) skipped", last)
    if done.returncode or skipped or "passed" not in last:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        yield failed("conformance", what, last)
    else:
        yield equal("conformance", what, True, last.strip("= "))


def share(engine: CudaProcess, daemon: CudaProcess, kind: ShareKind, shape: Shape) -> float:
    """Export and map; milliseconds that mapping took."""
    encoded, fds = engine.call_for_descriptors("export", kind, shape.slots, shape.slot_bytes, shape.blocks)
    opened_ms: float = daemon.call("open_exported", encoded, descriptors=fds)
    return opened_ms


def sharing(bench: Bench) -> Iterator[Row]:
    """Memory of one process in another: what was computed is copied out, what was kept is loaded."""
    for kind in get_args(ShareKind):
        shape = large(bench.mib)
        size = (shape.slots, shape.slot_bytes, shape.blocks)
        with bench.pair() as (engine, daemon):
            opened_ms = share(engine, daemon, kind, shape)
            what = f"{shape.nbytes >> 20} MiB by {NAMES[kind]}"
            is_equal = daemon.call("compare", *size)
            yield equal(
                "share", f"{what}: blocks", is_equal, f"opened in {opened_ms:.0f} ms", open_ms=opened_ms
            )
            yield equal("share", f"{what}: decode tails", daemon.call("compare_tails", *size))
            loaded = engine.call("load")
            how = "out of page-locked memory" if loaded["locked"] else "with a stop on the way"
            yield equal("share", f"{what}: loaded back", loaded["equal"], how)
            yield equal("share", f"{what}: let go", daemon.call("close"))


def speed(bench: Bench) -> Iterator[Row]:
    """Gather and scatter beside plain copies of the same sizes."""
    whole, tails = large(bench.mib), small(max(1, bench.mib // 8))
    one_tail, some_tails, many_tails, some_blocks = (
        tails.block_bytes,
        AT_ONCE * tails.block_bytes,
        TAILS_AT_ONCE * tails.block_bytes,
        AT_ONCE * whole.block_bytes,
    )
    with bench.pair() as (engine, daemon):
        plain = {
            nbytes: engine.call("plain_copies", nbytes, bench.seconds)
            for nbytes in (one_tail, some_tails, many_tails, some_blocks)
        }
        share(engine, daemon, "cuda_ipc", whole)
        found = daemon.call("gather_blocks", bench.seconds)
        yield _speed("gather of 2 MiB blocks (64 x 32 KiB), 4 at once", found, plain[some_blocks][FROM])
        found = daemon.call("gather_tails", bench.seconds, 1)
        yield _speed("gather of 128 KiB tails (64 x 2 KiB)", found, plain[one_tail][FROM])
        found = daemon.call("gather_tails", bench.seconds, TAILS_AT_ONCE)
        what = f"gather of 128 KiB tails (64 x 2 KiB), {TAILS_AT_ONCE} at once"
        yield _speed(what, found, plain[many_tails][FROM])
        found = _rate(engine.call("load"))
        yield _speed("scatter of 2 MiB blocks (64 x 32 KiB), 4 at once", found, plain[some_blocks][TO])
    with bench.engine() as engine:
        size = (tails.slots, tails.slot_bytes, tails.blocks)
        _, fds = engine.call_for_descriptors("export", "cuda_ipc", *size)
        assert not fds
        found = _rate(engine.call("load"))
        yield _speed("scatter of 128 KiB blocks (64 x 2 KiB), 4 at once", found, plain[some_tails][TO])
    for nbytes, both in plain.items():
        result = f"{both[FROM]:.2f} GB/s from the GPU, {both[TO]:.2f} GB/s to it"
        yield measured("speed", f"plain copy of {nbytes >> 10} KiB", result, **both)


def _rate(loaded: dict[str, float]) -> dict[str, float]:
    return {"gb_per_s": loaded["nbytes"] / max(loaded["seconds"], 1e-9) / 1e9}


def _speed(what: str, found: dict[str, float], plain: float) -> Row:
    """A speed, and its part of a plain copy's."""
    ratio = found["gb_per_s"] / plain if plain else 0.0
    times = f", p50 {found['p50_us']:.0f} us, p99 {found['p99_us']:.0f} us" if "p50_us" in found else ""
    result = f"{found['gb_per_s']:.2f} GB/s, {ratio:.0%} of a plain copy{times}"
    return measured("speed", what, result, ratio_to_plain=ratio, **found)


def tier(bench: Bench) -> Iterator[Row]:
    """Replicas that a daemon keeps in GPU memory: loaded from there, beside a load from the arena."""
    shape = large(min(bench.mib, 512))
    size = (shape.slots, shape.slot_bytes, shape.blocks)
    with bench.pair() as (engine, daemon):
        share(engine, daemon, "cuda_vmm", shape)
        (nbytes, filled), fds = daemon.call_for_descriptors("fill_tier", *size)
        found = engine.call("load_from_tier", nbytes, descriptors=fds)
        what = f"{shape.nbytes >> 20} MiB of the daemon's GPU memory"
        yield equal("tier", f"{what}: loaded", found["equal"], f"filled at {filled:.2f} GB/s")
        yield equal("tier", f"{what}: let go", daemon.call("close_tier"))
        from_tier, from_arena = _rate(found)["gb_per_s"], _rate(engine.call("load"))["gb_per_s"]
        times = from_tier / max(from_arena, 1e-9)
        result = f"{from_tier:.2f} GB/s, {times:.1f} times as fast as from the arena"
        figures = {"gb_per_s": from_tier, "arena_gb_per_s": from_arena, "filled_gb_per_s": filled}
        yield measured("tier", "load of 2 MiB blocks (64 x 32 KiB), 4 at once", result, **figures)


def beside(bench: Bench) -> Iterator[Row]:
    """How much slower the engine's work is while a daemon copies at decode rates."""
    what = f"an engine's work while {TAILS_A_STEP} tails are copied each {STEP_MS:g} ms"
    kinds = ["copies"] if bench.double else ["torch", "kernel", "copies"]
    shape = large(bench.mib)
    with bench.pair() as (engine, daemon):
        share(engine, daemon, "cuda_ipc", shape)
        name, reason = engine.call("prepare_work", kinds)
        engine.call("work", bench.seconds)  # clocks rise with work
        alone, together, copied = [], [], []
        for _ in range(TURNS):
            alone.append(engine.call("work", bench.seconds))
            daemon.start("replicate", bench.seconds * 1.5, TAILS_A_STEP, STEP_MS)
            together.append(engine.call("work", bench.seconds))
            copied.append(daemon.answer()[0])
        slowed = 1 - statistics.median(together) / statistics.median(alone)
        rate = statistics.median(one["gb_per_s"] for one in copied)
        steps, late = (sum(one[key] for one in copied) for key in ("steps", "late_steps"))
        verdict = "goal kept" if slowed < MOST_SLOWED else f"goal {MOST_SLOWED:.0%} missed"
        result = (
            f"{slowed:+.2%} slower ({verdict}; {name}), {rate:.2f} GB/s, {late:.0f} of {steps:.0f} steps late"
        )
        yield measured(
            "beside", what, result, slowed_fraction=slowed, gb_per_s=rate, late_steps=late, steps=steps
        )
        if reason:
            yield not_run("beside", "the same with a matrix product", reason)


def torch_tensors(bench: Bench) -> Iterator[Row]:
    """KV tensors as an engine's allocator makes them."""
    settings = {"cuda_ipc": "expandable_segments:False", "cuda_vmm": "expandable_segments:True"}
    reason = no_torch()
    for kind, setting in settings.items():
        what = f"tensors of torch, {setting}"
        if reason or bench.double:
            yield not_run("torch", what, reason or "torch would not work on the double")
            continue
        shape = large(min(bench.mib, 256))
        size = (shape.slots, shape.slot_bytes, shape.blocks)
        variables = {"PYTORCH_CUDA_ALLOC_CONF": setting}
        with bench.process(TORCH, **variables) as engine, bench.process(DAEMON) as daemon:
            encoded, fds = engine.call_for_descriptors("export", *size)
            found, pieces = engine.call("kinds")
            daemon.call("open_exported", encoded, descriptors=fds)
            is_equal = daemon.call("compare", *size) and found == [kind]
            yield equal("torch", what, is_equal, f"{', '.join(found)} of {pieces} allocations")


def killed(bench: Bench) -> Iterator[Row]:
    """The engine is killed: its memory can still be read, and goes once the daemon lets it go."""
    with bench.engine() as watcher, bench.process(DAEMON) as daemon:
        with bench.engine() as warm:  # whatever the driver loads once is there before the first look
            share(warm, daemon, "cuda_ipc", small(1))
            daemon.call("close")
        for kind in get_args(ShareKind):
            yield from _killed(bench, kind, watcher, daemon)


def _killed(bench: Bench, kind: ShareKind, watcher: CudaProcess, daemon: CudaProcess) -> Iterator[Row]:
    """One way of sharing, seen by a third process."""
    shape, name = large(bench.mib), NAMES[kind]
    before = watcher.call("free_bytes")
    with bench.engine() as engine:
        share(engine, daemon, kind, shape)
        living = watcher.call("free_bytes")
    orphaned = watcher.call("free_bytes")
    is_equal = daemon.call("compare", shape.slots, shape.slot_bytes, shape.blocks)
    yield equal("killed", f"{name}: blocks read after kill -9", is_equal)
    assert daemon.call("close"), "the daemon did not let go"
    begun_ns = time.monotonic_ns()
    after = _settled(watcher, before - KEPT_BYTES)
    taken_ms = (time.monotonic_ns() - begun_ns) / 1e6
    result = (
        f"free {before >> 20} MiB before, {living >> 20} with both, {orphaned >> 20} after the kill,"
        f" {after >> 20} once let go ({taken_ms:.0f} ms)"
    )
    figures = {
        "free_before_bytes": before,
        "free_living_bytes": living,
        "free_orphaned_bytes": orphaned,
        "free_after_bytes": after,
    }
    yield equal("killed", f"{name}: memory returned", after >= before - KEPT_BYTES, result, **figures)


def _settled(watcher: CudaProcess, wanted: int) -> int:
    """Free bytes of the GPU, once they are as many as wanted or time is up."""
    look = lambda: int(watcher.call("free_bytes"))  # noqa: E731
    return last_of(look, lambda free: free >= wanted, timeout_s=RETURNED_S)


STAGES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "conformance": conformance,
    "share": sharing,
    "speed": speed,
    "tier": tier,
    "beside": beside,
    "torch": torch_tensors,
    "killed": killed,
}

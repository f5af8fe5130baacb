"""`tests/gpu/run.sh`: tries Segue's GPU pages on this machine, prints a table, says whether bytes were equal.

Exit status: 0 all that had to be equal was, 1 something was not or could not be tried, 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpu.ends import Bench
from gpu.rows import Row, failed, is_well, table
from gpu.stages import STAGES
from segue_core.messages.probe import GpusFound
from support import cuda_double, real_driver

DOUBLE_WARNING = "the driver's DOUBLE: bytes and calls mean something, figures mean nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit status."""
    arguments = _parse(argv)
    bench, name = _bench(arguments)
    if bench is None:
        print(f"gpu: {name}", file=sys.stderr)
        return 2
    print(f"{name}; {platform.node()}, {os.cpu_count()} CPUs", flush=True)
    rows: list[Row] = []
    begun = time.monotonic()
    for stage in arguments.stages or STAGES:
        print(f"[{time.monotonic() - begun:5.1f} s] {stage} ...", file=sys.stderr, flush=True)
        rows += _rows_of(stage, bench)
    print(table(rows))
    well = is_well(rows)
    print("everything that had to be equal was" if well else "NOT WELL: see DIFFERENT, FAILED, NOT RUN above")
    if arguments.json:
        whole = {"driver": name, "double": bench.double, "well": well, "rows": rows}
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    return 0 if well else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--mib", type=int, help="KV memory of each engine (default: 1024; double: 16)")
    parser.add_argument("--seconds", type=float, help="for each speed (default: 1.5; double: 0.05)")
    parser.add_argument("--double", action="store_true", help="on the driver's double: tries this script")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {' '.join(STAGES)}")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.stages) - STAGES.keys():
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    return arguments


def _bench(arguments: argparse.Namespace) -> tuple[Bench | None, str]:
    """What to run on, and its name; None: why there is nothing to run on."""
    if arguments.double:
        folder = cuda_double.folder()
        if folder is None:
            return None, f"the double is built with {cuda_double.COMPILER}, which is not installed"
        return Bench(folder, True, arguments.mib or 16, arguments.seconds or 0.05), DOUBLE_WARNING
    os.environ[real_driver.VARIABLE] = real_driver.REAL
    found = real_driver.look()
    if not isinstance(found, GpusFound) or not found.gpus:
        return None, "no NVIDIA GPU here (seguectl doctor tells more); --double tries this script without one"
    gpu = found.gpus[0]
    version = f"{found.version // 1000}.{found.version % 1000 // 10}"
    name = f"{gpu.name} {gpu.uuid}, driver for CUDA {version}"
    return Bench(Path("unused"), False, arguments.mib or 1024, arguments.seconds or 1.5), name


def _rows_of(stage: str, bench: Bench) -> list[Row]:
    """What a stage gives, up to where it breaks."""
    rows: list[Row] = []
    try:
        rows.extend(STAGES[stage](bench))
    except (Exception, subprocess.SubprocessError) as error:
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        rows.append(failed(stage, "whatever comes after the rows above", text))
    return rows


if __name__ == "__main__":
    sys.exit(main())

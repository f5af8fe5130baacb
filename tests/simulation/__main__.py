"""`make sim`: run seeds from a terminal. One seed prints its trace; many print what fails, and a summary."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.clockwork import Violation
from simulation.world import run_seed


def main() -> int:
    """0: all invariants held."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--seeds", type=int, default=200, help="how many to run (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    options = parser.parse_args()
    one = options.seed is not None
    first, last = (options.seed, options.seed + 1) if one else (options.first, options.first + options.seeds)
    failed: list[int] = []
    started = time.monotonic()
    for seed in range(first, last):
        try:
            run_seed(seed, loud=one)
        except Violation as violation:
            failed.append(seed)
            print(violation if not one else str(violation).splitlines()[-2])
    took_s = time.monotonic() - started
    print(f"{last - first} seeds, {len(failed)} failed, {(last - first) / took_s:.1f} seeds/s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

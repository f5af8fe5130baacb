"""`seguectl bench`: the cost of a failure (`gap`), whether it shows (`seam`), the cost without one
(`overhead`), and what the router alone costs (`router`).
"""

from __future__ import annotations

import argparse
from typing import Any

from segue_ctl import bench_gap, bench_overhead, bench_router, bench_seam

_EPILOG = """\
examples:
  seguectl bench gap --prompt-tokens 2000 4000 --runs 3
  seguectl bench seam --runs 20
  seguectl bench overhead --requests 20 --json overhead.json
  seguectl bench router --json router.json
"""


def add_parser(verbs: Any) -> None:
    """Add `bench` and its parts to the command line."""
    parser = verbs.add_parser(
        "bench",
        help="measure the gap of a failure, the seam, the cost without one, or the router",
        description="Measure Segue on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    for part in (bench_gap, bench_seam, bench_overhead, bench_router):
        part.add_parser(parts)

"""`seguectl bench`: the cost of a failure (`gap`), whether it shows (`seam`), the cost without one
(`overhead`), what the router alone costs (`router`), how fast KV gets to a
peer (`replicate`), what a step costs with many sequences (`scale`), and what a storm of failures leaves
(`chaos`).
"""

from __future__ import annotations

import argparse
from typing import Any

from segue_ctl import (
    bench_chaos,
    bench_gap,
    bench_overhead,
    bench_replicate,
    bench_router,
    bench_scale,
    bench_seam,
    bench_turns,
)

_EPILOG = """\
examples:
  seguectl bench gap --prompt-tokens 2000 4000 --runs 3
  seguectl bench seam --runs 20
  seguectl bench turns --prompt-tokens 1000 4000
  seguectl bench overhead --requests 20 --json overhead.json
  seguectl bench router --json router.json
  seguectl bench replicate --json replicate.json
  seguectl bench scale --live 100 1000 10000
  seguectl bench chaos --failovers 200 --seed 7
"""


def add_parser(verbs: Any) -> None:
    """Add `bench` and its parts to the command line."""
    parser = verbs.add_parser(
        "bench",
        help="measure the gap of a failure, the seam, the cost without one, the router, or torture it all",
        description="Measure Segue on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    for part in (
        bench_gap,
        bench_seam,
        bench_turns,
        bench_overhead,
        bench_router,
        bench_replicate,
        bench_scale,
        bench_chaos,
    ):
        part.add_parser(parts)

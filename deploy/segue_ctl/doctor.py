"""`seguectl doctor`: is this machine fit for Segue, and is what the configuration names there and reachable?

This module only asks and prints: `doctor_machine`, `doctor_gpu` and `doctor_service` look, `doctor_*_rules`
judge. Invariants: nothing is started, taken or changed for good, and what hangs or dies is a process of its
own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from segue_core import __version__
from segue_core.errors import ConfigError
from segue_core.messages.probe import GpusFound
from segue_ctl import doctor_gpu, doctor_machine, doctor_service
from segue_ctl.doctor_findings import Finding, exit_status, render, report, summary
from segue_ctl.doctor_gpu_rules import gpu_findings
from segue_ctl.doctor_machine_rules import machine_findings
from segue_ctl.doctor_service import Kind
from segue_ctl.doctor_service_rules import service_findings
from segue_ctl.output import Style, check_writable, write_json

TIMEOUT_S = 30.0
"""For each trial with a driver: a first context on a large machine takes seconds."""

_EPILOG = """\
examples:
  seguectl doctor                                           this machine, its GPUs
  seguectl doctor --config /etc/segue/gpu0.yaml             and what that daemon needs: run it as its user
  seguectl doctor --config a.yaml b.yaml --router router.yaml --json doctor.json

Each line is ok, a warning (Segue works, with less than it could) or a problem (that part does not work), with
what was found and, after the arrow, what to do. GPUs: memory is really shared between two processes, by both
ways that engines have, and every byte compared. A machine without an NVIDIA driver is fine: KV in host memory
is protected. Peers are asked with the daemon's own keys and do not notice. In containers run it where the
daemon runs, with the same devices, mounts and limits.

--json writes {"version": TEXT, "warnings": N, "problems": N, "sections": {HEADING: [{"check": TEXT,
"verdict": "ok"|"warning"|"problem", "found": TEXT, "todo": TEXT}]}}.

exit status: 0 no problem (warnings are none), 2 usage, 3 problems
"""


def add_parser(verbs: Any) -> None:
    """Add `doctor` to the command line."""
    parser = verbs.add_parser(
        "doctor",
        help="check this machine, its GPUs, and what a configuration needs",
        description="Check this machine, its GPUs, and what configurations of daemons and routers need.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", nargs="+", default=[], type=Path, metavar="FILE", help="daemons' configurations"
    )
    parser.add_argument(
        "--router", nargs="+", default=[], type=Path, metavar="FILE", help="routers' configurations"
    )
    parser.add_argument("--json", metavar="FILE", help="write the findings there; - is standard output")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"for each trial with a driver (default: {TIMEOUT_S:g})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, judge, print."""
    if not args.timeout > 0:
        raise ConfigError("--timeout: expected a number of seconds above 0")
    if args.json:
        check_writable(args.json, "--json")
    quiet = args.json == "-"
    sections: dict[str, list[Finding]] = {}

    def section(heading: str, findings: list[Finding]) -> None:
        sections[heading] = findings
        if not quiet:
            print(render(heading, findings, Style(sys.stdout)), flush=True)

    with Progress(sys.stderr.isatty()) as tell:
        tell("looking at the machine")
        machine = doctor_machine.look()
        tell("asking the NVIDIA driver")
        gpus = doctor_gpu.look(timeout_s=args.timeout, bindings=machine.packages.get("cuda", ""), tell=tell)
        has_gpu = not isinstance(gpus.every.found, GpusFound) or gpus.every.found.library
        tell("")
        pinned = doctor_gpu.has_pinned(gpus)
        section("this machine", machine_findings(machine, __version__, gpu=has_gpu, pinned=pinned))
        section("NVIDIA GPUs", gpu_findings(gpus))
        files: list[tuple[Path, Kind]] = [(file, "daemon") for file in args.config]
        files += [(file, "router") for file in args.router]
        for file, kind in files:
            tell(f"looking at what {file} needs")
            facts = doctor_service.look_at(file, kind, args.timeout)
            tell("")
            section(f"{kind} {file}", service_findings(facts, machine))
    made = report(__version__, sections)
    if args.json:
        write_json(made, args.json)
    if not quiet:
        print(summary(made))
    return exit_status(made)


class Progress:
    """Says on standard error what is being done, on a terminal only, and takes it back when it is over."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    def __enter__(self) -> Callable[[str], None]:
        return self.tell

    def __exit__(self, *failure: object) -> None:
        self.tell("")

    def tell(self, what: str) -> None:
        """`what` is done now; empty: nothing."""
        if self._shown:
            print(f"\r\x1b[K{what}{' ...' if what else ''}", end="", file=sys.stderr, flush=True)

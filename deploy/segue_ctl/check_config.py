"""`seguectl check-config`: are these configuration files valid?

Each process knows its own settings, so the process's command judges (`--check`); nothing is started.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from segue_core.errors import ConfigError
from segue_ctl.commands import console_script
from segue_ctl.output import OK, USAGE

_EPILOG = """\
examples:
  seguectl check-config router.yaml daemon.yaml
  seguectl check-config --kind daemon /etc/segue/gpu0

A file with `engines` is a router's, one with `socket` a daemon's. Environment variables that override
keys (SEGUE_ROUTER__..., SEGUE_DAEMON__...) count here as they do for the process.

exit status: 0 all valid, 2 one is not
"""

_MARKS = {"router": "engines", "daemon": "socket"}
_TIMEOUT_S = 60


def add_parser(verbs: Any) -> None:
    """Add `check-config` to the command line."""
    parser = verbs.add_parser(
        "check-config",
        help="validate configuration files",
        description="Validate configuration files of daemons and routers without starting anything.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path)
    parser.add_argument("--kind", choices=sorted(_MARKS), help="default: what its keys say")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check every file; go on after a bad one."""
    worst = OK
    for file in args.files:
        try:
            print(f"{file}: {check(file, args.kind)}", flush=True)
        except ConfigError as error:
            message = str(error)
            print(message if message.startswith(f"{file}:") else f"{file}: {message}", file=sys.stderr)
            worst = USAGE
    return worst


def check(file: Path, kind: str | None = None) -> str:
    """What a valid file is, in words. Raises ConfigError with the key's path if it is not valid."""
    kind = kind or guess_kind(file)
    command = [console_script(f"segue-{kind}"), "--config", str(file), "--check"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{file}: segue-{kind} --check did not end within {_TIMEOUT_S:g} s") from error
    if answer.returncode == 0:
        said = (answer.stdout.strip().splitlines() or [""])[-1]
        return f"ok ({said.removeprefix(f'{file}:').strip().removeprefix('ok').strip(' :()') or kind})"
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"segue-{kind} --check ended with status {answer.returncode}"
    raise ConfigError(reason.removeprefix(f"segue-{kind}:").strip())


def guess_kind(file: Path) -> str:
    """`router` or `daemon`, by the keys at the top. Raises ConfigError if neither or both show."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    keys = tree.keys() if isinstance(tree, dict) else ()
    kinds = [kind for kind, mark in _MARKS.items() if mark in keys]
    if len(kinds) != 1:
        raise ConfigError(
            f"{file}: neither a router's (`engines`) nor a daemon's (`socket`) configuration, or both",
            hint="say which with --kind",
        )
    return kinds[0]

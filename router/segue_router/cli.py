"""`segue-router`: the command. Exit status: 0 ok, 1 failed, 2 usage or configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import segue_core
from segue_core.errors import ConfigError
from segue_core.logs import configure_logging
from segue_core.service import run_service
from segue_core.settings import load_settings
from segue_router.access import load_access
from segue_router.app import serve
from segue_router.settings import RouterSettings

ENVIRONMENT_PREFIX = "SEGUE_ROUTER"
EPILOG = """\
a configuration that is enough:
  engines:
    - {name: a, url: "http://127.0.0.1:9000", daemon: "http://127.0.0.1:7101"}
    - {name: b, url: "http://127.0.0.1:9001", daemon: "http://127.0.0.1:7102"}

then:
  segue-router --config router.yaml
  curl http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' \\
       -d '{"model": "my-model", "prompt": "Once upon a time", "stream": true}'

each key can be overridden by an environment variable:
  SEGUE_ROUTER__LISTEN__PORT=9000 SEGUE_ROUTER__TIMEOUTS__STALL_MS=2000 segue-router --config router.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="segue-router",
        description="OpenAI-compatible proxy whose streamed answers go on when the engine behind them dies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML file (see below)")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument("--json", action="store_true", help="with --check: print all settings as JSON")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="overrides the file"
    )
    parser.add_argument("--version", action="version", version=f"segue-router {segue_core.__version__}")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(arguments.config, RouterSettings, prefix=ENVIRONMENT_PREFIX)
        if arguments.check and arguments.json:
            print(msgspec.json.encode(settings).decode(), flush=True)  # noqa: T201
        access = load_access(settings)
    except ConfigError as error:
        print(f"segue-router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if arguments.check:
        if not arguments.json:
            print(f"segue-router: {arguments.config} is valid")  # noqa: T201
        return 0
    if arguments.log_level:
        settings = msgspec.structs.replace(settings, log_level=arguments.log_level)
    configure_logging(settings.log_level, settings.log_format)
    return run_service(lambda: serve(settings, access))


if __name__ == "__main__":
    sys.exit(main())

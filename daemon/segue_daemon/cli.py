"""`segue-daemon`: the sidecar beside one engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import structlog

from segue_core import __version__
from segue_core.errors import ConfigError
from segue_core.logs import configure_logging
from segue_core.security import is_loopback
from segue_core.service import run_service, start_http, until_signalled, warn_unprotected
from segue_core.settings import load_settings
from segue_daemon.api import build_api
from segue_daemon.app import Daemon
from segue_daemon.keys import Protection, load_protection
from segue_daemon.settings import DaemonSettings

log = structlog.get_logger()

EPILOG = """\
A minimal configuration:
  name: a
  socket: /run/segue/a.sock          # the engine's shim connects here
  http: {port: 7101}                 # status endpoint: /livez /readyz /status /metrics
  listen: {control_port: 7201}       # peers connect here
  peers: [{name: b, control: "127.0.0.1:7202"}]

Any key can be set by a variable: SEGUE_DAEMON__HTTP__PORT=7105
Exit status: 0 stopped by a signal, 1 could not start or failed, 2 wrong usage or configuration.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="segue-daemon",
        description="Replicates the KV cache of the engine beside it to peer daemons, while it decodes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument("--json", action="store_true", help="with --check: print all settings as JSON")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--version", action="version", version=f"segue-daemon {__version__}")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(arguments.config, DaemonSettings, prefix="SEGUE_DAEMON")
        if arguments.log_level:
            settings = msgspec.structs.replace(settings, log_level=arguments.log_level)
        configure_logging(settings.log_level, settings.log_format)
        if arguments.check and arguments.json:
            print(msgspec.json.encode(settings).decode(), flush=True)  # noqa: T201
        protection = load_protection(settings)
    except ConfigError as error:
        print(f"segue-daemon: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if arguments.check:
        if not arguments.json:
            print(f"ok: daemon {settings.name}, {len(settings.peers)} peers")  # noqa: T201
        return 0
    return run_service(lambda: serve(settings, protection))


async def serve(settings: DaemonSettings, protection: Protection) -> None:
    """Run one daemon until SIGTERM or SIGINT. Raises StartupError."""
    warn_unprotected(protection.openings)
    if not settings.http.tls and protection.tokens and not is_loopback(settings.http.host):
        log.warning("the token crosses the network in plain text", key="http.tls", hint="http: {tls: true}")
    daemon = Daemon(settings, keys=protection.keys)
    runner = None
    try:
        await daemon.start()
        runner, port = await start_http(
            build_api(daemon, protection.tokens),
            settings.http.host,
            settings.http.port,
            what="http",
            tls=protection.web,
        )
        log.info(
            "daemon ready",
            name=settings.name,
            http=f"{settings.http.host}:{port}",
            socket=settings.socket,
            control_port=daemon.receiver.control_port,
            peers=[peer.name for peer in settings.peers],
            store_bytes=settings.store.budget_bytes,
        )
        log.info("stopping", signal=await until_signalled())
    finally:
        daemon.ready = False
        await daemon.stop()
        if runner is not None:
            await runner.cleanup()

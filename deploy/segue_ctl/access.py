"""How the tool gets into routers and daemons that want a token, or speak https with the cluster's keys."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from segue_core.security import CA_FILE, TOKEN_VARIABLE, SecuritySettings, load_tokens, read_tokens, trust_in


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `session_options` reads."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help=f"the cluster's token (default: variable {TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help=f"for https: the cluster's {CA_FILE} (default: the system's CAs)",
    )


def session_options(args: argparse.Namespace) -> dict[str, Any]:
    """What an aiohttp.ClientSession and its requests need: `headers` and `ssl`. Raises ConfigError."""
    file = args.token_file
    tokens = read_tokens(Path(file), "--token-file") if file else load_tokens(SecuritySettings())
    return {"headers": tokens.headers, "ssl": trust_in(args.ca, "--ca") if args.ca else True}

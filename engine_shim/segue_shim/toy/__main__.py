"""`python -m segue_shim.toy`: serve the toy engine."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

import torch

from segue_shim.toy.engine import ToyEngine
from segue_shim.toy.server import Server


def main(argv: list[str] | None = None, *, make: Callable[..., ToyEngine] = ToyEngine) -> None:
    """Until SIGTERM. `make`: the engine's class."""
    parser = argparse.ArgumentParser(prog="python -m segue_shim.toy", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="toy", help="the name it serves")
    parser.add_argument("--engine", default="toy", help="its own name, for the daemon")
    parser.add_argument("--socket", default="", help="the daemon's socket (default: unprotected)")
    parser.add_argument("--blocks", type=int, default=1024, help="of 8 tokens, 256 bytes each")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a prompt that one step computes")
    parser.add_argument("--step-ms", type=float, default=20.0, help="a step takes at least that long")
    parser.add_argument("--opaque", action="store_true", help="spread tokens over their blocks")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    engine = make(args.socket, args.engine, num_blocks=args.blocks, chunk=args.chunk, opaque=args.opaque)
    asyncio.run(Server(engine, args.model, step_s=args.step_ms / 1000).run("127.0.0.1", args.port))


if __name__ == "__main__":
    main()

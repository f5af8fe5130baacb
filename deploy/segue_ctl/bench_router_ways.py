"""The processes that `bench router` measures and the engine behind them: started and ended together."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from segue_ctl import cluster_checks as checks
from segue_ctl.bench_router_engine import Engine
from segue_ctl.bench_router_load import MODEL
from segue_ctl.child import Child, finish_all
from segue_ctl.cluster_config import RouterEngineEntry, router_config, write_yaml
from segue_ctl.commands import console_script
from segue_ctl.free_ports import LOOPBACK, PortHolder
from segue_ctl.process_groups import cpu_ticks
from segue_ctl.waiting import wait_for
from segue_ctl.warden import Warden

DIRECT, PASSTHROUGH, SEGUE = "direct", "passthrough", "segue"
METHODS = (DIRECT, PASSTHROUGH, SEGUE)
_START_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Way:
    """Where the client asks. `pid`: the proxy's process; 0: there is none."""

    port: int
    pid: int = 0

    def cpu_s(self) -> float:
        """CPU time that the proxy has used, in steps of 10 ms."""
        return cpu_ticks(self.pid) / _TICKS_PER_S if self.pid else 0.0


@asynccontextmanager
async def running_ways(cpus: frozenset[int] | None) -> AsyncIterator[tuple[Engine, dict[str, Way]]]:
    """The engine, which runs in this process, and each of METHODS. The proxies run on `cpus` (None: any)."""
    ports, warden = PortHolder(), Warden()
    children: list[Child] = []
    engine_port, passthrough_port, segue_port = ports.take(), ports.take(), ports.take()
    upstream = f"http://{LOOPBACK}:{engine_port}"
    try:
        with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
            folder = Path(name)
            config = folder / "router.yaml"
            write_yaml(config, router_config(segue_port, [RouterEngineEntry("a", upstream, MODEL)], {}))
            module = [sys.executable, "-m", "segue_ctl.bench_router_passthrough"]
            commands: list[tuple[str, Sequence[str]]] = [
                (PASSTHROUGH, [*module, str(passthrough_port), upstream]),
                (SEGUE, [console_script("segue-router"), "--config", str(config)]),
            ]
            for method, argv in commands:
                log_file = folder / f"{method}.log"
                children.append(Child(method, argv, log_file=log_file, warden=warden, cpus=cpus))
            try:
                async with Engine(engine_port) as engine:
                    await _start(children, passthrough_port, segue_port)
                    passthrough, segue = (child.pid for child in children)
                    yield (
                        engine,
                        {
                            DIRECT: Way(engine_port),
                            PASSTHROUGH: Way(passthrough_port, passthrough),
                            SEGUE: Way(segue_port, segue),
                        },
                    )
            finally:
                finish_all(children)
    finally:
        warden.close()
        ports.close()


async def _start(children: Sequence[Child], passthrough_port: int, segue_port: int) -> None:
    """Start the proxies; returns once both have the engine."""
    for child in children:
        child.start()
    async with aiohttp.ClientSession() as session:
        await wait_for(
            "the pass-through proxy answers",
            lambda: checks.answers(session, f"http://{LOOPBACK}:{passthrough_port}/health"),
            timeout_s=_START_S,
            children=tuple(children),
        )
        await wait_for(
            "the router has its engine",
            lambda: checks.router_ready(session, f"http://{LOOPBACK}:{segue_port}", ["a"]),
            timeout_s=_START_S,
            children=tuple(children),
        )

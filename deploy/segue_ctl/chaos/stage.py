"""The stage: a local cluster in which every connection that may be harmed runs over a wire.

Owns where the wires go. Each daemon dials its peers at a loopback address of its own (127.0.1.N), where
wires listen on the peers' ports. Engines and daemons at even positions are known to the router by wires, the
others directly, so that both kinds of a broken connection occur. Time-outs are short: a storm of hundreds of
failures is to take minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from segue_ctl.chaos.wires import Wire
from segue_ctl.cluster import Cluster, EngineCommand
from segue_ctl.free_ports import LOOPBACK, PortHolder
from segue_ctl.vllm_server import Command, EnginePlace, EngineSpec

MODEL = Path("toy")
TOY_BLOCKS = 400
"""Of 8 tokens: with half of the streams on one engine sequences are preempted now and then."""
ROUTER: Mapping[str, Any] = {
    "timeouts": {
        "connect_ms": 500,
        "stall_ms": 600,
        "lone_stall_ms": 3_000,
        "first_token_ms": 10_000,
        "health_interval_ms": 200,
        "health_ms": 500,
        "failover_ms": 30_000,
    },
    "failover": {"max_moves": 100},
    "limits": {"max_stories": 4_096},
}
DAEMON: Mapping[str, Any] = {
    # A toy engine is back within seconds, and the calm at the end waits for what nobody came back for.
    "store": {"budget_bytes": 16 << 20, "keep_own_ms": 15_000},
    "replication": {"replace_after_ms": 800},
    "timeouts": {"stall_ms": 300, "peer_ms": 800},
}


def toy_command(
    *, step_ms: float, opaque: bool = False, program: Sequence[str] = ("-m", "segue_shim.toy")
) -> EngineCommand:
    """The command of a toy engine; `program`: what Python runs."""

    def command(spec: EngineSpec, place: EnginePlace, model_dir: Path) -> Command:
        argv = (sys.executable, *program, "--port", str(place.port), "--model", model_dir.name)
        argv += ("--engine", spec.name, "--socket", str(place.socket))
        argv += ("--step-ms", str(step_ms), "--blocks", str(TOY_BLOCKS), *(("--opaque",) if opaque else ()))
        return Command((*argv, *spec.extra_args), {**os.environ, "OMP_NUM_THREADS": "1"})

    return command


class Stage:
    """`cluster` is not started yet; `wires` by what they connect: `router>a`, `router>daemon-a`, `peer
    a>b`."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        *,
        model_dir: Path,
        engine_command: EngineCommand | None = None,
        router: Mapping[str, Any] = ROUTER,
        daemon: Mapping[str, Any] = DAEMON,
        say: Callable[[str], None],
        keep: bool,
    ) -> None:
        """engine_command: None for vLLM. router, daemon: what their configurations say beyond the usual."""
        self.engines = [spec.name for spec in specs]
        self.wired = self.engines[::2]
        self.wires: dict[str, Wire] = {}
        self._ports = PortHolder()
        self._fronts = {name: (self._ports.take(), self._ports.take()) for name in self.wired}
        options: dict[str, Any] = {} if engine_command is None else {"engine_command": engine_command}
        self.cluster = Cluster(
            specs,
            model_dir=model_dir,
            progress=say,
            keep=keep,
            routed_urls={name: _url(ports[0]) for name, ports in self._fronts.items()},
            routed_daemon_urls={name: _url(ports[1]) for name, ports in self._fronts.items()},
            peer_hosts={name: self._host(name) for name in self.engines},
            router_overrides=router,
            daemon_overrides=daemon,
            **options,
        )

    async def connect(self) -> None:
        """Put the wires in place; before the cluster starts."""
        cluster = self.cluster
        for name, (engine_port, daemon_port) in self._fronts.items():
            await self._wire(f"router>{name}").listen(
                LOOPBACK, engine_port, *_place(cluster.engine_url(name))
            )
            await self._wire(f"router>daemon-{name}").listen(
                LOOPBACK, daemon_port, *_place(cluster.daemon_url(name))
            )
        for name in self.engines:
            for other in self.engines:
                if other != name:
                    there, wire = cluster.daemon_place(other), self._wire(f"peer {name}>{other}")
                    for port in (there.control_port, there.bulk_port):
                        await wire.listen(self._host(name), port, LOOPBACK, port)

    async def close(self) -> None:
        """Take the wires away."""
        for wire in self.wires.values():
            await wire.close()
        self._ports.close()

    def pids(self) -> dict[str, int]:
        """Of every process of the cluster that runs, by name."""
        names = [f"{kind}-{name}" for name in self.engines for kind in ("engine", "daemon")] + ["router"]
        children = {name: self.cluster.process(name) for name in names}
        return {name: child.pid for name, child in children.items() if child.alive}

    def _wire(self, name: str) -> Wire:
        return self.wires.setdefault(name, Wire(name))

    def _host(self, name: str) -> str:
        return f"127.0.1.{self.engines.index(name) + 1}"


def _url(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)

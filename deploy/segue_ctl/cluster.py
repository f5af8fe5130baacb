"""A Segue cluster on this machine: engines, a daemon beside each, a router; for demo, benchmarks and tests.

Owns the processes, their ports and a private run folder with configurations, sockets and logs. Never
leaves anything behind: processes, shared memory and the folder go when it stops, and when its launcher
is killed. Readiness is asked for with deadlines, and a process that fails shows its last words.

    async with Cluster([EngineSpec("a"), EngineSpec("b")], model_dir=folder) as cluster:
        ...                        # cluster.router_url answers
        cluster.kill_engine("a")   # SIGKILL to its whole process group
        await cluster.restart_engine("a")
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from segue_core.security import TOKEN_VARIABLE
from segue_ctl import cluster_checks as checks
from segue_ctl.child import Child, finish_all
from segue_ctl.cluster_config import (
    DaemonPlace,
    RouterEngineEntry,
    daemon_config,
    router_config,
    write_yaml,
)
from segue_ctl.commands import console_script
from segue_ctl.free_ports import LOOPBACK, PortHolder
from segue_ctl.process_groups import cpu_ticks
from segue_ctl.vllm_server import Command, EnginePlace, EngineSpec, count_gpus, vllm_command
from segue_ctl.waiting import ClusterError, wait_for
from segue_ctl.warden import Warden

EngineCommand = Callable[[EngineSpec, EnginePlace, Path], Command]
Progress = Callable[[str], None]

ENGINE_START_S = 240.0
SERVICE_START_S = 30.0
_SOCKET_CHARS = 100
"""A unix socket's path must fit into 108 bytes."""
ROUTER = "router"
_IDLE_LOOK_S = 0.3
_IDLE_TICKS = 2
"""Clock ticks (10 ms) in that time which still count as idle."""


class Cluster:
    """Engines by name, in the order given; each protected one has a daemon of the same name.

    sinks: names of further daemons that have no engine and only hold replicas. routed: engines that routers
    are told of (None: all). routed_urls, routed_daemon_urls: where routers reach an engine or a daemon, if
    not at its own address (a proxy); peer_hosts: at which address a daemon dials its peers' ports, if not at
    theirs. side_cpus: cores for daemons and routers (None: any). engine_command: what an engine is; by
    default vLLM.
    """

    def __init__(
        self,
        engines: Sequence[EngineSpec],
        *,
        model_dir: Path,
        progress: Progress = lambda _: None,
        keep: bool = False,
        sinks: Sequence[str] = (),
        routed: Sequence[str] | None = None,
        routed_urls: Mapping[str, str] | None = None,
        routed_daemon_urls: Mapping[str, str] | None = None,
        peer_hosts: Mapping[str, str] | None = None,
        side_cpus: frozenset[int] | None = None,
        daemon_overrides: Mapping[str, Any] | None = None,
        router_overrides: Mapping[str, Any] | None = None,
        engine_command: EngineCommand = vllm_command,
    ) -> None:
        self.specs = {spec.name: spec for spec in engines}
        self.model_dir = model_dir.resolve()
        self.keep = keep
        self._progress = progress
        self._routed = list(self.specs if routed is None else routed)
        self._routed_urls = dict(routed_urls or {})
        self._routed_daemon_urls = dict(routed_daemon_urls or {})
        self._peer_hosts = dict(peer_hosts or {})
        self._side_cpus = side_cpus
        self._router_overrides = dict(router_overrides or {})
        self._engine_command = engine_command
        self._ports = PortHolder()
        self._warden = Warden()
        self.folder = _run_folder()
        self._warden.remove_folder(None if keep else self.folder)
        gpus = count_gpus()
        self._places = {
            spec.name: EnginePlace(self._ports.take(), self.folder / f"{spec.name}.sock", index, gpus)
            for index, spec in enumerate(engines)
        }
        with_daemon = [spec.name for spec in engines if spec.protected] + list(sinks)
        self._daemon_places = {
            name: DaemonPlace(
                name, self.folder / f"{name}.sock", self._ports.take(), self._ports.take(), self._ports.take()
            )
            for name in with_daemon
        }
        self._write_daemon_files(daemon_overrides or {})
        self._engines = {name: self._engine_child(name) for name in self.specs}
        self._daemons = {name: self._service_child("daemon", name) for name in with_daemon}
        self._routers: dict[str, tuple[Child, int]] = {}
        self._session: aiohttp.ClientSession | None = None

    # --- addresses ---

    @property
    def model(self) -> str:
        """The name that the engines serve the model under."""
        return self.model_dir.name

    @property
    def session(self) -> aiohttp.ClientSession:
        """For requests to the cluster while it runs."""
        assert self._session is not None, "the cluster is not started"
        return self._session

    def engine_url(self, name: str) -> str:
        return f"http://{LOOPBACK}:{self._places[name].port}"

    def daemon_url(self, name: str) -> str:
        return self._daemon_places[name].url

    def daemon_place(self, name: str) -> DaemonPlace:
        return self._daemon_places[name]

    def process(self, name: str) -> Child:
        """`engine-NAME`, `daemon-NAME` or a router, for those who signal it themselves. Raises KeyError."""
        return {child.name: child for child in self._children()}[name]

    def router_url(self, name: str = ROUTER) -> str:
        return f"http://{LOOPBACK}:{self._routers[name][1]}"

    def router_file(self, name: str = ROUTER) -> Path:
        return self.folder / f"{name}.yaml"

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The last log lines of `engine-NAME`, `daemon-NAME` or a router."""
        return next((c.log_tail(lines) for c in self._children() if c.name == name), "")

    # --- life ---

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; returns once the router has every engine. Raises ClusterError."""
        self._session = aiohttp.ClientSession()
        self._progress(f"starting {_list(self._daemons, 'daemon')} and {_list(self._engines, 'engine')}")
        await asyncio.gather(*(self.start_daemon(name) for name in self._daemons))
        await asyncio.gather(*(self.start_engine(name) for name in self._engines))
        await self.wait_linked()
        await self.start_router()

    async def stop(self) -> None:
        """End every process and remove the run folder (unless `keep`). Safe to call twice."""
        finish_all(self._children())  # first, and without an await: a second Ctrl-C cannot get between
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._warden.remove_folder(None)
        self._warden.close()
        self._ports.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- engines ---

    async def start_engine(self, name: str) -> None:
        """Start an engine; returns once it serves and, if protected, its daemon has it."""
        child, began = self._engines[name], time.monotonic()
        child.start()
        await wait_for(
            f"engine {name} serves {self.model}",
            lambda: checks.engine_ready(self.session, self.engine_url(name), self.model),
            timeout_s=ENGINE_START_S,
            children=(child,),
        )
        child.note_shared_memory()
        self._progress(f"engine {name} serves after {time.monotonic() - began:.0f} s")
        daemon = self._daemons.get(name)
        if daemon is not None and daemon.alive:
            await self.wait_registered(name)

    async def wait_registered(self, name: str) -> None:
        """Wait until the daemon of an engine has that very process registered."""
        await wait_for(
            f"engine {name} is registered with its daemon",
            lambda: checks.engine_registered(self.session, self.daemon_url(name), self._engines[name].pid),
            timeout_s=SERVICE_START_S,
            children=(self._engines[name], self._daemons[name]),
        )

    async def wait_linked(self) -> None:
        """Wait until every daemon that runs is connected to all others that run."""
        running = self.daemons_alive()
        for name in running:
            await wait_for(
                f"daemon {name} is connected to its peers",
                lambda name=name: checks.daemon_linked(self.session, self.daemon_url(name), running),  # type: ignore[misc]
                timeout_s=SERVICE_START_S,
                children=(self._daemons[name],),
            )

    def kill_engine(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the engine's whole process group; returns the monotonic time of the call in ns."""
        child = self._engines[name]
        return child.kill() if number == signal.SIGKILL else child.signal(number)

    async def wait_idle(self, *, timeout_s: float = 15.0) -> None:
        """Wait until no engine uses CPU any more: for a while after a request they wait by spinning."""
        deadline = time.monotonic() + timeout_s
        pids = [child.pid for child in self._engines.values() if child.alive]
        used = sum(cpu_ticks(pid) for pid in pids)
        while time.monotonic() < deadline:
            await asyncio.sleep(_IDLE_LOOK_S)
            before, used = used, sum(cpu_ticks(pid) for pid in pids)
            if used - before <= _IDLE_TICKS:
                return

    def stall_engine(self, name: str) -> int:
        """SIGSTOP to the engine's process group."""
        return self._engines[name].signal(signal.SIGSTOP)

    def continue_engine(self, name: str) -> int:
        """SIGCONT to the engine's process group."""
        return self._engines[name].signal(signal.SIGCONT)

    async def restart_engine(self, name: str) -> None:
        """End what is left of an engine, start it again on its port, wait until routers use it."""
        self._engines[name].finish(grace_s=0)
        await self.start_engine(name)
        for router in self._routers:
            await self.wait_router(router)

    # --- daemons ---

    async def start_daemon(self, name: str) -> None:
        """Start a daemon; returns once it answers."""
        child = self._daemons[name]
        child.start()
        await wait_for(
            f"daemon {name} answers",
            lambda: checks.answers(self.session, f"{self.daemon_url(name)}/livez"),
            timeout_s=SERVICE_START_S,
            children=(child,),
        )

    def daemons_alive(self) -> list[str]:
        """Names of the daemons that run."""
        return [name for name, child in self._daemons.items() if child.alive]

    def kill_daemon(self, name: str) -> int:
        """SIGKILL to a daemon; returns the monotonic time of the call in ns."""
        at_ns = self._daemons[name].kill()
        self._daemons[name].finish(grace_s=0)
        return at_ns

    def stop_daemon(self, name: str) -> None:
        """End a daemon in good order."""
        self._daemons[name].finish()

    # --- routers ---

    async def start_router(self, name: str = ROUTER, *, replicated: bool = True) -> str:
        """Start a router over all engines; not `replicated`: it is told of no daemon, so it replays.

        Returns its URL once every engine is up there. A router that was started before keeps its port.
        """
        if name not in self._routers:
            port = self._ports.take()
            entries = [
                RouterEngineEntry(
                    engine,
                    self._routed_urls.get(engine, self.engine_url(engine)),
                    self.model,
                    self._daemon_url_for_routers(engine) if replicated else "",
                )
                for engine in self._routed
            ]
            write_yaml(self.router_file(name), router_config(port, entries, self._router_overrides))
            self._routers[name] = (self._service_child("router", name), port)
        child = self._routers[name][0]
        child.start()
        await self.wait_router(name)
        return self.router_url(name)

    async def wait_router(self, name: str = ROUTER) -> None:
        """Wait until a router has every engine up."""
        child = self._routers[name][0]
        if child.alive:
            await wait_for(
                f"{name} has every engine",
                lambda: checks.router_ready(self.session, self.router_url(name), self._routed),
                timeout_s=SERVICE_START_S,
                children=(child,),
            )

    def kill_router(self, name: str = ROUTER) -> int:
        """SIGKILL to a router; returns the monotonic time of the call in ns."""
        child = self._routers[name][0]
        at_ns = child.kill()
        child.finish(grace_s=0)
        return at_ns

    # --- inside ---

    def _children(self) -> list[Child]:
        routers = [child for child, _ in self._routers.values()]
        return [*routers, *self._engines.values(), *self._daemons.values()]

    def _engine_child(self, name: str) -> Child:
        spec = self.specs[name]
        command = self._engine_command(spec, self._places[name], self.model_dir)
        # What vLLM puts into the folder for temporary files stays there after SIGKILL: let it be ours.
        env = command.env | {"TMPDIR": str(self.folder)}
        return self._child(f"engine-{name}", command.argv, env=env, cpus=spec.cpus)

    def _service_child(self, kind: str, name: str) -> Child:
        title = f"daemon-{name}" if kind == "daemon" else name
        argv = [console_script(f"segue-{kind}"), "--config", str(self.folder / f"{title}.yaml")]
        env = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        return self._child(title, argv, env=env, cpus=self._side_cpus)

    def _child(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None, cpus: frozenset[int] | None
    ) -> Child:
        log_file = self.folder / f"{name}.log"
        return Child(name, argv, log_file=log_file, warden=self._warden, env=env, cpus=cpus)

    def _write_daemon_files(self, overrides: Mapping[str, Any]) -> None:
        places = list(self._daemon_places.values())
        for place in places:
            others = [other for other in places if other is not place]
            host = self._peer_hosts.get(place.name, LOOPBACK)
            tree = daemon_config(place, others, overrides, peer_host=host)
            write_yaml(self.folder / f"daemon-{place.name}.yaml", tree)

    def _daemon_url_for_routers(self, engine: str) -> str:
        own = self.daemon_url(engine) if engine in self._daemons else ""
        return self._routed_daemon_urls.get(engine, own)


def _run_folder() -> Path:
    """A new private folder whose path is short enough for unix sockets."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent in (runtime, tempfile.gettempdir(), "/tmp"):  # noqa: S108 - mkdtemp makes it private
        if parent and len(parent) < _SOCKET_CHARS - 40 and os.access(parent, os.W_OK):
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix="segue-", dir=parent))
    raise ClusterError("no folder for sockets and logs", hint="set TMPDIR to a writable folder")


def _list(names: Mapping[str, object], noun: str) -> str:
    return f"{noun}{'s' if len(names) > 1 else ''} {', '.join(names)}"

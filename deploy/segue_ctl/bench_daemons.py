"""A pair of daemons for benchmarks: `a` beside the engine, `b` holding its replicas; real processes.

Owns their processes, their run folder and what they used of the CPU. Nothing outlives the block in which
they run, or the process that started them.
"""

from __future__ import annotations

import http.client
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from segue_core.messages.status import DaemonStatus, PeerStatus, Promoted, PromoteRequest, SequenceStatus
from segue_ctl import keygen
from segue_ctl.child import Child, finish_all
from segue_ctl.cluster_config import DaemonPlace, daemon_config, write_yaml
from segue_ctl.commands import console_script
from segue_ctl.free_ports import LOOPBACK, PortHolder
from segue_ctl.process_groups import cpu_ticks
from segue_ctl.waiting import ClusterError
from segue_ctl.warden import Warden

NAMES = ("a", "b")
START_S = 60.0
WORK_S = 120.0
HTTP_S = 10.0
PROMOTE_MS = 5_000
_POLL_S = 0.002
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class BenchDaemon:
    """One of the two, while it runs."""

    place: DaemonPlace
    child: Child
    headers: Mapping[str, str]

    @property
    def socket(self) -> str:
        return str(self.place.socket)

    def cpu_s(self) -> float:
        """CPU time used so far, all threads, in steps of 10 ms."""
        return cpu_ticks(self.child.pid) / _TICKS_PER_S

    def get(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """GET, or POST with a body: status code and what was answered; 0 if nobody answers."""
        connection = http.client.HTTPConnection(LOOPBACK, self.place.http_port, timeout=HTTP_S)
        try:
            connection.request("GET" if body is None else "POST", path, body, dict(self.headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def status(self) -> DaemonStatus:
        """What it says of itself."""
        return msgspec.json.decode(self.get("/status")[1], type=DaemonStatus)

    def link(self) -> PeerStatus:
        """Its link to the other one."""
        return self.status().peers[0]

    def held(self, seq: str) -> int:
        """Tokens of a sequence that it holds for its peer."""
        code, body = self.get(f"/v1/sequences/{seq}")
        return msgspec.json.decode(body, type=SequenceStatus).watermark if code == 200 else 0

    def promote(self, seq: str, tokens: int) -> int:
        """Wait until it holds so many, and have it promoted, as a router does; how many it holds. Costs it
        nothing while it waits."""
        request = PromoteRequest(epoch=2, want_tokens=tokens, wait_ms=PROMOTE_MS)
        code, body = self.get(f"/v1/sequences/{seq}/promote", msgspec.json.encode(request))
        return msgspec.json.decode(body, type=Promoted).watermark if code == 200 else 0


@contextmanager
def two_daemons(
    *,
    store_bytes: int,
    overrides: Mapping[str, Any],
    cpus: Sequence[frozenset[int] | None],
    tls: bool = False,
) -> Iterator[tuple[BenchDaemon, BenchDaemon]]:
    """`a` and `b`, linked. `overrides`: laid over both configurations; `cpus`: where each may run; `tls`:
    with keys made for them."""
    ports, warden = PortHolder(), Warden()
    daemons: list[BenchDaemon] = []
    try:
        with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
            folder = Path(name)
            places = [
                DaemonPlace(n, folder / f"{n}.sock", ports.take(), ports.take(), ports.take()) for n in NAMES
            ]
            folders = {}
            if tls:
                folders = {entry.name: entry.dir for entry in keygen.make(folder / "keys", NAMES).folders}
            for place, cores in zip(places, cpus, strict=True):
                others = [other for other in places if other is not place]
                keys = {"security": {"dir": folders[place.name]}} if tls else {}
                changes = {"store": {"budget_bytes": store_bytes}, **keys, **overrides}
                tree = daemon_config(place, others, changes)
                write_yaml(folder / f"{place.name}.yaml", tree)
                argv = [console_script("segue-daemon"), "--config", str(folder / f"{place.name}.yaml")]
                log_file = folder / f"{place.name}.log"
                child = Child(f"daemon {place.name}", argv, log_file=log_file, warden=warden, cpus=cores)
                token = (Path(folders[place.name]) / "token").read_text().strip() if tls else ""
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                daemons.append(BenchDaemon(place, child, headers))
            try:
                for daemon in daemons:
                    daemon.child.start()
                for daemon in daemons:
                    wait_until(lambda d=daemon: d.get("/livez")[0] == 200, daemon, START_S)  # type: ignore[misc]
                    wait_until(lambda d=daemon: d.link().connected, daemon, START_S)  # type: ignore[misc]
                yield daemons[0], daemons[1]
            finally:
                finish_all([daemon.child for daemon in daemons])
    finally:
        ports.close()
        warden.close()


def wait_until(
    check: Callable[[], bool], daemon: BenchDaemon, timeout_s: float = WORK_S, *, poll_s: float = _POLL_S
) -> None:
    """Return when `check` holds. Raises ClusterError if it does not in time, or the daemon has ended."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if not daemon.child.alive or time.monotonic() > deadline:
            ended = daemon.child.ended() or f"did not get there within {timeout_s:.0f} s"
            raise ClusterError(f"{daemon.child.name} {ended}\n{daemon.child.log_tail()}")
        time.sleep(poll_s)

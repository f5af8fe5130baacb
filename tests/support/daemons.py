"""Real `segue-daemon` processes for tests: generated configuration, readiness awaited, always stopped."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from support.waiting import wait_for


def free_port() -> int:
    """A port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DaemonProcess:
    """One daemon in a process of its own."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self.name = config["name"]
        self.path = folder / f"{self.name}.yaml"
        self.log = folder / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        path: str = self.config["socket"]
        return path

    def start(self, *, ready: bool = True) -> None:
        """Start it and wait until it answers."""
        self.path.write_text(yaml.safe_dump(self.config))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "segue_daemon", "--config", str(self.path)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        if ready:
            wait_for(lambda: self.get("/livez")[0] == 200 or not self.running(), "daemon answers")
            assert self.running(), self.log.read_text()

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; returns the exit status."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"{self.name} did not stop\n{self.log.read_text()}") from None

    def get(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """GET, or POST with a body; (status, JSON or text); status 0 if nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.config["http"]["port"], timeout=5)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("/status")[1]
        return body

    def protects(self) -> bool:
        """Whether an engine is registered with it."""
        return self.get("/readyz")[0] == 200

    def watermark(self, seq: str) -> int:
        """Tokens of `seq` held here for a peer, or acked by the peer for an engine's own; -1: it is over."""
        status, body = self.get(f"/v1/sequences/{seq}")
        return int(body["watermark"]) if status == 200 and body["role"] != "cached" else -1


class DaemonSet:
    """`names` daemons that are each other's peers, in a folder of their own."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="segue-test-"))
        controls = {name: free_port() for name in names}
        self.daemons = {
            name: DaemonProcess(
                self.folder,
                {
                    "name": name,
                    "socket": str(self.folder / f"{name}.sock"),
                    "http": {"port": free_port()},
                    "listen": {"control_port": controls[name]},
                    "peers": [
                        {"name": other, "control": f"127.0.0.1:{port}"}
                        for other, port in controls.items()
                        if other != name
                    ],
                    "store": {"budget_bytes": 16 << 20},
                    **changes,
                },
            )
            for name in names
        }

    def __getitem__(self, name: str) -> DaemonProcess:
        return self.daemons[name]

    def start(self) -> DaemonSet:
        for daemon in self.daemons.values():
            daemon.start()
        for daemon in self.daemons.values():
            wait_for(lambda d=daemon: all(p["connected"] for p in d.status()["peers"]), "peers connect")
        return self

    def stop(self) -> None:
        for daemon in self.daemons.values():
            if daemon.running():
                daemon.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def open_files(self, name: str) -> int:
        """File descriptors that daemon `name` has open."""
        process = self.daemons[name].process
        assert process is not None
        return len(os.listdir(f"/proc/{process.pid}/fd"))

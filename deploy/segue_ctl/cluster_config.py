"""The configuration files of a local cluster. Pure: addresses in, trees for YAML out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from segue_ctl.free_ports import LOOPBACK

STORE_BYTES = 256 << 20
"""Room for replicas in each daemon: 11,000 tokens of SmolLM2-135M."""

Tree = dict[str, Any]


@dataclass(frozen=True)
class DaemonPlace:
    """Where a daemon of the cluster listens."""

    name: str
    socket: Path
    http_port: int
    control_port: int
    bulk_port: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.http_port}"


@dataclass(frozen=True)
class RouterEngineEntry:
    """An engine as the router is told of it; `daemon` is empty where none stands beside it."""

    name: str
    url: str
    model: str
    daemon: str = ""


def daemon_config(
    place: DaemonPlace,
    others: Sequence[DaemonPlace],
    overrides: Mapping[str, Any],
    *,
    peer_host: str = LOOPBACK,
) -> Tree:
    """A daemon's file: every other daemon is its peer, reached at `peer_host`."""
    tree: Tree = {
        "name": place.name,
        "socket": str(place.socket),
        "http": {"host": LOOPBACK, "port": place.http_port},
        "listen": {"host": LOOPBACK, "control_port": place.control_port, "bulk_port": place.bulk_port},
        "peers": [{"name": other.name, "control": f"{peer_host}:{other.control_port}"} for other in others],
        "store": {"budget_bytes": STORE_BYTES},
    }
    return merged(tree, overrides)


def router_config(port: int, engines: Sequence[RouterEngineEntry], overrides: Mapping[str, Any]) -> Tree:
    """The router's file."""
    tree: Tree = {
        "listen": {"host": LOOPBACK, "port": port},
        "engines": [
            {"name": e.name, "url": e.url, "model": e.model} | ({"daemon": e.daemon} if e.daemon else {})
            for e in engines
        ],
    }
    return merged(tree, overrides)


def merged(tree: Tree, overrides: Mapping[str, Any]) -> Tree:
    """`tree` with `overrides` laid over it, group by group."""
    result = dict(tree)
    for key, value in overrides.items():
        below = result.get(key)
        result[key] = (
            merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
        )
    return result


def write_yaml(path: Path, tree: Tree) -> None:
    """Write one configuration file."""
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")

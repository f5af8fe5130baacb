"""What was found around a configuration file, and what it means. Pure: facts in, findings out."""

from __future__ import annotations

import os
from typing import Any

from segue_core.messages.probe import PeerFound, PeersFound
from segue_core.messages.status import DaemonStatus
from segue_ctl.doctor_findings import Finding, ok, problem, size, warning
from segue_ctl.doctor_machine import Machine
from segue_ctl.doctor_service import Folder, Port, ServiceFacts, peers_of
from segue_ctl.status import Seen

MOST_OF_MEMORY = 0.8
"""A store beyond this part of what is available leaves the engine little."""
EXPIRES_SOON_DAYS = 30
SECURITY_PAGE = "docs/configuration.md, Security"


def service_findings(facts: ServiceFacts, machine: Machine) -> list[Finding]:
    """Everything about one file, in the order of reading."""
    if facts.settings is None:
        return [problem("configuration", facts.error, "correct the file: docs/configuration.md has all keys")]
    findings = [_configuration(facts, facts.settings)]
    alive = is_alive(facts)
    findings += [_port(port, facts, alive) for port in facts.ports if port.port]
    findings += _token(facts)
    if facts.kind == "router":
        return findings + [_answer(*answer) for answer in facts.answers]
    if facts.folder is not None:
        findings.append(_folder(facts.folder, facts, alive))
    findings.append(_store(facts.settings["store"]["budget_bytes"], machine, alive))
    findings += _keys(facts, facts.settings)
    found = peers_of(facts)
    if found is not None:
        findings += [_peer(peer) for peer in found.peers]
    return findings


def is_alive(facts: ServiceFacts) -> bool:
    """Whether the process that this file is for runs here already."""
    seen, settings = facts.seen, facts.settings
    if seen is None or seen.status is None or settings is None or seen.kind != facts.kind:
        return False
    return not isinstance(seen.status, DaemonStatus) or bool(seen.status.name == settings["name"])


def _configuration(facts: ServiceFacts, settings: dict[str, Any]) -> Finding:
    if facts.error:
        todo = f"make keys with `seguectl keygen`, copy the folder whole ({SECURITY_PAGE})"
        return problem("configuration", facts.error, todo)
    if facts.kind == "router":
        return ok("configuration", f"router of engines {_names(settings['engines'])}")
    return ok("configuration", f"daemon {settings['name']}, peers: {_names(settings['peers'])}")


def _names(entries: list[dict[str, Any]]) -> str:
    return ", ".join(entry["name"] for entry in entries) or "none"


def _port(port: Port, facts: ServiceFacts, alive: bool) -> Finding:
    where = f"{port.host}:{port.port}"
    if not port.error:
        return ok(port.key, f"{where} is free")
    if not port.taken:
        return problem(port.key, f"{where}: {port.error}", "set an address of this host")
    if alive and facts.seen is not None:
        state = "ready" if facts.seen.ready else "not ready"
        return ok(port.key, f"{where} is taken by this {facts.kind}, which runs ({state})")
    who = _named(facts.seen)
    return problem(port.key, f"{where} is taken by {who}", "stop what uses it, or set another port")


def _named(seen: Seen | None) -> str:
    """Who it is that answers."""
    if seen is None or seen.status is None:
        return "another process"
    return f"daemon {seen.status.name}" if isinstance(seen.status, DaemonStatus) else "a router"


def _folder(folder: Folder, facts: ServiceFacts, alive: bool) -> Finding:
    assert facts.settings is not None
    path = facts.settings["socket"]
    if not folder.there:
        if folder.parent:
            return ok("socket", f"{path}: its folder will be made")
        return problem("socket", f"{folder.path} is not there", f"mkdir -p -m 700 {folder.path}")
    if not folder.is_folder:
        return problem("socket", f"{folder.path} is not a folder", "set `socket` in a folder of its own")
    if folder.owner not in (0, os.geteuid()):
        text = f"{folder.path} belongs to user {folder.owner}"
        return problem(
            "socket", text, f"chown {os.geteuid()} {folder.path}, or run this as the daemon's user"
        )
    if folder.mode & 0o077:
        text = f"{folder.path} has mode {folder.mode:04o}: others may put a socket there"
        return problem("socket", text, f"chmod 700 {folder.path}, or use a folder of its own")
    if facts.listener_pid is None:
        return ok("socket", f"{path}: nobody listens yet")
    if not alive:
        todo = "one socket, one daemon: stop that one, or set another `socket`"
        return problem("socket", f"{path}: process {facts.listener_pid} listens there already", todo)
    return ok("socket", f"{path}: this daemon listens (process {facts.listener_pid})")


def _store(budget: int, machine: Machine, alive: bool) -> Finding:
    """The budget is taken whole when the daemon starts."""
    text = f"{size(budget)} for replicas"
    rooms = [machine.memory_bytes if alive else machine.available_bytes]
    if machine.memory_limit is not None:
        rooms.append(machine.memory_limit - (0 if alive else machine.memory_charged or 0))
    room = min(room for room in (*rooms, 1 << 62) if room is not None)
    todo = "set a smaller `store.budget_bytes`, or give this container or host more memory"
    if budget > room:
        return problem("store", f"{text}, but there are {size(max(0, room))}", todo)
    if budget > MOST_OF_MEMORY * room:
        return warning("store", f"{text} of {size(room)}: the engine needs memory too", todo)
    return ok("store", f"{text} of {size(room)}" + (" (taken)" if alive else ""))


def _token(facts: ServiceFacts) -> list[Finding]:
    if facts.error:
        return []  # the configuration's line says it
    if facts.token:
        return [ok("token", "there is one; /status and the like want it")]
    return [ok("token", "none: whoever reaches the port may ask, and drain")]


def _keys(facts: ServiceFacts, settings: dict[str, Any]) -> list[Finding]:
    folder = settings["security"]["dir"]
    if facts.error:
        return []  # the configuration's line says it
    if not folder:
        if settings["security"]["insecure"]:
            todo = f"keep them on a trusted network, or make keys ({SECURITY_PAGE})"
            return [warning("keys", "none, and `insecure: true`: everybody who can connect is let in", todo)]
        return [ok("keys", "none: this daemon keeps to this host (loopback)")]
    if facts.peers is None or not isinstance(facts.peers.found, PeersFound):
        text = facts.peers.error if facts.peers is not None else "not tried"
        return [problem("keys", f"python -m segue_daemon.probe: {text}", "run it by hand to see more")]
    found = facts.peers.found
    if found.error:
        return [problem("keys", found.error, found.hint or SECURITY_PAGE)]
    days = found.certificate_days
    if days is not None and days < EXPIRES_SOON_DAYS:
        todo = f"seguectl keygen --force {settings['name']}, copy, restart"
        return [warning("keys", f"{folder}: the certificate expires in {days} days", todo)]
    return [ok("keys", f"{folder}: they fit together; certificate valid for {days} days")]


def _peer(peer: PeerFound) -> Finding:
    check = f"peer {peer.name}" if not peer.leader else "rank 0's daemon"
    if peer.error:
        text = f"{peer.address}: {peer.error}"
        if peer.control_ms is not None:
            text = f"{peer.address} answers on control, but takes no replicas: {peer.error}"
        todo = peer.hint or "start it, or correct `peers` and the keys on both sides"
        return problem(check, text, todo)
    how = "encrypted" if peer.encrypted else "not encrypted"
    what = "control and bulk" if peer.bulk else "control"
    return ok(check, f"{peer.address}: {what}, {how}, round trip {peer.control_ms:.1f} ms")


def _answer(url: str, name: str, seen: Seen | str) -> Finding:
    """An engine, or the daemon beside it, as the router would find it."""
    if isinstance(seen, str):
        if seen:
            return warning(f"engine {name}", f"{url}: {seen}", "start it: until then it gets no requests")
        return ok(f"engine {name}", f"{url}: healthy")
    check = f"daemon of {name}"
    if seen.status is None or not isinstance(seen.status, DaemonStatus):
        text = f"{url}: {seen.error or 'a router answers there'}"
        return problem(check, text, "start it, or correct the URL and the token: until then only replay")
    state = seen.status.engine.state
    if not seen.ready or state != "running":
        return warning(check, f"{url}: its engine is {state}", "start the engine with Segue's connector")
    return ok(check, f"{url}: ready, its engine runs")

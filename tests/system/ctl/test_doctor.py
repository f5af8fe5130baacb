"""`seguectl doctor` on this machine, on the driver's double, and around real daemons."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue_ctl import doctor_gpu, doctor_machine, doctor_service
from segue_ctl.certificates import Authority
from segue_ctl.cli import main
from segue_ctl.doctor_gpu_rules import gpu_findings
from segue_ctl.doctor_machine import Machine
from segue_ctl.doctor_service_rules import service_findings
from support import cuda_double
from support.cuda_double import Settings, device_uuid
from support.daemons import DaemonSet, free_port
from support.keys import copy_of, make_keys, with_certificate

TIMEOUT_S = 30.0
HANG_S = 1.0


@pytest.fixture(scope="module")
def library_folder() -> Path:
    """Where the built double lies."""
    return cuda_double.required()


@pytest.fixture(scope="module")
def machine() -> Machine:
    """This machine, looked at once."""
    return doctor_machine.look()


def test_a_machine_without_gpus_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a newcomer runs says that all is well, and leaves out no part."""
    assert main(["doctor", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == 0
    checks = {finding["check"]: finding for finding in said["sections"]["this machine"]}
    assert {"software", "memory", "shared memory", "lifeline", "ulimit -n", "ulimit -l"} <= checks.keys()
    assert checks["lifeline"]["verdict"] == checks["shared memory"]["verdict"] == "ok"
    assert said["sections"]["NVIDIA GPUs"][0]["check"] == "driver"


def look_at_gpus(library_folder: Path, timeout_s: float = TIMEOUT_S, **settings: Any) -> dict[str, Any]:
    """What doctor says of the driver's double: (verdict, found, advice) of each check of its first GPU."""
    environ = Settings(**settings).environment(library_folder)
    facts = doctor_gpu.look(timeout_s=timeout_s, bindings="13", environ=environ, tell=lambda _: None)
    said: dict[str, Any] = {}
    for finding in gpu_findings(facts):
        assert finding.verdict == "ok" or finding.todo
        said.setdefault(finding.check.strip(), (finding.verdict, finding.found, finding.todo))
    return said


def test_memory_of_every_gpu_is_really_shared(library_folder: Path) -> None:
    """What counts is not what the driver claims, but that bytes arrive: on each GPU, hidden ones included."""
    said = look_at_gpus(library_folder, devices=2, visible="1")
    assert {verdict for verdict, _, _ in said.values()} == {"ok"}
    assert str(device_uuid(0)) in said["GPU 0"][1] and str(device_uuid(1)) in said["GPU 1"][1]
    assert "1 of 2 GPUs" in said["an engine sees"][1]
    assert "every byte" in said["by IPC handle"][1] and "every byte" in said["by descriptor"][1]
    assert "64.0 MiB locked" in said["page-locked memory"][1]


def test_one_way_of_sharing_may_work_without_the_other(library_folder: Path) -> None:
    """The line tells which allocator's engines can be protected, and which call refuses."""
    said = look_at_gpus(library_folder, lacks=("vmm_fd",), failures="cuIpcOpenMemHandle:1:201")
    assert said["by IPC handle"][0] == "problem" and "cuIpcOpenMemHandle" in said["by IPC handle"][1]
    assert said["by descriptor"][0] == "warning" and "NOT_SUPPORTED" in said["by descriptor"][1]
    assert "PyTorch's default" in said["by IPC handle"][1] and "expandable" in said["by descriptor"][1]


@pytest.mark.parametrize(
    ("settings", "verdict", "words", "advice"),
    [
        ({"driver_version": 11040}, "problem", "11.4", "driver"),
        ({"devices": 1, "failures": "cuInit:1:100"}, "warning", "NO_DEVICE", "--gpus"),
        ({"failures": "cuInit:1:hang", "timeout_s": HANG_S}, "problem", "cuInit", "dmesg"),
    ],
)
def test_a_driver_that_cannot_be_used_is_told_and_holds_nobody_up(
    library_folder: Path, settings: dict[str, Any], verdict: str, words: str, advice: str
) -> None:
    """Too old, without a GPU, or hanging: doctor goes on, names it, and says what to do about that."""
    said = look_at_gpus(library_folder, **settings)
    assert said["driver"][0] == verdict and words in said["driver"][1] and advice in said["driver"][2]


def test_a_mapping_that_hangs_is_told_with_its_step(library_folder: Path) -> None:
    """Of two processes, the one that hangs is named, and both are gone afterwards."""
    said = look_at_gpus(library_folder, HANG_S, failures="cuIpcOpenMemHandle:1:hang,cuMemMap:1:hang")
    assert said["by IPC handle"][0] == said["by descriptor"][0] == "problem"
    assert "the daemon's end: did not return" in said["by IPC handle"][1]
    assert "the engine's end: did not return" in said["by descriptor"][1]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonSet]:
    """Two daemons with keys, connected."""
    keys = make_keys(tmp_path_factory.mktemp("keys") / "out", "a", "b", token=False)
    pair = DaemonSet("a", "b", store={"budget_bytes": 1 << 20})
    for name in ("a", "b"):
        pair[name].config["security"] = {"dir": str(keys / name)}
    try:
        yield pair.start()
    finally:
        pair.stop()


def doctor(file: Path, machine: Machine) -> dict[str, tuple[str, str]]:
    """(verdict, found) of each check of a daemon's file."""
    findings = service_findings(doctor_service.look_at(file, "daemon", TIMEOUT_S), machine)
    assert all(finding.todo for finding in findings if finding.verdict != "ok")
    return {finding.check: (finding.verdict, finding.found) for finding in findings}


def rewritten(daemons: DaemonSet, folder: Path, **changes: Any) -> Path:
    """The file of daemon a with changes, for one that does not run."""
    own: dict[str, Any] = {
        "socket": str(folder / "own" / "a.sock"),
        "http": {"port": free_port()},
        "listen": {"control_port": free_port()},
    }
    file = folder / "a.yaml"
    file.write_text(json.dumps(daemons["a"].config | own | changes))
    return file


def test_a_running_daemon_is_well_and_its_peer_does_not_notice(daemons: DaemonSet, machine: Machine) -> None:
    """Asking with a daemon's own keys takes neither its place nor its link, and leaves no line in a log."""
    link = daemons["a"].status()["peers"][0]
    logs = [daemons[name].log.read_text() for name in ("a", "b")]
    said = doctor(daemons["a"].path, machine)
    assert {verdict for verdict, _ in said.values()} == {"ok"}, said
    assert "this daemon, which runs (ready)" in said["http.port"][1]
    assert "this daemon listens" in said["socket"][1]
    assert "control and bulk, encrypted" in said["peer b"][1]
    assert "valid for" in said["keys"][1]
    assert daemons["a"].status()["peers"][0]["connected"] == link["connected"] is True
    assert [daemons[name].log.read_text() for name in ("a", "b")] == logs


def test_what_the_link_would_meet_is_known_before_the_start(
    daemons: DaemonSet, machine: Machine, tmp_path: Path
) -> None:
    """A certificate that this side trusts and the peer does not: only the peer can say so, and is heard."""
    keys = copy_of(Path(daemons["a"].config["security"]["dir"]), tmp_path / "keys")
    foreign = Authority.make(9)
    with_certificate(keys, "a", foreign)
    (keys / "ca.crt").write_bytes((keys / "ca.crt").read_bytes() + foreign.certificate)
    said = doctor(rewritten(daemons, tmp_path, security={"dir": str(keys)}), machine)
    assert said["configuration"][0] == "ok"
    assert said["keys"][0] == "warning" and "in 8 days" in said["keys"][1]
    assert said["peer b"][0] == "problem" and "answers on control, but takes no replicas" in said["peer b"][1]


def test_a_peer_without_keys_and_one_with_them_are_told_apart(
    daemons: DaemonSet, machine: Machine, tmp_path: Path
) -> None:
    """Where a network protects itself daemons have no keys; where only one side has, both are told."""
    plain = DaemonSet("c", store={"budget_bytes": 1 << 20})
    try:
        ports = {"b": daemons["b"], "c": plain.start()["c"]}
        peers = [
            {"name": name, "control": f"127.0.0.1:{one.config['listen']['control_port']}"}
            for name, one in ports.items()
        ]
        said = doctor(rewritten(daemons, tmp_path, security={}, peers=peers), machine)
    finally:
        plain.stop()
    assert said["peer c"][0] == "ok" and "control and bulk, not encrypted" in said["peer c"][1]
    assert said["peer b"][0] == "problem"
    # Which side closes first is a race: who loses it five times hears of no reason.
    assert any(text in said["peer b"][1] for text in ("this daemon has no keys", "hangs up in the handshake"))


def test_keys_ports_and_peers_that_are_not_in_order_are_named(
    daemons: DaemonSet, machine: Machine, tmp_path: Path
) -> None:
    """One look finds all of it, each with its own line."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        peers = [{"name": "b", "control": f"127.0.0.1:{free_port()}"}]
        file = rewritten(daemons, tmp_path, http={"port": taken}, peers=peers)
        (tmp_path / "own").mkdir(mode=0o755)
        said = doctor(file, machine)
    assert said["http.port"] == ("problem", f"127.0.0.1:{taken} is taken by another process")
    assert said["socket"][0] == "problem" and "0755" in said["socket"][1]
    assert said["peer b"][0] == "problem" and "refused" in said["peer b"][1]
    assert said["listen.control_port"][0] == said["keys"][0] == "ok"


def test_a_router_s_engines_and_daemons_are_asked_as_it_would(
    daemons: DaemonSet, machine: Machine, tmp_path: Path
) -> None:
    """What is not up yet, and what stands under a wrong address, shows before the first request."""
    where = f"http://127.0.0.1:{daemons['a'].config['http']['port']}"
    nobody = f"http://127.0.0.1:{free_port()}"
    engines = [
        {"name": "a", "url": nobody, "daemon": where},
        {"name": "b", "url": where, "daemon": nobody + "/"},
    ]
    file = tmp_path / "router.yaml"
    file.write_text(json.dumps({"engines": engines, "listen": {"port": free_port()}}))
    facts = doctor_service.look_at(file, "router", TIMEOUT_S)
    said = {finding.check: finding for finding in service_findings(facts, machine)}
    assert said["configuration"].verdict == said["listen.port"].verdict == "ok"
    assert said["engine a"].verdict == "warning" and "refused" in said["engine a"].found
    assert said["engine b"].verdict == "warning" and "HTTP 404" in said["engine b"].found
    assert said["daemon of a"].verdict == "warning" and "absent" in said["daemon of a"].found
    assert said["daemon of b"].verdict == "problem" and "refused" in said["daemon of b"].found

"""The launcher's parts: ports that stay free, groups that end, nothing that outlives its launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from segue_core.errors import StartupError
from segue_ctl.child import Child
from segue_ctl.cluster_config import DaemonPlace, RouterEngineEntry, daemon_config, router_config
from segue_ctl.free_ports import PortHolder
from segue_ctl.process_groups import members
from segue_ctl.vllm_server import EnginePlace, EngineSpec, vllm_command
from segue_ctl.waiting import ClusterError, wait_for
from segue_ctl.warden import Warden
from support.waiting import wait_for as await_it

TESTS = Path(__file__).resolve().parents[2]
# A process with a child in the same group, as engines have; both ignore SIGTERM.
STUBBORN = (
    "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); "
    "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.signal(15, signal.SIG_IGN); "
    "print(1, flush=True); signal.pause()'], stdout=subprocess.PIPE); p.stdout.readline(); "
    "print('up', flush=True); signal.pause()"
)


async def said(words: str) -> str:
    return words


def test_a_held_port_is_not_handed_out_twice_but_its_server_can_listen() -> None:
    """Two launchers at once do not collide, and a restarted server gets its own port back."""
    first = PortHolder()
    port = first.take()
    with socket.socket() as rival, pytest.raises(OSError):
        rival.bind(("127.0.0.1", port))
    for _life in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    first.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_no_free_port_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for the operator, not a traceback."""
    monkeypatch.setattr("segue_ctl.free_ports._TRIES", 0)
    with pytest.raises(StartupError, match="no free port"):
        PortHolder().take()


def test_a_child_ends_with_all_of_its_group_and_can_start_again(tmp_path: Path) -> None:
    """A process that ignores SIGTERM, and its own child, are gone after finish()."""
    warden = Warden()
    child = Child("c", [sys.executable, "-c", STUBBORN], log_file=tmp_path / "log", warden=warden)
    for _life in range(2):
        child.start()
        await_it(lambda: child.log_tail().endswith("up"), "it is up")
        group = child.pid
        assert len(members(group)) == 2
        child.finish(grace_s=0.1)
        assert members(group) == [] and not child.alive and "SIGKILL" in child.ended()
        (tmp_path / "log").write_text("")
    warden.close()


def test_nothing_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """kill -9 of the launcher ends its children's groups and removes the run folder."""
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    launcher = (
        "import pathlib, signal, sys\n"
        f"sys.path.append({str(TESTS)!r}); from support.waiting import wait_for\n"
        "from segue_ctl.child import Child; from segue_ctl.warden import Warden\n"
        f"folder = pathlib.Path({str(run_folder)!r}); warden = Warden(); warden.remove_folder(folder)\n"
        f"child = Child('c', [sys.executable, '-c', {STUBBORN!r}], log_file=folder / 'log', warden=warden)\n"
        "child.start()\n"
        "wait_for(lambda: child.log_tail().endswith('up'), 'the child is up')\n"
        "print(child.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        assert len(members(group)) == 2
        process.send_signal(signal.SIGKILL)
    await_it(lambda: not members(group) and not run_folder.exists(), "nothing is left", timeout_s=20)


def test_shared_memory_and_semaphores_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """After SIGKILL nobody else would: a few restarts of an engine must not fill /dev/shm."""
    code = (
        "import multiprocessing, signal; from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(memory.name.strip('/'), 'sem.' + lock._semlock.name.strip('/'), flush=True); signal.pause()"
    )
    warden = Warden()
    child = Child("c", [sys.executable, "-c", code], log_file=tmp_path / "log", warden=warden)
    child.start()
    await_it(lambda: "sem.mp-" in child.log_tail(), "it has both")
    files = [Path("/dev/shm") / name for name in child.log_tail().split()]
    assert all(file.exists() for file in files)
    child.kill()
    child.finish()
    warden.close()
    assert not any(file.exists() for file in files)


def test_a_child_runs_on_the_cores_it_was_given(tmp_path: Path) -> None:
    """And the launcher's own cores stay as they were."""
    warden, before = Warden(), os.sched_getaffinity(0)
    code = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"
    cpus = frozenset({min(before)})
    child = Child("c", [sys.executable, "-c", code], log_file=tmp_path / "log", warden=warden, cpus=cpus)
    child.start()
    await_it(lambda: not child.alive, "it has ended")
    child.finish()
    warden.close()
    assert child.log_tail() == str(sorted(cpus)) and os.sched_getaffinity(0) == before


async def test_a_child_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    """The operator need not look for the log of the process that did not start."""
    warden = Warden()
    child = Child("engine-a", [sys.executable, "-c", "raise SystemExit('no such model')"],
                  log_file=tmp_path / "log", warden=warden)  # fmt: skip
    child.start()
    with pytest.raises(
        ClusterError, match=r"(?s)engine-a ended with status 1 before it serves.*no such model"
    ):
        await wait_for("it serves", lambda: said("nothing yet"), timeout_s=30, children=(child,))
    child.finish()
    warden.close()


async def test_waiting_ends_at_its_deadline_with_what_is_missing() -> None:
    """Nothing waits for ever."""
    with pytest.raises(ClusterError, match=r"all up: not within 0 s: b is down"):
        await wait_for("all up", lambda: said("b is down"), timeout_s=0)


def test_every_daemon_has_all_others_as_peers() -> None:
    """And settings can be laid over the generated ones."""
    places = [DaemonPlace(name, Path(f"/run/{name}.sock"), 1, 2 + i, 9) for i, name in enumerate("abc")]
    tree = daemon_config(places[0], places[1:], {"store": {"lease_ms": 5}})
    assert [peer["name"] for peer in tree["peers"]] == ["b", "c"]
    assert tree["peers"][0]["control"] == "127.0.0.1:3"
    assert tree["store"]["lease_ms"] == 5 and tree["store"]["budget_bytes"] > 0


def test_a_router_without_replication_is_told_of_no_daemon() -> None:
    """Replay is measured with engines that have none."""
    entries = [RouterEngineEntry("a", "http://x", "m", "http://d"), RouterEngineEntry("b", "http://y", "m")]
    engines = router_config(1, entries, {})["engines"]
    assert engines[0]["daemon"] == "http://d" and "daemon" not in engines[1]


def test_an_engine_on_a_cpu_gets_its_core_and_its_connector() -> None:
    """VLLM_CPU_KVCACHE_SPACE would override the size of the KV cache, so it is not passed on."""
    place = EnginePlace(8001, Path("/run/a.sock"), 0)
    command = vllm_command(
        EngineSpec("a", frozenset({1}), extra_args=("--seed", "3")),
        place,
        Path("/models/m"),
        {"VLLM_CPU_KVCACHE_SPACE": "9"},
    )
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "1" and "VLLM_CPU_KVCACHE_SPACE" not in command.env
    assert command.argv[-2:] == ("--seed", "3") and '"socket": "/run/a.sock"' in " ".join(command.argv)
    plain = vllm_command(EngineSpec("a", protected=False), place, Path("/models/m"), {})
    assert "--kv-transfer-config" not in plain.argv


def test_engines_share_or_split_gpus() -> None:
    """Two GPUs: one each. One GPU: a part of its memory each."""
    where = [EnginePlace(1, Path("/s"), index, gpus=2) for index in range(2)]
    commands = [vllm_command(EngineSpec("a"), place, Path("/m"), {}) for place in where]
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == ["0", "1"]
    shared = vllm_command(EngineSpec("a"), EnginePlace(1, Path("/s"), 1, gpus=1), Path("/m"), {})
    assert "--gpu-memory-utilization" in shared.argv and "--kv-cache-memory-bytes" not in shared.argv

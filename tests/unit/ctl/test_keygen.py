"""`seguectl keygen`: one folder a process, secrets for nobody else, nothing overwritten by accident."""

from __future__ import annotations

import errno
import json
import stat
import sys
from pathlib import Path

import pytest

from segue_ctl import keygen
from segue_ctl.cli import main


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_is_made_can_be_read_by_nobody_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files 0600 in folders 0700; every daemon has all public keys, the router only the CA and the token."""
    out = tmp_path / "new" / "keys"
    assert main(["keygen", "--out", str(out), "a", "b", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["made"] and [(f["process"], f["name"], f["new"]) for f in made["folders"]] == [
        ("daemon", "a", True),
        ("daemon", "b", True),
        ("router", "", True),
    ]
    for path in [out, *out.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    files = content(out)
    assert {name for name in files if name.startswith("router")} == {"router/ca.crt", "router/token"}
    assert {name for name in files if name.startswith("daemons/b")} == {
        f"daemons/b/{name}"
        for name in (
            "ca.crt",
            "daemon.crt",
            "daemon.key",
            "daemon.curve",
            "peers/a.curve",
            "peers/b.curve",
            "token",
        )
    }
    assert len({files[f"{folder}/token"] for folder in ("router", "daemons/a", "daemons/b")}) == 1


def test_a_daemon_is_added_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same CA, same token; the others get its public key and no more."""
    out = tmp_path / "keys"
    assert main(["keygen", "--out", str(out), "a", "b"]) == 0
    before = content(out)
    capsys.readouterr()
    assert main(["keygen", "--out", str(out), "c"]) == 0
    after = content(out)
    assert {name: after[name] for name in before} == before
    new = {name for name in after if name not in before and not name.startswith("daemons/c")}
    assert new == {"ca/peers/c.curve", "daemons/a/peers/c.curve", "daemons/b/peers/c.curve"}
    assert "copy it to the running daemons" in capsys.readouterr().out


def test_keys_are_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip of the hand does not cut a daemon off; --force renews those named, and peers learn of it."""
    out = tmp_path / "keys"
    assert main(["keygen", "--out", str(out), "a", "b"]) == 0
    before = content(out)
    assert main(["keygen", "--out", str(out), "b", "c"]) == 2
    assert "keys of b already" in capsys.readouterr().err and content(out) == before
    assert main(["keygen", "--out", str(out), "b", "--force"]) == 0
    changed = {name for name, data in content(out).items() if before.get(name) != data}
    own = {f"daemons/b/{name}" for name in ("daemon.crt", "daemon.key", "daemon.curve")}
    shared = {f"{folder}/peers/b.curve" for folder in ("ca", "daemons/a", "daemons/b")}
    assert changed == own | shared


def test_a_daemon_that_was_shut_out_is_so_in_every_folder(tmp_path: Path) -> None:
    """Its public key, removed in one place, goes from all with the next run."""
    out = tmp_path / "keys"
    assert main(["keygen", "--out", str(out), "a", "b"]) == 0
    (out / "ca" / "peers" / "b.curve").unlink()
    assert main(["keygen", "--out", str(out), "c"]) == 0
    assert sorted(file.name for file in (out / "daemons/a/peers").iterdir()) == ["a.curve", "c.curve"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["../x"], "expected a daemon's name"),
        (["."], "expected a daemon's name"),
        ([""], "expected a daemon's name"),
        (["x" * 65], "expected a daemon's name"),
        (["a", "--days", "0"], "--days"),
    ],
)
def test_names_and_options_that_cannot_be_are_refused(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written anywhere."""
    assert main(["keygen", "--out", str(tmp_path / "keys"), *arguments]) == 2
    assert says in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_folder_that_others_may_enter_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is its mode changed behind anybody's back."""
    tmp_path.chmod(0o755)
    assert main(["keygen", "--out", str(tmp_path), "a"]) == 2
    assert "others may enter" in capsys.readouterr().err
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755 and list(tmp_path.iterdir()) == []


def test_a_ca_whose_key_is_lost_is_not_replaced_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Daemons of two CAs would refuse each other."""
    out = tmp_path / "keys"
    assert main(["keygen", "--out", str(out), "a"]) == 0
    (out / "ca" / "ca.key").unlink()
    assert main(["keygen", "--out", str(out), "b"]) == 2
    assert "put ca/ca.key back" in capsys.readouterr().err and not (out / "daemons" / "b").exists()


def test_without_cryptography_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Daemons and routers do not need it, so it is not always there."""
    monkeypatch.delitem(sys.modules, "segue_ctl.certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(["keygen", "--out", str(tmp_path / "keys"), "a"]) == 2
    assert "pip install 'segue-ha[keys]'" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_ca_that_was_not_finished_is_made_anew(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk in the middle, and the next run goes on as if nothing had been."""
    left = written
    usual = keygen._write

    def until_full(file: Path, data: bytes) -> None:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        left -= 1
        usual(file, data)

    monkeypatch.setattr(keygen, "_write", until_full)
    assert main(["keygen", "--out", str(tmp_path / "keys"), "a"]) == 1
    assert "No space left" in capsys.readouterr().err
    monkeypatch.setattr(keygen, "_write", usual)
    assert main(["keygen", "--out", str(tmp_path / "keys"), "a"]) == 0

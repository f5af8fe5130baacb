"""`seguectl check-config`: a valid file passes, a mistake is named by its key, nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue_ctl.cli import main

DAEMON = "name: a\nsocket: {folder}/a.sock\n"
ROUTER = (
    "engines:\n  - {{name: a, url: 'http://127.0.0.1:8001'}}\n  - {{name: b, url: 'http://127.0.0.1:8002'}}\n"
)


def _file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text.format(folder=folder))
    return str(path)


@pytest.mark.parametrize(("text", "kind"), [(DAEMON, "daemon"), (ROUTER, "router")])
def test_a_valid_file_is_recognised_by_its_keys(
    text: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator need not say which process a file is for."""
    file = _file(tmp_path, text)
    assert main(["check-config", file]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: ok (") and kind in out


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (DAEMON + "http: {{prot: 1}}\n", "http.prot"),
        (DAEMON + "http: {{port: 99999}}\n", "http.port"),
        (DAEMON + "socket2: x\n", "socket2"),
        (ROUTER + "listen: {{port: x}}\n", "listen.port"),
        (ROUTER + "timeouts: {{stall: 1}}\n", "timeouts.stall"),
    ],
)
def test_a_mistake_is_named_by_its_key_without_a_traceback(
    text: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says file and key; exit status 2."""
    file = _file(tmp_path, text)
    assert main(["check-config", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{file}: ") and f"`{key}`" in captured.err
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err


@pytest.mark.parametrize("text", ["{{", "- 1\n", "x: 1\n", ""])
def test_what_is_no_configuration_at_all_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken YAML, a list, or keys of neither process."""
    assert main(["check-config", _file(tmp_path, text)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_one_bad_file_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file is checked; the exit status is that of the worst."""
    assert main(["check-config", str(tmp_path / "missing"), _file(tmp_path, DAEMON)]) == 2
    captured = capsys.readouterr()
    assert "No such file" in captured.err and ": ok (daemon" in captured.out


def test_a_check_that_does_not_end_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a host that swaps; the other files are still checked."""
    monkeypatch.setattr("segue_ctl.check_config._TIMEOUT_S", 0.01)
    assert main(["check-config", _file(tmp_path, DAEMON)]) == 2
    assert "did not end within" in capsys.readouterr().err

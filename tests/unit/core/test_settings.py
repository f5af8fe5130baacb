"""Configuration: what is wrong is named with its path; the environment overrides single keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue_core.errors import ConfigError
from segue_core.settings import load_settings
from segue_daemon.settings import DaemonSettings

GOOD = "name: a\nsocket: /run/segue/a.sock\n"


def load(tmp_path: Path, text: str, **environ: str) -> DaemonSettings:
    path = tmp_path / "daemon.yaml"
    path.write_text(text)
    return load_settings(path, DaemonSettings, prefix="SEGUE_DAEMON", environ=environ)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "prot: 1", ["unknown key `prot`", "known keys", "socket"]),
        (GOOD + "http: {prt: 1}", ["unknown key `http.prt`", "host, port"]),
        (GOOD + "http: {port: 70000}", ["`http.port`", "65535"]),
        (GOOD + "http: {port: many}", ["`http.port`", "int"]),
        (GOOD + "peers: [{name: b, control: nowhere}]", ["`peers[0].control`"]),
        (GOOD + "peers: [{name: b, control: 'h:1', x: 1}]", ["`peers[0].x`"]),
        (GOOD + "peers: [{name: b, control: 'h:1'}, {name: b, control: 'h:2'}]", ["peers", "'b'", "twice"]),
        ("name: a", ["required key `socket`"]),
        ("name: a b\nsocket: s", ["`name`"]),
        ("- a\n- b", ["expected keys and values"]),
        ("name: [", ["not valid YAML"]),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, says: list[str]) -> None:
    """Somebody who mistypes a key learns which, where, and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for part in says:
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A wrong --config gives one clear line."""
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "none.yaml", DaemonSettings, prefix="X", environ={})


def test_a_variable_overrides_one_key(tmp_path: Path) -> None:
    """Containers set single keys without rewriting the file."""
    settings = load(tmp_path, GOOD + "http: {port: 7000}", SEGUE_DAEMON__HTTP__PORT="7005")
    assert settings.http.port == 7005
    with pytest.raises(ConfigError, match="known keys"):
        load(tmp_path, GOOD, SEGUE_DAEMON__HTPP__PORT="1")

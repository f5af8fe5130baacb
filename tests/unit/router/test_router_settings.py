"""The router's configuration: what is refused, and that the example is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue_core.errors import ConfigError
from segue_core.settings import load_settings
from segue_router.settings import RouterSettings

EXAMPLE = Path(__file__).parents[3] / "deploy" / "config" / "router.yaml"


def load(text: str, tmp_path: Path, **environment: str) -> RouterSettings:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return load_settings(path, RouterSettings, prefix="SEGUE_ROUTER", environ=environment)


def test_the_example_is_valid_and_shows_the_defaults() -> None:
    """What the commented file says is what happens without it."""
    example = load_settings(EXAMPLE, RouterSettings, prefix="SEGUE_ROUTER", environ={})
    plain = RouterSettings(engines=example.engines)
    assert example == plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "`engines` is missing"),
        ("engines: []", "engines"),
        ("engines: [{name: a}]", "url"),
        ("engines: [{name: 'a b', url: 'http://x'}]", "name"),
        ("engines: [{name: a, url: 'file:///x'}]", "url"),
        ("engines: [{name: a, url: 'http://x?y'}]", "url"),
        ("engines: [{name: a, url: 'http://[::1'}]", "engines[].url"),
        ("engines: [{name: a, url: 'http://x:99999999'}]", "engines[].url"),
        ("engines: [{name: a, url: 'http://x', daemon: 'http://:7101'}]", "engines[].daemon"),
        ("engines: [{name: a, url: 'http://x', daemons: ['http://d', 'http://:7']}]", "engines[].daemons"),
        ("engines: [{name: a, url: 'http://x', daemons: ['http://d', 'http://d/']}]", "twice"),
        ("engines: [{name: a, url: 'http://x', daemon: 'http://d', daemons: ['http://e']}]", "and `daemons`"),
        (
            """engines:
                - {name: a, url: 'http://x', daemon: 'http://d'}
                - {name: b, url: 'http://y', daemons: ['http://d/', 'http://e']}""",
            "twice",
        ),
        ("engines: [{name: a, url: 'http://x', api_key_env: 'a b'}]", "api_key_env"),
        ("engines: [{name: a, url: 'http://x', generation_defaults: {max_new_tokens: 5}}]", "max_new_tokens"),
        ("engines: [{name: a, url: 'http://x', daemon: 'unix:/x'}]", "daemon"),
        ("engines: [{name: a, url: 'http://x'}, {name: b, url: 'http://x/'}]", "twice"),
        ("engines: [{name: a, url: 'http://x'}]\ntimeouts: {stall_ms: 0}", "timeouts.stall_ms"),
        ("engines: [{name: a, url: 'http://x'}]\nfailover: {moves: 1}", "failover.moves"),
        ("engines: [{name: a, url: 'http://x'}]\nlisten: {host: ''}", "listen.host"),
    ],
)
def test_mistakes_name_their_key(text: str, says: str, tmp_path: Path) -> None:
    """The error says which key."""
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path)
    assert says in str(caught.value)


def test_the_environment_overrides_a_key(tmp_path: Path) -> None:
    """SEGUE_ROUTER__LISTEN__PORT."""
    settings = load("engines: [{name: a, url: 'http://x'}]", tmp_path, SEGUE_ROUTER__LISTEN__PORT="1234")
    assert settings.listen.port == 1234

"""Tokens, secrets on disk, and which addresses may not be opened without protection."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue_core.errors import ConfigError
from segue_core.security import (
    SecuritySettings,
    Tokens,
    is_loopback,
    load_tokens,
    read_secret,
    refuse_unprotected,
    unprotected,
)

TOKEN = "0123456789abcdef"
OTHER = "fedcba9876543210"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
        ("2130706433", False),
    ],
)
def test_only_what_surely_is_this_host_counts_as_loopback(host: str, loopback: bool) -> None:
    """An address in disguise is never opened unprotected."""
    assert is_loopback(host) is loopback


def test_an_open_address_needs_protection_or_the_word_that_it_needs_none() -> None:
    """The error names key, address and the way out; `insecure` lets it pass."""
    addresses = [("http.host", "0.0.0.0", "token"), ("listen.host", "0.0.0.0", "keys"), ("x", "::1", "keys")]
    found = unprotected(addresses, {"token": True, "keys": False})
    assert [opening.key for opening in found] == ["listen.host"]
    with pytest.raises(ConfigError, match=r"`listen.host`: 0.0.0.0 .* no keys .*keygen.*security.insecure"):
        refuse_unprotected(found, SecuritySettings())
    refuse_unprotected(found, SecuritySettings(insecure=True))


def test_a_token_opens_and_everything_else_does_not() -> None:
    """Both tokens are good while one is being replaced; ours is the first."""
    tokens = Tokens((TOKEN, OTHER))
    assert tokens.headers == {"Authorization": f"Bearer {TOKEN}"}
    assert tokens.accepts(f"Bearer {TOKEN}") and tokens.accepts(f"Bearer {OTHER}")
    for wrong in (
        None,
        "",
        TOKEN,
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        "Bearer \udcff",
        "Bearer é",
    ):
        assert not tokens.accepts(wrong)
    assert not Tokens() and Tokens().headers == {}


def test_a_token_comes_from_the_file_else_the_variable_else_the_folder(tmp_path: Path) -> None:
    """And an empty variable, or a folder without one, means that there is none."""
    for name, token in (("named", TOKEN), ("token", OTHER)):
        (tmp_path / name).write_text(f"{token}\n")
        (tmp_path / name).chmod(0o600)
    folder, named, variable = str(tmp_path), str(tmp_path / "named"), {"SEGUE_TOKEN": "v" * 16}
    cases = [
        (SecuritySettings(dir=folder, token_file=named), variable, TOKEN),
        (SecuritySettings(dir=folder), variable, "v" * 16),
        (SecuritySettings(dir=folder), {"SEGUE_TOKEN": ""}, OTHER),
    ]
    for settings, environ, token in cases:
        assert load_tokens(settings, environ).accepts(f"Bearer {token}")
    (tmp_path / "token").unlink()
    assert not load_tokens(SecuritySettings(dir=folder), {}) and not load_tokens(SecuritySettings(), {})
    with pytest.raises(ConfigError, match=r"security.token_file: cannot read .*none"):
        load_tokens(SecuritySettings(token_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize("text", ["", "short", "two words of text", "a" * 300, "\n".join([TOKEN] * 5)])
def test_a_token_that_is_none_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    """A file with something else in it never becomes a weak token."""
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        load_tokens(SecuritySettings(token_file=str(file)), {})
    assert "expected a token a line" in str(caught.value)
    assert len(text) < 5 or text not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602])
def test_a_secret_that_others_can_get_at_is_refused(mode: int, tmp_path: Path) -> None:
    """The message says which file and what to do."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can get at {file} .*chmod 600"):
        read_secret(file, "security.token_file")
    file.chmod(0o400)
    assert read_secret(file, "security.token_file") == TOKEN.encode()

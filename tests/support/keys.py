"""Keys for tests, made by `seguectl keygen`, and some that are wrong in one way."""

from __future__ import annotations

import shutil
from pathlib import Path

from segue_ctl import keygen
from segue_ctl.certificates import Authority


def make_keys(folder: Path, *names: str, token: bool = True) -> Path:
    """The folder that holds a folder for each of `names`."""
    keygen.make(folder, names)
    if not token:
        for name in names:
            (folder / "daemons" / name / "token").unlink()
    return folder / "daemons"


EXPIRED = -0.01
"""Days: a quarter of an hour ago."""


def copy_of(folder: Path, copy: Path) -> Path:
    """A copy of a daemon's folder, to be spoiled."""
    shutil.copytree(folder, copy)
    return copy


def with_certificate(folder: Path, name: str, authority: Authority, days: float = 9) -> Path:
    """Put another certificate into a daemon's folder."""
    certificate, key = authority.issue(name, days)
    (folder / "daemon.crt").write_bytes(certificate)
    (folder / "daemon.key").write_bytes(key)
    return folder


def authority_of(folder: Path) -> Authority:
    """The CA of the keys that `make_keys` made into `folder`."""
    ca = folder / "ca"
    return Authority.load((ca / "ca.crt").read_bytes(), (ca / "ca.key").read_bytes())

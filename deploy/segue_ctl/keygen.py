"""`seguectl keygen`: the keys that a cluster needs, one folder a process, to be copied as they are.

    OUT/ca/              the CA's key: only needed to add daemons later, belongs on no server
    OUT/daemons/NAME/    `security.dir` of that daemon: ca.crt daemon.crt daemon.key daemon.curve peers/ token
    OUT/router/          `security.dir` of routers: ca.crt token

Asks nobody and sends nothing. Invariants: what is there stays unless --force says otherwise; secrets are
never readable by others, not even for a moment.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from segue_core.errors import ConfigError, SegueError
from segue_core.security import (
    CA_FILE,
    CERTIFICATE_FILE,
    CURVE_FILE,
    KEY_FILE,
    PEER_SUFFIX,
    PEERS_FOLDER,
    TOKEN_FILE,
)
from segue_ctl.output import OK, table, to_json

CA_KEY_FILE = "ca.key"
DAYS = 3_650
MAX_DAYS = 36_500
TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

_EPILOG = """\
examples:
  seguectl keygen --out keys gpu0 gpu1     a CA, keys of two daemons, the token
  seguectl keygen --out keys gpu2          one more: same CA, same token
  scp -rp keys/daemons/gpu0 host0:/etc/segue/keys
  scp -rp keys/router router0:/etc/segue/keys

NAME is the `name` in the daemon's configuration. Each process has one folder, which goes to its host as it
is, owned by the user that runs it; `security.dir` says where. A daemon that is added must be known to the
others: copy the folder `peers` of one of them to all (no restart). To shut a daemon out, remove its file from
ca/peers and from `peers` on every host, and restart the others. --force NAME renews the keys of one daemon;
if a whole host is lost, make all anew in another folder: its token and its certificate are known.
Keep OUT/ca away from servers: whoever has it can make daemons.

--json prints {"ca": FILE, "made": BOOL, "folders": [{"process": "daemon"|"router", "name": NAME, "dir": DIR,
"files": [NAME...], "new": BOOL}]}.

exit status: 0 made, 1 cannot write, 2 wrong usage, or something is there already
"""


class Folder(msgspec.Struct, frozen=True):
    """What one process gets."""

    process: str
    name: str
    dir: str
    files: tuple[str, ...]
    new: bool


class Made(msgspec.Struct, frozen=True):
    """The cluster's keys; `made`: whether the CA is new."""

    ca: str
    made: bool
    folders: tuple[Folder, ...]


def add_parser(verbs: Any) -> None:
    """Add `keygen` to the command line."""
    parser = verbs.add_parser(
        "keygen",
        help="make the keys of a cluster",
        description="Make what the daemons and routers of a cluster prove themselves with.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="a daemon, as its configuration calls it")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="made if it is not there")
    parser.add_argument(
        "--force", action="store_true", help="make new keys for these names, even if they have some"
    )
    parser.add_argument(
        "--days", type=int, default=DAYS, help=f"how long certificates are valid (default: {DAYS})"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the keys and say what goes where."""
    if not 1 <= args.days <= MAX_DAYS:
        raise ConfigError(f"--days: expected a number from 1 to {MAX_DAYS}")
    made = make(args.out, args.names, force=args.force, days=args.days)
    print(to_json(made) if args.json else render(made))
    return OK


def render(made: Made) -> str:
    """For people."""
    rows = [
        [f"{f.process} {f.name}".rstrip(), f.dir, "new" if f.new else "peers", " ".join(f.files)]
        for f in made.folders
    ]
    lines = [
        table(rows, header=["FOR", "FOLDER", "", "FILES"]),
        "",
        "Copy each folder whole to its host, owned by the user that runs the process (scp -p keeps modes),",
        "and name it in the configuration, as in  security: {dir: /etc/segue/keys}",
        f"Keep {made.ca} away from servers: it is needed only to add daemons.",
    ]
    if any(not folder.new for folder in made.folders):
        lines.append('"peers": only the folder peers/ changed there; copy it to the running daemons, too.')
    return "\n".join(lines)


def make(out: Path, names: Iterable[str], *, force: bool = False, days: int = DAYS) -> Made:
    """Make or complete the folder `out`. Raises ConfigError if keys are there already (without `force`)."""
    from segue_ctl.certificates import Authority

    names = list(dict.fromkeys(names))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r}: expected a daemon's name: letters, digits, . _ -, up to 64 characters"
            )
    daemons = out / "daemons"
    there = [name for name in names if (daemons / name).exists()]
    if there and not force:
        raise ConfigError(
            f"{out} has keys of {', '.join(there)} already",
            hint="--force replaces them: peers need the new ones",
        )
    try:
        _private_folder(out)
        new_ca = not (out / "ca" / CA_KEY_FILE).exists()
        if new_ca and daemons.exists():
            raise ConfigError(
                f"{out} has daemons, but not their CA", hint=f"put ca/{CA_KEY_FILE} back for now"
            )
        authority = _authority(out / "ca", Authority, new=new_ca, days=days)
        token = _token(out / "router" / TOKEN_FILE, authority.certificate)
        for name in names:
            certificate, key = authority.issue(name, days)
            public, secret = zmq.curve_keypair()
            _daemon_folder(daemons / name, authority.certificate, certificate, key, secret, token)
            _write(out / "ca" / PEERS_FOLDER / f"{name}{PEER_SUFFIX}", public + b"\n")
        folders = _share_public_keys(out, names)
    except OSError as error:
        raise SegueError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return Made(str(out / "ca"), new_ca, tuple(folders))


def _authority(folder: Path, kind: Any, *, new: bool, days: int) -> Any:
    _private_folder(folder)
    if not new:
        return kind.load((folder / CA_FILE).read_bytes(), (folder / CA_KEY_FILE).read_bytes())
    authority = kind.make(days)
    _write(folder / CA_FILE, authority.certificate)
    _write(folder / CA_KEY_FILE, authority.key)  # last: where it is, the CA is whole
    return authority


def _token(file: Path, ca: bytes) -> bytes:
    """The cluster's token, made if there is none; beside it what else a router needs."""
    _private_folder(file.parent)
    _write(file.parent / CA_FILE, ca)
    if not file.exists():
        _write(file, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
    return file.read_bytes()


def _daemon_folder(
    folder: Path, ca: bytes, certificate: bytes, key: bytes, curve_secret: bytes, token: bytes
) -> None:
    _private_folder(folder.parent)
    _private_folder(folder)
    _write(folder / KEY_FILE, key)
    _write(folder / CURVE_FILE, curve_secret + b"\n")
    _write(folder / TOKEN_FILE, token)
    _write(folder / CERTIFICATE_FILE, certificate)
    _write(folder / CA_FILE, ca)


def _share_public_keys(out: Path, new: list[str]) -> list[Folder]:
    """Give every daemon the public keys of all; what each process has then."""
    public = {file.name: file.read_bytes() for file in sorted((out / "ca" / PEERS_FOLDER).iterdir())}
    folders = []
    for folder in sorted(path for path in (out / "daemons").iterdir() if path.is_dir()):
        _private_folder(folder / PEERS_FOLDER)
        for name, key in public.items():
            _write(folder / PEERS_FOLDER / name, key)
        for file in (folder / PEERS_FOLDER).glob(f"*{PEER_SUFFIX}"):
            if file.name not in public:  # shut out by who removed it from ca/peers
                file.unlink()
        folders.append(_folder("daemon", folder.name, folder, folder.name in new))
    return [*folders, _folder("router", "", out / "router", True)]


def _folder(process: str, name: str, folder: Path, new: bool) -> Folder:
    files = [f"{file.name}/" if file.is_dir() else file.name for file in sorted(folder.iterdir())]
    return Folder(process, name, str(folder), tuple(files), new)


def _private_folder(folder: Path) -> None:
    """`folder`, entered by nobody else, made if it is not there. Raises ConfigError if others may enter."""
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
    elif folder.stat().st_mode & 0o077:
        raise ConfigError(
            f"others may enter {folder}",
            hint="name a folder that nobody else may enter (mode 700), or a new one",
        )


def _write(file: Path, content: bytes) -> None:
    """Put `content` in place, whole or not at all, for nobody else from its first moment."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    opened = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(opened, "wb") as target:
        target.write(content)
        target.flush()
        os.fchmod(opened, 0o600)  # whatever the umask took away
    part.replace(file)

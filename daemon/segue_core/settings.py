"""Configuration: one YAML file plus environment variables, into frozen structs.

Unknown keys and bad values are refused with the path of the key, what was found and what was
expected. An environment variable overrides one key: `SEGUE_ROUTER__LISTEN__PORT=9000` sets
`listen.port` of the router (the prefix is the caller's); its value is read as YAML.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from segue_core.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20

S = TypeVar("S", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every settings struct: frozen, keyword only, unknown keys refused."""


def load_settings(
    path: Path | None, kind: type[S], *, prefix: str, environ: Mapping[str, str] | None = None
) -> S:
    """Read `path` (None: no file) and the environment into `kind`.

    Raises ConfigError naming file and key. `prefix` is the variables' prefix, such as `SEGUE_DAEMON`.
    """
    environ = os.environ if environ is None else environ
    source = str(path) if path else "configuration"
    tree = _read_yaml(path) if path else {}
    for name, text in sorted(environ.items()):
        if name.startswith(prefix + "__"):
            _override(tree, name, name[len(prefix) + 2 :].lower().split("__"), text)
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise _config_error(source, error, kind) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name the file with --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, found {type(tree).__name__}")
    return tree


def _override(tree: dict[str, Any], name: str, keys: list[str], text: str) -> None:
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{name}: `{key}` is not a group of keys")
        node = child
    try:
        node[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {text!r}") from error


def _config_error(source: str, error: msgspec.ValidationError, kind: type[Any]) -> ConfigError:
    message, _, path = str(error).partition(" - at `")
    key = path.rstrip("`").removeprefix("$").removeprefix(".")
    if message.startswith("Object contains unknown field"):
        field = message.split("`")[1]
        where = f"{key}.{field}" if key else field
        return ConfigError(f"{source}: unknown key `{where}`", hint=_known_keys(kind, key))
    if message.startswith("Object missing required field"):
        field = message.split("`")[1]
        return ConfigError(f"{source}: required key `{f'{key}.{field}' if key else field}` is missing")
    return ConfigError(f"{source}: `{key}`: {message[0].lower()}{message[1:]}")


def _known_keys(kind: type[Any], path: str) -> str:
    """The keys allowed at `path` (dots and [...] separate), as a hint."""
    found: Any = kind
    for part in path.replace("[...]", "").replace("]", "").replace("[", ".").split("."):
        if part and not part.isdigit():
            fields = {f.encode_name: f.type for f in msgspec.structs.fields(found)}
            found = _struct_in(fields.get(part))
        if found is None:
            return ""
    return "known keys: " + ", ".join(f.encode_name for f in msgspec.structs.fields(found))


def _struct_in(annotation: Any) -> Any:
    """The Struct type inside `annotation`, such as in tuple[Engine, ...] or Engine | None."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _struct_in(argument)
        if found is not None:
            return found
    return None


def check_unique(values: list[str], key: str) -> None:
    """Raise ConfigError if two of `values` are equal; `key` says where they stand."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"`{key}`: {value!r} stands there twice")
        seen.add(value)

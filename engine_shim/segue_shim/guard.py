"""Keeps the sidecar's troubles out of the engine: whatever escapes a hook is logged once and contained."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

Hook = TypeVar("Hook", bound=Callable[..., Any])

logger = logging.getLogger("segue_shim")


class Containable(Protocol):
    """Something with hooks that an engine calls. `broken` is set once, and for good."""

    broken: bool

    def on_broken(self) -> None:
        """Let go of everything; may raise."""
        ...


def contained(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Decorate a hook: an exception breaks its object, and `default()` is returned then and from then on.

    This is a supervisor: an exception that leaves an engine's hook ends the engine.
    """

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(self: Containable, /, *args: Any, **kwargs: Any) -> Any:
            if self.broken:
                return default()
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.broken = True
                logger.exception("segue: %s failed; the engine runs on, unprotected", hook.__qualname__)
                try:
                    self.on_broken()
                except Exception:
                    logger.exception("segue: and could not let go cleanly")
                return default()

        return cast(Hook, call)

    return decorate


def nothing() -> None:
    """The default of hooks that return nothing."""

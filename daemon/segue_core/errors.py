"""The errors that cross a module boundary. Each says whether a retry can help and what an operator can do."""

from __future__ import annotations


class SegueError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        retryable: whether the same call may succeed later without anybody changing anything.
        hint: what an operator can do about it; empty when the message says it all.
    """

    def __init__(self, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.retryable = retryable

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigError(SegueError):
    """A configuration file, variable or flag is wrong; the message names the key and what was expected."""


class ProtocolError(SegueError):
    """Something that arrived from outside is not what the protocol allows.

    The message names the peer, the message and the field. The connection it came from is closed;
    nothing it carried is used.
    """


class GeometryError(SegueError):
    """A KV cache layout that Segue does not understand. The engine runs on, unprotected."""


class Unavailable(SegueError):
    """A process that is needed cannot be reached right now."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, retryable=True)


class StartupError(SegueError):
    """The process cannot start: a port in use, a missing folder, a socket that belongs to another daemon."""

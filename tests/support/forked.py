"""Runs a function in a forked child of its own: what sticks to a process ends with it. POSIX, one thread."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

CHILD_S = 28
"""A child that hangs is ended by the kernel."""


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a child; an exception there is an AssertionError here with its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        os.close(reader)
        _answer(writer, function, arguments)
        os._exit(0)
    os.close(writer)
    with contextlib.closing(os.fdopen(reader, "rb")) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    assert said, f"{function.__name__}{arguments}: the child ended with status {status}"
    failed, result = msgspec.msgpack.decode(said)
    assert not failed, f"{function.__name__}{arguments}: {result}"
    return result


def _answer(writer: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        said = [False, function(*arguments)]
    except BaseException:
        said = [True, traceback.format_exc()]
    with os.fdopen(writer, "wb") as answer:
        answer.write(msgspec.msgpack.encode(said))

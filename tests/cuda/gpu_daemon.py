"""A daemon's GPU side, run in a child with the driver's double: several mappings, sessions, injected
trouble."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import numpy as np

from segue_core.clock import MonotonicClock
from segue_core.geometry import Geometry
from segue_core.messages.local import Register
from segue_daemon.cuda.pages import CudaPages
from segue_daemon.engine import EngineSession
from segue_daemon.open_pages import open_pages
from support.cuda_double import Control

opened: dict[str, CudaPages] = {}
state: dict[str, Any] = {}


def open_as(name: str, encoded: bytes, timeout_s: float = 20.0, descriptors: list[int] | None = None) -> None:
    """Map what an engine exported, under a name."""
    geometry = msgspec.msgpack.decode(encoded, type=Geometry).validate()
    try:
        opened[name] = CudaPages(geometry, descriptors or [], copy_timeout_s=timeout_s)
    finally:
        close_all(descriptors)


def refusal(encoded: bytes, descriptors: list[int] | None = None) -> str:
    """What the engine is told that cannot be mapped."""
    geometry = msgspec.msgpack.decode(encoded, type=Geometry).validate()
    try:
        open_pages(geometry, descriptors or []).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close_all(descriptors)
    return "none"


def close_all(descriptors: list[int] | None) -> None:
    """They are the caller's."""
    for fd in descriptors or []:
        os.close(fd)


def copy(name: str, block: int) -> bytes:
    """A block's bytes."""
    out = np.empty(opened[name].geometry.block_bytes, np.uint8)
    opened[name].copy_block(block, out)
    return out.tobytes()


def failing_copy(name: str, block: int) -> list[str]:
    """[what a copy raises, what the pages say of themselves]."""
    try:
        copy(name, block)
    except Exception as error:
        return [type(error).__name__, opened[name].failure]
    return ["none", opened[name].failure]


def close(name: str) -> None:
    """Without waiting."""
    opened[name].close()


def released(name: str) -> bool:
    """Wait until the engine's memory is let go."""
    return opened.pop(name).released.wait(20)


def fail(failures: str) -> None:
    """Inject errors."""
    Control().fail(failures)


def fail_next(call: str, code: int) -> None:
    """The next call of this entry point fails."""
    Control().fail(f"{call}:1:{code}")


def hold() -> None:
    """The GPU stands still."""
    Control().hold()


def let_go() -> None:
    """And goes on."""
    Control().let_go()


def calls(entry_point: str) -> int:
    """How often it was called."""
    return Control().calls(entry_point)


def locked_buffers(name: str) -> int:
    """How many page-locked buffers are in use once a hundred more were used and forgotten."""
    for _ in range(100):
        opened[name].buffer(8192)[:] = 1
    opened[name].copy_block(0, opened[name].buffer(opened[name].geometry.block_bytes))
    return Control().count("registrations")


def settled(expected: dict[str, int]) -> dict[str, int]:
    """What is held, once it is what is expected, or after some seconds: memory is let go without being
    waited for."""
    deadline = time.monotonic() + 10
    while (found := Control().counts()) != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def register(encoded: bytes, descriptors: list[int]) -> None:
    """Take an engine in."""
    message = msgspec.msgpack.decode(encoded, type=Register)
    state["session"] = EngineSession(message, descriptors, os.getpid(), MonotonicClock(), max_sequences=8)


def drained() -> list[Any]:
    """Apply the journal: [tokens that may be shipped of each sequence, whether steps are awaited]."""
    session: EngineSession = state["session"]
    session.drain()
    found = {seq: sequence.shippable for seq, sequence in session.ledger.sequences.items()}
    return [found, session.awaiting]


def drained_until(seq: str, tokens: int) -> bool:
    """Apply the journal until so much may be shipped."""
    deadline = time.monotonic() + 20
    while drained()[0].get(seq) != tokens:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def session_block(block: int) -> bytes:
    """A block out of the session's pages."""
    pages = state["session"].pages
    out = np.empty(pages.geometry.block_bytes, np.uint8)
    pages.copy_block(block, out)
    return out.tobytes()


def close_session() -> bool:
    """The engine is gone: let all of it go."""
    session = state.pop("session")
    session.close()
    released: bool = session.pages.released.wait(20)
    return released

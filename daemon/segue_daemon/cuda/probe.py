"""The daemon's end of `seguectl doctor` on GPUs: maps what another process shares, and compares every byte.

    python -m segue_daemon.cuda.probe map FD     the other process is at the socket FD

Run as a process of its own: a driver that is out of order may hang or end it. Goes the way of a real
registration (`CudaPages`, `TimelineView`), so what it finds is what an engine would meet.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable

import numpy as np

from segue_core.errors import SegueError
from segue_core.framing import close_fds, decode, recv_with_fds
from segue_core.memory_handle import MAX_PIECES
from segue_core.messages.probe import WAITING, Doing, ShareFound, say
from segue_core.timeline import TimelineView
from segue_core.trial import MARKED_STEP, Offer, content
from segue_daemon.cuda.driver import load
from segue_daemon.cuda.pages import CudaPages
from segue_daemon.cuda.pinned import PinnedBuffer

PINNED_BYTES = 64 << 20
"""Page-locked for the trial; an engine takes two blocks and a delta for each peer."""
STEP_S = 5.0
POLL_S = 0.001


def map_offered(connection: socket.socket) -> ShareFound:
    """Take the offer at `connection` and try all of it. Raises SegueError."""
    say(Doing(WAITING))
    body, fds = recv_with_fds(connection, peer="the engine's end", max_fds=MAX_PIECES + 1)
    if not body or not fds:
        return ShareFound(error="nothing was offered")
    try:
        offer = decode(body, Offer, peer="the engine's end")
        geometry = offer.geometry.validate()
        timeline = TimelineView(fds[0])
        say(Doing("mapping the memory of another process"))
        begun_ns = time.monotonic_ns()
        pages = CudaPages(geometry, fds[1:])
        open_ms = (time.monotonic_ns() - begun_ns) / 1e6
    finally:
        close_fds(fds)
    try:
        step_seen = _await_step(timeline)
        say(Doing("copying out of it"))
        block = np.empty(geometry.block_bytes, np.uint8)
        found = bytearray()
        for number in range(geometry.num_blocks):
            pages.copy_block(number, block)
            found += block.tobytes()
        say(Doing("page-locking memory"))
        pinned_ms, pinned_error = _pin(geometry.gpu)
    finally:
        pages.close()
        timeline.close()
    say(Doing("letting it go"))
    pages.released.wait()
    return ShareFound(
        equal=bytes(found) == content(),
        nbytes=len(found),
        open_ms=round(open_ms, 3),
        step_seen=step_seen,
        pinned_bytes=0 if pinned_error else PINNED_BYTES,
        pinned_ms=round(pinned_ms, 3),
        pinned_error=pinned_error,
    )


def _await_step(timeline: TimelineView) -> bool:
    """Whether the number arrives that the GPU wrote behind the other process's work."""
    deadline = time.monotonic() + STEP_S
    while timeline.step != MARKED_STEP:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _pin(uuid: str) -> tuple[float, str]:
    """(milliseconds to page-lock some memory, why it could not be locked)."""
    driver = load()
    device = driver.device(uuid)
    driver.make_current(driver.retain_context(device))
    try:
        begun_ns = time.monotonic_ns()
        try:
            buffer = PinnedBuffer(driver, PINNED_BYTES)
        except (SegueError, OSError) as error:
            return 0.0, str(error)
        taken_ms = (time.monotonic_ns() - begun_ns) / 1e6
        buffer.close()
        return taken_ms, ""
    finally:
        driver.release_context(device)


def _found(trial: Callable[[], ShareFound]) -> ShareFound:
    """What a trial finds, an error included."""
    try:
        return trial()
    except SegueError as error:
        return ShareFound(error=error.args[0], hint=error.hint)


def main(arguments: list[str]) -> int:
    """Entry point."""
    if len(arguments) != 2 or arguments[0] != "map":
        sys.stderr.write("seguectl doctor runs this\n")
        return 2
    with socket.socket(fileno=int(arguments[1])) as connection:
        say(_found(lambda: map_offered(connection)))
    sys.stdout.flush()
    os._exit(0)  # what hangs in the driver would keep the process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

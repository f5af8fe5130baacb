"""Tries the lifeline: a process that holds one is killed, and the time until this one knows is measured.

Run as a module, this is the process that is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from segue_core.errors import SegueError
from segue_core.lifeline import Lifeline, LifelineWatch

_READY, _UNABLE = b"y", b"n"


def try_lifeline(timeout_s: float) -> float | None:
    """Milliseconds from SIGKILL until the lifeline is known to be broken; None: that does not work here."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "segue_ctl.doctor_lifeline", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        fds: list[int] = []
        try:
            ours.settimeout(timeout_s)
            word, fds, _, _ = socket.recv_fds(ours, 1, 1)
            if word != _READY or not fds:
                return None
            return _killed_after(child, LifelineWatch(fds[0]), timeout_s)
        except (OSError, SegueError):
            return None
        finally:
            for fd in fds:
                os.close(fd)
            child.kill()
            child.wait()


def _killed_after(child: subprocess.Popen[bytes], watch: LifelineWatch, timeout_s: float) -> float | None:
    broken_ns: list[int] = []

    def wait() -> None:
        if watch.wait_broken():
            broken_ns.append(time.monotonic_ns())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun_ns = time.monotonic_ns()
    child.send_signal(signal.SIGKILL)
    thread.join(timeout_s)
    watch.stopped = True
    thread.join()  # it looks at `stopped` twice a second
    return (broken_ns[0] - begun_ns) / 1e6 if broken_ns else None


def main(arguments: list[str]) -> int:
    """Hold a lifeline until killed, or until the other side has gone."""
    with socket.socket(fileno=int(arguments[0])) as connection:
        lifeline = Lifeline()
        held = lifeline.hold()
        socket.send_fds(connection, [_READY if held else _UNABLE], [lifeline.fd])
        connection.recv(1)
        lifeline.let_go()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

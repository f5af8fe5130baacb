"""The lifeline breaks when its process is killed, and only then."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from segue_core.lifeline import SYS_FUTEX, Lifeline, LifelineWatch, exiting
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(os.uname().machine not in SYS_FUTEX, reason="no lifelines on this machine")


def start_holder(line: Lifeline, ready: int) -> int:
    """A child process that holds `line` and does nothing else."""
    pid = os.fork()
    if pid == 0:
        line.hold()
        os.write(ready, b"x")
        while True:
            signal.pause()
    return pid


def test_a_killed_process_breaks_its_lifeline() -> None:
    """The daemon hears of a SIGKILL from the kernel itself."""
    line = Lifeline()
    read, write = os.pipe()
    pid = start_holder(line, write)
    os.read(read, 1)
    watch = LifelineWatch(line.fd)
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(watch.wait_broken)
        assert not exiting(pid)
        os.kill(pid, signal.SIGKILL)
        assert broken.result(timeout=10)
    wait_for(lambda: exiting(pid), "the process is on its way out")
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    line.let_go()


def test_letting_go_is_not_death() -> None:
    """A shim that hangs up in order is not taken for killed; nor is one that never held."""
    line = Lifeline()
    assert line.hold()
    watch = LifelineWatch(line.fd)
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(watch.wait_broken)
        line.let_go()
        assert broken.result(timeout=10) is False
    other = Lifeline()
    assert LifelineWatch(other.fd).wait_broken() is False
    other.let_go()


def test_a_thread_that_ends_alone_does_not_mean_that_its_process_is_dying() -> None:
    """The daemon asks about the process before it believes a broken lifeline."""
    line = Lifeline()
    thread = threading.Thread(target=line.hold)
    thread.start()
    thread.join()
    assert LifelineWatch(line.fd).wait_broken() is True
    assert not exiting(os.getpid())
    os.close(line.fd)


def test_a_watch_can_be_stopped() -> None:
    """A daemon that shuts down does not leave a thread behind."""
    line = Lifeline()
    line.hold()
    watch = LifelineWatch(line.fd)
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(watch.wait_broken)
        watch.stopped = True
        assert broken.result(timeout=10) is False
    line.let_go()

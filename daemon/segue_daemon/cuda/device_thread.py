"""A thread that owns a GPU for one engine life: every driver call is made in it, and may hang there.

The caller waits with a deadline and goes on without the thread if that passes; the interpreter is never held
up. Invariants: calls run one after another; once one was given up on, no further one is waited for; what was
asked for with `post` is still done if the thread ever comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from segue_daemon.cuda.driver import CudaError

T = TypeVar("T")


class DeviceThread:
    """One thread; ends with `end`."""

    def __init__(self, name: str) -> None:
        self.stuck = False
        self._jobs: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[bool, Any]]] | None]
        self._jobs = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, reply = job
            try:
                reply.put((True, work()))
            except BaseException as error:  # handed to whoever asked
                reply.put((False, error))

    def run(self, what: str, work: Callable[[], T], timeout_s: float) -> T:
        """The result of `work`, run in the thread; its exceptions are raised here.

        Raises CudaError if it does not return within `timeout_s`, or if an earlier one did not.
        """
        if self.stuck:
            raise CudaError(what, "a driver call before it has not returned")
        reply: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._jobs.put((work, reply))
        try:
            done, result = reply.get(timeout=timeout_s)
        except Empty:
            self.stuck = True
            raise CudaError(what, f"the driver has not returned within {timeout_s:g} s") from None
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` done when its turn comes; nobody waits."""
        self._jobs.put((work, SimpleQueue()))

    def end(self) -> None:
        """The thread ends after what it was asked for."""
        self._jobs.put(None)

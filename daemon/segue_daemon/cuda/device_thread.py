"""A thread that owns a GPU for one engine life: every driver call is made in it, and may hang there.

The caller waits with a deadline and goes on without the thread if that passes; the interpreter is never held
up. Invariants: calls run one after another; once one was given up on, no further one is waited for; what was
asked for with `post` is still done if the thread ever comes back; at most `MAX_STUCK` threads have not come
back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

from segue_daemon.cuda.errors import STUCK_HINT, CudaError

T = TypeVar("T")

MAX_STUCK = 4
"""Threads that wait in the driver for good. An engine that registers again and again gets no more of them."""


class _Call(Generic[T]):
    """What the thread is to do, and what it says of it: results, then their end or an exception."""

    def __init__(self, what: str, work: Callable[[], Iterable[T]], timeout_s: float) -> None:
        self.what = what
        self._work = work
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._said: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def perform(self) -> None:
        """In the thread."""
        try:
            for result in self._work():
                self._said.put((True, result))
            self._said.put((False, None))
        except BaseException as error:  # handed to whoever asked
            self._said.put((False, error))

    def next(self) -> tuple[bool, T]:
        """(True, a result), or (False, -) after the last one. Raises what the work raised, TimeoutError after
        the deadline."""
        try:
            more, said = self._said.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except Empty:
            raise TimeoutError(f"the driver has not returned within {self._timeout_s:g} s") from None
        if not more and said is not None:
            raise said
        return more, said


class DeviceThread:
    """One thread; ends with `end`. Those of one class are counted together."""

    _all_stuck: ClassVar[set[DeviceThread]] = set()

    def __init__(self, name: str) -> None:
        """Raises CudaError if too many hang in the driver."""
        self._all_stuck.difference_update([stuck for stuck in tuple(self._all_stuck) if not stuck.alive])
        if len(self._all_stuck) >= MAX_STUCK:
            what = f"{len(self._all_stuck)} earlier calls of the driver"
            raise CudaError(what, "have not returned", hint=STUCK_HINT)
        self.stuck = False
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)
        self._thread.start()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._all_stuck.discard(self)

    @property
    def alive(self) -> bool:
        """Whether it runs, or hangs."""
        return self._thread.is_alive()

    def run(self, what: str, work: Callable[[], T], timeout_s: float) -> T:
        """The result of `work`, run in the thread; its exceptions are raised here.

        Raises CudaError if it does not return within `timeout_s`, or if an earlier one did not.
        """
        call = self._call(what, lambda: iter((work(),)), timeout_s)
        return self._next(call)[1]

    def each(self, what: str, work: Callable[[], Iterable[T]], timeout_s: float) -> Iterator[T]:
        """What `work` yields in the thread, as it comes; all of it within `timeout_s`. Raises like `run`.

        The thread does not wait for whoever takes the results. Left early, the iterator is closed only when
        the thread is done with it, or late; that raises, too.
        """
        call = self._call(what, work, timeout_s)
        try:
            while (said := self._next(call))[0]:
                yield said[1]
        except GeneratorExit:
            while self._next(call)[0]:
                pass
            raise

    def _call(self, what: str, work: Callable[[], Iterable[T]], timeout_s: float) -> _Call[T]:
        if self.stuck:
            raise CudaError(what, "a driver call before it has not returned", hint=STUCK_HINT)
        call = _Call(what, work, timeout_s)
        self._jobs.put(call.perform)
        return call

    def _next(self, call: _Call[T]) -> tuple[bool, T]:
        try:
            return call.next()
        except TimeoutError as error:
            self.stuck = True
            self._all_stuck.add(self)
            raise CudaError(call.what, str(error), hint=STUCK_HINT) from None

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` done when its turn comes; nobody waits."""
        self._jobs.put(lambda: _Call("", lambda: iter((work(),)), 0.0).perform())

    def end(self) -> None:
        """The thread ends after what it was asked for."""
        self._jobs.put(None)

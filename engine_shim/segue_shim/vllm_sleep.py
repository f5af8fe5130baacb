"""vLLM's sleep mode: the connector hears that the KV memory goes, before it goes, and that it is back.

A connector gets no hook for it. `install` wraps `sleep`, `discard` and `wake_up` of vLLM's GPU worker (0.32)
in memory, whichever way the memory goes behind them. Its level 0 does not come here: no memory goes.

Invariants: nothing here raises into vLLM or changes what it does; memory that has gone counts as gone until
vLLM has it back, all of the KV cache.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("segue_shim")

KV_TAG = "kv_cache"
_WRAPPED = "_segue_wrapped"


class SleepWatch:
    """Who is told. `asleep`: the KV memory is away."""

    def __init__(self) -> None:
        self.asleep = False
        self._goes: Callable[[], None] | None = None
        self._is_back: Callable[[], None] | None = None

    def tell(self, goes: Callable[[], None], is_back: Callable[[], None]) -> None:
        """Call `goes` before the memory goes, `is_back` once it is back. An engine that comes after another
        in this process is awake, however that one ended."""
        self.asleep = False
        self._goes, self._is_back = goes, is_back

    def before(self) -> None:
        """The memory is about to go; it may be away already."""
        if not self.asleep:
            self.asleep = True
            _contained(self._goes)

    def after(self) -> None:
        """The KV memory is there."""
        if self.asleep:
            self.asleep = False
            _contained(self._is_back)


def _contained(call: Callable[[], None] | None) -> None:
    if call is not None:
        try:
            call()
        except Exception:
            logger.exception("segue: the engine's sleep was not followed; it may run unprotected")


WATCH = SleepWatch()
"""Of this process's one worker."""


def install(worker: Any = None, watch: SleepWatch = WATCH) -> None:
    """Wrap the class `worker`, vLLM's GPU worker by default; a second call changes nothing."""
    worker = worker or _gpu_worker()
    if getattr(worker.sleep, _WRAPPED, False):
        return
    sleep, discard, wake_up = worker.sleep, worker.discard, worker.wake_up

    @functools.wraps(sleep)
    def wrapped_sleep(self: Any, level: int = 1) -> Any:
        watch.before()
        return sleep(self, level)

    @functools.wraps(discard)
    def wrapped_discard(self: Any, tags: tuple[str, ...]) -> Any:
        if KV_TAG in tags:
            watch.before()
        return discard(self, tags)

    @functools.wraps(wake_up)
    def wrapped_wake_up(self: Any, tags: list[str] | None = None) -> Any:
        result = wake_up(self, tags)
        if tags is None or KV_TAG in tags:
            watch.after()
        return result

    for name, wrapped in (
        ("sleep", wrapped_sleep),
        ("discard", wrapped_discard),
        ("wake_up", wrapped_wake_up),
    ):
        setattr(wrapped, _WRAPPED, True)
        setattr(worker, name, wrapped)


def _gpu_worker() -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def follow(vllm_config: VllmConfig, goes: Callable[[], None], is_back: Callable[[], None]) -> None:
    """Tell of the memory of an engine that can sleep; see `SleepWatch.tell`."""
    if can_sleep(vllm_config):
        WATCH.tell(goes, is_back)
        install()


def can_sleep(vllm_config: VllmConfig) -> bool:
    """Whether the KV memory of this engine may go while it lives."""
    model = vllm_config.model_config
    return bool(model.enable_sleep_mode or model.enable_cumem_allocator)


def refusal(vllm_config: VllmConfig) -> str:
    """Why an engine that can sleep cannot be protected; empty if it can, or cannot sleep."""
    if not can_sleep(vllm_config):
        return ""
    try:
        reason = not_as_expected()
    except Exception as error:
        reason = repr(error)
    return f"sleep mode: {reason}: start without --enable-sleep-mode" if reason else ""


def not_as_expected() -> str:
    """Why this vLLM's sleep mode cannot be followed; empty if it can. By the names in its code: a worker that
    sleeps needs a GPU."""
    from vllm.v1.executor.abstract import Executor

    for name, argument in (("sleep", "level"), ("discard", "tags"), ("wake_up", "tags")):
        method = getattr(_gpu_worker(), name, None)
        if method is None or list(inspect.signature(method).parameters) != ["self", argument]:
            return f"this vLLM's worker has no {name}({argument})"
        asked = getattr(Executor, name).__code__
        if "collective_rpc" not in asked.co_names or name not in asked.co_consts:
            return f"this vLLM does not ask its workers to {name} by that name"
    return ""

"""Asynchronous scheduling on a CPU, where vLLM (0.32) switches it off: its scheduler, its queue of steps and
its model runner are the real ones; streams and events, which only a GPU has, do nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Nothing:
    """In place of a stream or an event: on a CPU all is done when a call returns."""

    device = torch.device("cpu")

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def record(self, *arguments: Any) -> None:
        pass

    synchronize = wait = wait_event = wait_stream = record


def schedule_ahead() -> None:
    """Engines that are made in this process from now on schedule asynchronously."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)
    torch.cuda.Event = torch.cuda.Stream = Nothing
    torch.cuda.current_stream = Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()

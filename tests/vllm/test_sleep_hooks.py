"""vLLM's sleep mode as the shim finds it in vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from segue_shim import vllm_sleep

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def configured(**settings: bool) -> Any:
    model = {"enable_sleep_mode": False, "enable_cumem_allocator": False} | settings
    return SimpleNamespace(model_config=SimpleNamespace(**model))


def test_this_vllm_s_sleep_mode_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that can sleep is protected with the vLLM that is supported, also once it is wrapped."""
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("sleep", "discard", "wake_up"):
        monkeypatch.setattr(Worker, name, getattr(Worker, name))  # put back at the end
    assert vllm_sleep.refusal(configured(enable_sleep_mode=True)) == ""
    vllm_sleep.install()
    assert vllm_sleep.refusal(configured(enable_cumem_allocator=True)) == ""


def test_a_vllm_that_sleeps_in_another_way_is_refused_if_it_may_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its daemon would copy from memory that is not the KV cache; an engine that never sleeps is not
    concerned."""
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setattr(Worker, "wake_up", lambda self, everything: None)
    refused = vllm_sleep.refusal(configured(enable_sleep_mode=True))
    assert "wake_up" in refused and "--enable-sleep-mode" in refused
    assert vllm_sleep.refusal(configured()) == ""

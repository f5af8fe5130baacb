"""When an engine's KV memory counts as away, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from segue_shim.vllm_sleep import SleepWatch, install

Told = list[str]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def worker(told: Told) -> Any:
    """A worker under vLLM's names that tells what it does with its memory, wrapped."""

    class Worker:
        def sleep(self, level: int = 1) -> None:
            told.append("freed")

        def discard(self, tags: tuple[str, ...]) -> None:
            told.append("freed")

        def wake_up(self, tags: list[str] | None = None) -> None:
            told.append("there")

    watch = SleepWatch()
    watch.tell(lambda: told.append("goes"), lambda: told.append("is back"))
    install(Worker, watch)
    install(Worker, watch)  # a second time changes nothing
    return Worker()


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights", "kv_cache"]])
def test_the_memory_is_let_go_before_it_goes_and_shared_once_it_is_there(
    worker: Any, told: Told, tags: list[str] | None
) -> None:
    """In this order, or a daemon reads what is not there."""
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    worker.wake_up(tags=tags)
    assert told == ["goes", "freed", "there", "there", "is back"]


def test_discarding_the_kv_cache_alone_counts_too(worker: Any, told: Told) -> None:
    """It goes then as in any sleep; when only the weights go it stays shared."""
    worker.discard(("weights",))
    worker.wake_up(["weights"])
    assert told == ["freed", "there"]
    worker.discard(("kv_cache",))
    worker.sleep()
    worker.wake_up()
    assert told[2:] == ["goes", "freed", "freed", "there", "is back"]


def test_the_shim_s_trouble_does_not_keep_an_engine_awake() -> None:
    """vLLM sleeps and wakes up as if nobody watched."""
    done: Told = []

    class Worker:
        def sleep(self, level: int = 1) -> str:
            done.append("freed")
            return "asleep"

        discard = wake_up = sleep

    def fails() -> None:
        raise RuntimeError("trouble")

    watch = SleepWatch()
    watch.tell(fails, fails)
    install(Worker, watch)
    assert Worker().sleep() == "asleep" and done == ["freed"]


def test_an_engine_after_one_that_ended_asleep_is_let_go_of_too() -> None:
    """One process may have several engines, one after another: the next one's memory must be freed, too."""
    told: Told = []
    watch = SleepWatch()
    for name in ("first", "second"):
        watch.tell(lambda name=name: told.append(name), lambda: None)  # type: ignore[misc]
        watch.before()
    assert told == ["first", "second"]

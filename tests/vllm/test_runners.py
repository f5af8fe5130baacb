"""When vLLM's two model runners call the connector, by their own code around a step: what Segue relies on.

Nothing here calls a hook of a layer: a replayed CUDA graph calls none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue_shim.plan import Load, Source, StepPlan

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

Run = Callable[[Any, bool], Any]


class Worker:
    """In place of the worker's half: what happens, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert kv_caches == {}

    def begin(self, metadata: Any) -> None:
        self.seen.append("begin")

    def load(self) -> None:
        self.seen.append("load")

    def commit(self) -> None:
        self.seen.append("commit")

    def take_failed_blocks(self) -> set[int]:
        return {7}

    def take_results(self) -> str:
        return "results"


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector of this process, with `Worker` as its worker's half."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    from segue_shim.vllm_connector import SegueConnector

    made: Any = object.__new__(SegueConnector)
    vars(made).update(broken=False, _worker=Worker(), _scheduler=None, _connector_metadata=None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    return made


@pytest.fixture(params=["V1", "V2"])
def run(request: pytest.FixtureRequest, connector: Any) -> Run:
    """Runs a step with a forward pass, or without one; what the runner tells the scheduler."""
    from vllm.config import VllmConfig
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as V1

    config = VllmConfig()
    seen = connector._worker.seen

    def v1(output: Any, forward: bool) -> Any:
        # `execute_model` begins with it: the self-test looks.
        connector.handle_preemptions(output.kv_connector_metadata)
        if not forward:
            return V1.kv_connector_no_forward(output, config).kv_connector_output
        with set_forward_context(None, config), V1.maybe_get_kv_connector_output(output) as told:
            seen.append("forward")
        return told

    if request.param == "V1":
        return v1
    runner = ActiveKVConnector(config, {})

    def v2(output: Any, forward: bool) -> Any:
        if not forward:
            return runner.no_forward(output).kv_connector_output
        runner.pre_forward(output)
        seen.append("forward")
        runner.finish_forward()
        return runner.post_forward(set())

    return v2


def step(*, loads: int = 0, waits: bool = False) -> Any:
    """A step as the scheduler sends it, with a replica to load that is needed at once or `waits`."""
    from segue_shim.vllm_metadata import SegueMetadata

    source = Source(1, 1, 0, (0,))
    metadata = SegueMetadata(StepPlan(), tuple(Load(4, (7,), (source,)) for _ in range(loads)))
    metadata.arriving = ("waiting",) if waits else ()
    return SimpleNamespace(
        kv_connector_metadata=metadata,
        has_sync_kv_loads=bool(loads) and not waits,
        finished_req_ids=set(),
    )


def test_a_step_begins_before_the_model_runs_and_is_committed_behind_it(connector: Any, run: Run) -> None:
    """Once each, whatever the model's layers call: the commit comes when all kernels are queued."""
    run(step(), True)
    assert [what for what in connector._worker.seen if what != "load"] == ["begin", "forward", "commit"]


def test_a_step_without_a_forward_pass_is_a_step(connector: Any, run: Run) -> None:
    """Ends and pauses are told in it, and it is committed."""
    run(step(), False)
    assert [what for what in connector._worker.seen if what != "load"] == ["begin", "commit"]


def test_what_the_step_computes_on_is_loaded_before_it_runs(connector: Any, run: Run) -> None:
    """And a load that failed is told with the step's own output."""
    told = run(step(loads=1), True)
    assert connector._worker.seen == ["begin", "load", "forward", "commit"]
    assert told.invalid_block_ids == {7} and told.kv_connector_worker_meta == "results"


@pytest.mark.parametrize("forward", [True, False])
def test_who_waits_for_a_load_is_told_with_the_blocks_that_failed(
    connector: Any, run: Run, forward: bool
) -> None:
    """Scheduled ahead: the load follows the others' step, and ends with it."""
    told = run(step(loads=1, waits=True), forward)
    assert connector._worker.seen[-2:] == ["load", "commit"]
    assert told.finished_recving == {"waiting"} and told.invalid_block_ids == {7}

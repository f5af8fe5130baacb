"""The scheduler's half, with vLLM's objects in outline: the cases that a whole engine meets too rarely."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from segue_core.clock import ManualClock
from segue_shim.match_group import GroupMatch
from segue_shim.options import ExporterOptions
from segue_shim.plan import Source, StepPlan
from support.daemon_stub import ids

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 4


class Daemon:
    """In place of the daemons of all ranks: holds `tokens` of everything for `lease_ms`."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.daemon, self.tokens, self.lease_ms = clock, 1, 10, 1000
        self.asked = 0
        self.released: list[tuple[int, int]] = []

    def match(self, *, computed: int, limit: int, **question: Any) -> GroupMatch | None:
        self.asked += 1
        first, tokens = computed // BLOCK, min(self.tokens, limit)
        extents = tuple(range(100 + first, 100 + -(-tokens // BLOCK)))
        deadline = self.clock.now_ns() + self.lease_ms * 1_000_000
        source = Source(self.daemon, self.asked, deadline, extents)
        return GroupMatch(tokens, first, deadline, (source,)) if tokens > computed else None

    def release(self, daemon: int, lease: int, loaded: int) -> None:
        self.released.append((lease, loaded))

    def drop(self, match: GroupMatch) -> None:
        self.release(match.sources[0].daemon, match.sources[0].lease, 0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1)


@pytest.fixture
def daemon(clock: ManualClock) -> Daemon:
    return Daemon(clock)


@pytest.fixture
def half(daemon: Daemon, clock: ManualClock) -> Any:
    from segue_shim.vllm_scheduler import SchedulerHalf

    return SchedulerHalf(daemon, BLOCK, ExporterOptions(), clock=clock)


def request(name: str, tokens: int, **segue: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=list(range(tokens)),
        num_tokens=tokens,
        kv_transfer_params={"segue": {"seq": name, "epoch": 1} | segue}
        if segue.pop("protect", True)
        else None,
        mm_features=[],
        prompt_embeds=None,
        prompt_token_ids=list(range(tokens)),
        pooling_params=None,
        resumable=False,
        skip_reading_prefix_cache=False,
        cache_salt=None,
        lora_request=None,
    )


def step(
    new: dict[str, tuple[list[int], int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int]] | None = None,
    scheduled: int = 1,
    preempted: tuple[str, ...] = (),
    resumed: tuple[str, ...] = (),
) -> Any:
    """{request: (blocks, computed)} as vLLM's SchedulerOutput."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[None if blocks is None else (blocks,) for blocks, _ in cached.values()],
            num_computed_tokens=[computed for _, computed in cached.values()],
        ),
        num_scheduled_tokens=dict.fromkeys([*new, *cached], scheduled),
        scheduled_spec_decode_tokens={},
        preempted_req_ids=set(preempted),
    )


def plan_of(half: Any, output: Any) -> StepPlan:
    plan, _ = half.build(output)
    assert isinstance(plan, StepPlan)
    return plan


def test_a_prefix_hit_on_blocks_that_are_filled_in_the_same_step_does_not_count_yet(half: Any) -> None:
    """vLLM lets one request use what another computes in this very step; the daemon must not copy it yet."""
    half.on_new_request(request("a", 10))
    half.on_new_request(request("b", 10))
    plan = plan_of(half, step(new={"a": ([1, 2, 3], 0), "b": ([1, 2, 4], 8)}, scheduled=2))
    assert [begun.computed for begun in plan.begun] == [0, 0]
    assert plan.computed == (("a", 2), ("b", 10))
    assert set(ids(plan.assigned)) == {1, 2, 3, 4}


def test_an_unprotected_request_shows_its_blocks_only(half: Any) -> None:
    """So that a copy of a reused block is noticed."""
    half.on_new_request(request("plain", 10, protect=False))
    plan = plan_of(half, step(new={"plain": ([5, 6, 7], 4)}))
    assert ids(plan.assigned) == [6, 7] and plan.begun == () and plan.computed == () and plan.running == 1


def test_a_request_taken_back_begins_again_with_less(half: Any) -> None:
    """After a failed load vLLM lowers what is computed: its blocks are overwritten once more."""
    half.on_new_request(request("a", 12))
    plan_of(half, step(new={"a": ([1, 2, 3], 8)}, scheduled=4))
    plan = plan_of(half, step(cached={"a": (None, 4)}, scheduled=8))
    assert plan.begun[0].computed == 4 and ids(plan.assigned) == [2, 3] and plan.updated == ()


def test_preempted_and_resumed_in_one_step(half: Any) -> None:
    """As vLLM does when its prefix cache is reset: a new table, from the beginning."""
    half.on_new_request(request("a", 8))
    plan_of(half, step(new={"a": ([1, 2], 0)}, scheduled=8))
    output = step(cached={"a": ([3, 4], 0)}, scheduled=8, preempted=("a",), resumed=("a",))
    plan = plan_of(half, output)
    assert ids(plan.begun[0].block_ids) == [3, 4] and plan.paused == ("a",)


def test_the_daemon_is_asked_once_while_a_request_waits_for_blocks(half: Any, daemon: Daemon) -> None:
    """And again only when the lease is about to end."""
    waiting = request("a", 20, resume=True)
    half.on_new_request(waiting)
    assert [half.matched_tokens(waiting, 0) for _ in range(5)] == [10] * 5
    assert daemon.asked == 1
    daemon.clock.advance_ms(900)
    assert half.matched_tokens(waiting, 0) == 10
    assert daemon.asked == 2 and daemon.released == [(1, 0)]


def test_a_lease_goes_back_when_its_request_never_loads(half: Any, daemon: Daemon) -> None:
    """Aborted while it waited, or served by the engine's own cache."""
    for name, end in (("a", half.finished), ("b", None)):
        waiting = request(name, 20, resume=True)
        half.on_new_request(waiting)
        half.matched_tokens(waiting, 0)
        if end is not None:
            end(name)
        else:
            half.after_alloc(waiting, None, 0)
    assert daemon.released == [(1, 0), (2, 0)]


def test_a_load_names_the_daemon_that_answered(half: Any, daemon: Daemon) -> None:
    """Not the one that another request has found since: its arena holds something else there."""
    waiting = request("a", 20, resume=True)
    half.on_new_request(waiting)
    half.matched_tokens(waiting, 4)
    daemon.daemon = 2
    half.after_alloc(waiting, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],)), 6)
    plan, (load,) = half.build(step(new={"a": ([1, 2, 3, 4, 5], 10)}, scheduled=10))
    (source,) = load.sources
    assert source.daemon == 1
    assert (load.block_ids, source.extents, load.tokens) == ((2, 3), (101, 102), 6)
    assert plan.begun[0].computed == 4 and ids(plan.assigned) == [2, 3, 4, 5]


def test_a_load_that_is_lost_does_not_void_the_blocks_of_others(half: Any) -> None:
    """A hook failed: what was to be loaded is computed, and requests on the same cached prefix go on."""
    from segue_shim.vllm_connector import SegueConnector

    connector: Any = object.__new__(SegueConnector)
    state = {"broken": False, "_scheduler": half, "_worker": None, "_resumer": None, "_block_size": BLOCK}
    vars(connector).update(state, _unloaded=set(), _cached_blocks=0, _failed=(), _ahead=False, _arriving=[])
    waiting = request("a", 20, resume=True)
    connector.on_new_request(waiting)
    assert connector.get_num_new_matched_tokens(waiting, 4) == (6, False)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],))
    connector.update_state_after_alloc(waiting, blocks, 6)
    half.build = half.close = None
    metadata = connector.build_connector_meta(step(new={"a": ([1, 2, 3, 4, 5], 10)}, scheduled=10))
    assert metadata.broken and metadata.awaited_blocks() == {2, 3, 4, 5}


def test_the_last_token_is_never_loaded(half: Any, daemon: Daemon) -> None:
    """vLLM needs one to compute, and dies without."""
    daemon.tokens = 100
    waiting = request("a", 20, resume=True)
    half.on_new_request(waiting)
    assert half.matched_tokens(waiting, 0) == 19
    assert half.matched_tokens(waiting, 19) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"resume": False},
        {"skip_reading_prefix_cache": True},
        {"mm_features": [1]},
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
    ],
)
def test_requests_that_must_not_load_do_not(half: Any, daemon: Daemon, changes: dict[str, Any]) -> None:
    """Fresh requests, prompt log probabilities, and KV that depends on more than token ids."""
    waiting = request("a", 20, resume=changes.pop("resume", True))
    vars(waiting).update(changes)
    half.on_new_request(waiting)
    assert half.matched_tokens(waiting, 0) == 0 and daemon.asked == 0


def test_drafts_do_not_count_until_they_are_accepted(half: Any) -> None:
    """KV of a rejected draft is KV of a token that never was."""
    half.on_new_request(request("a", 10))
    output = step(new={"a": ([1, 2, 3, 4], 0)}, scheduled=13)
    output.scheduled_spec_decode_tokens = {"a": [7, 7, 7]}
    assert plan_of(half, output).computed == (("a", 10),)


def test_salts_are_told_apart() -> None:
    """A cache salt is no adapter, and two parts never run into each other."""
    from segue_shim.vllm_compat import salt

    def of(cache_salt: str | None, name: str | None = None, path: str = "p") -> bytes:
        adapter = None if name is None else SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)
        return salt(SimpleNamespace(cache_salt=cache_salt, lora_request=adapter))  # type: ignore[arg-type]

    salts = [of(None), of(""), of("a"), of(None, "a"), of("a", "b"), of(None, "ab", "c"), of(None, "a", "bc")]
    assert len(set(salts)) == len(salts)


def test_a_clients_word_on_replication_is_told_to_the_daemon(half: Any) -> None:
    """It goes into the journal; and a request that nobody else wrote before may ask, too."""
    kept, plain = request("kept", 8, replication="off", resume=True), request("plain", 8)
    half.on_new_request(kept)
    half.on_new_request(plain)
    assert half.matched_tokens(kept, 0) == 7
    half.after_alloc(kept, None, 0)
    plan = plan_of(half, step(new={"kept": ([1, 2], 0), "plain": ([3, 4], 0)}, scheduled=8))
    assert [begun.replication for begun in plan.begun] == ["off", "normal"]


def test_a_prefix_that_another_request_goes_on_filling_does_not_count_yet(half: Any) -> None:
    """Its chunk ended within a block that it was given before; protected or not, this step fills it."""
    half.on_new_request(request("first", 12, protect=False))
    half.on_new_request(request("second", 12))
    plan_of(half, step(new={"first": ([1, 2], 0)}, scheduled=6))
    plan = plan_of(half, step(new={"second": ([1, 2, 4], 8)}, cached={"first": ([3], 6)}, scheduled=4))
    assert ids(plan.assigned) == [4, 3] and plan.begun[0].computed == 4


def test_nothing_is_claimed_of_a_sequence_whose_next_owner_has_not_started(half: Any) -> None:
    """The blocks of the last one are given away meanwhile: told anew, they would be others' bytes."""
    half.on_new_request(request("old", 8, seq="s"))
    plan_of(half, step(new={"old": ([1, 2], 0)}, scheduled=8))
    half.on_new_request(request("new", 8, seq="s", epoch=2))
    half.finished("old")
    assert plan_of(half, step()).paused == ("s",)
    assert plan_of(half, step()).paused == ()


def test_junk_of_a_load_that_failed_is_not_left_in_the_prefix_cache(half: Any) -> None:
    """The request may be aborted before it has computed the blocks; others would go on from them."""
    from segue_shim.vllm_connector import SegueConnector

    evicted: list[set[int]] = []
    connector: Any = object.__new__(SegueConnector)
    vars(connector).update(broken=False, _scheduler=half, _failed=())
    vars(connector)["_kv_cache_manager"] = SimpleNamespace(evict_blocks=evicted.append)
    half.on_new_request(request("loads", 20, protect=False))
    half.on_new_request(request("other", 20))
    plan_of(half, step(new={"loads": ([1, 2, 3, 4], 12), "other": ([1, 6], 4)}, scheduled=4))
    connector.update_connector_output(SimpleNamespace(invalid_block_ids=set(), kv_connector_worker_meta=None))
    assert evicted == []
    connector.update_connector_output(SimpleNamespace(invalid_block_ids={2}, kv_connector_worker_meta=None))
    assert evicted == [{2, 3, 4}]


@pytest.fixture
def ahead(daemon: Daemon, clock: ManualClock) -> Any:
    """The half of an engine that schedules asynchronously."""
    from segue_shim.vllm_scheduler import SchedulerHalf, Scheduling

    return SchedulerHalf(daemon, BLOCK, ExporterOptions(), clock=clock, scheduling=Scheduling(ahead=True))


def test_ahead_of_its_ids_a_step_counts_what_it_computes(ahead: Any) -> None:
    """Two numbers: KV is complete with the step, its token's id is told with a later one."""
    live = request("a", 8)
    ahead.on_new_request(live)
    assert plan_of(ahead, step(new={"a": ([1, 2, 3], 0)}, scheduled=8)).computed == (("a", 8),)
    # The id that the first step sampled is not known yet, nor is the next one in the step after it.
    assert plan_of(ahead, step(cached={"a": (None, 8)})).computed == (("a", 9),)
    live.all_token_ids.append(77)
    plan = plan_of(ahead, step(cached={"a": (None, 9)}))
    assert plan.computed == (("a", 10),) and ids(plan.updated[0].token_ids) == [77] and plan.begun == ()


def test_drafts_on_their_way_do_not_count(daemon: Daemon, clock: ManualClock) -> None:
    """vLLM takes the drafts of a step that is still running for accepted; what is known may be shipped."""
    from segue_shim.vllm_scheduler import SchedulerHalf, Scheduling

    half = SchedulerHalf(daemon, BLOCK, ExporterOptions(), clock=clock, scheduling=Scheduling(True, True))
    live = request("a", 8)
    half.on_new_request(live)
    plan_of(half, step(new={"a": ([1, 2, 3, 4], 0)}, scheduled=8))
    live.all_token_ids.append(77)
    live.num_tokens = 9
    drafting = step(cached={"a": (None, 8)}, scheduled=4)
    drafting.scheduled_spec_decode_tokens = {"a": [-1, -1, -1]}
    assert plan_of(half, drafting).computed == (("a", 9),)
    # Without drafts of its own, behind a step whose three may all be rejected.
    assert plan_of(half, step(cached={"a": (None, 12)})).computed == (("a", 9),)


def test_a_load_that_is_waited_for_overwrites_its_blocks_at_once(ahead: Any) -> None:
    """Before its request is in any step; when that begins, whole blocks of the replica are complete."""
    waiting = request("a", 20, resume=True)
    ahead.on_new_request(waiting)
    assert ahead.matched_tokens(waiting, 4) == 6
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
    ahead.after_alloc(waiting, blocks, 6)
    plan, (load,) = ahead.build(step())
    assert ids(plan.assigned) == [2, 3] == list(load.block_ids) and plan.begun == ()
    ahead.after_alloc(waiting, blocks, 0)
    plan, loads = ahead.build(step(new={"a": ([1, 2, 3, 4, 5], 10)}, scheduled=10))
    assert loads == () and plan.begun[0].computed == 8 and ids(plan.assigned) == [3, 4, 5]
    assert plan.computed == (("a", 20),)


def test_who_waits_for_a_load_hears_its_end_even_if_all_of_segue_failed(ahead: Any) -> None:
    """vLLM would never start the request otherwise; its blocks are computed."""
    from segue_shim.vllm_connector import SegueConnector

    connector: Any = object.__new__(SegueConnector)
    state = {"broken": False, "_scheduler": ahead, "_worker": None, "_resumer": None, "_block_size": BLOCK}
    vars(connector).update(state, _unloaded=set(), _cached_blocks=0, _failed=(), _ahead=True, _arriving=[])
    waiting = request("a", 20, resume=True)
    connector.on_new_request(waiting)
    assert connector.get_num_new_matched_tokens(waiting, 0) == (10, True)
    ahead.after_alloc = ahead.close = None
    connector.update_state_after_alloc(waiting, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 10)
    metadata = connector.build_connector_meta(step())
    assert metadata.broken and connector.build_connector_meta(step()).arriving == ()
    connector.bind_connector_metadata(metadata)
    assert connector.get_finished(set()) == (None, {"a"})
    assert connector.get_block_ids_with_load_errors() == {1, 2, 3}

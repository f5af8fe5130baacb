"""An engine's health: what changes it, what does not, and when silence is death."""

from __future__ import annotations

from segue_core.messages.status import EngineStatus
from segue_router.health import (
    HOLD_MS,
    EngineHealth,
    Observer,
    Wait,
    is_behind,
    is_stalled,
    should_ask,
    stands_still,
)

LONG_AGO = float("-inf")


def up(now: float = 0.0) -> EngineHealth:
    health = EngineHealth()
    health.probe_ok(now, began_ms=now)
    assert health.state == "up"
    return health


def said(health: EngineHealth, now: float, state: str = "running", **more: object) -> bool:
    return health.daemon_said(EngineStatus("e", state, **({"incarnation": 1} | more)), now)  # type: ignore[arg-type]


def test_unseen_engines_are_down_until_a_probe() -> None:
    """Nobody is served by what was never seen."""
    health = EngineHealth()
    assert health.state == "down"
    health.probe_ok(0, began_ms=0)
    assert (health.state, health.recoveries) == ("up", 1)


def test_one_reset_is_a_suspicion_a_token_clears_it() -> None:
    """A reset may be the network's; it never brings an engine down by itself."""
    health = up()
    for _ in range(5):
        health.reset("x")
        assert health.state == "suspect"
    health.token()
    assert health.state == "up"


def test_refused_is_down_until_a_good_probe() -> None:
    """A token of an old stream does not bring it back."""
    health = up()
    health.refused("x")
    health.token()
    assert health.state == "down"
    health.probe_ok(1, began_ms=1)
    assert (health.state, health.recoveries) == ("up", 2)


def test_probes_fail_twice_before_an_engine_is_down_and_never_while_it_works() -> None:
    """Busy engines answer late."""
    health = up()
    health.probe_failed(5_000, "slow", refused=False, progressed_ms=4_900)
    assert health.state == "up"
    said(health, 9_000, running=3, progress_age_ms=10)
    health.probe_failed(9_100, "slow", refused=False, progressed_ms=LONG_AGO)
    assert health.state == "up"
    health.probe_failed(20_000, "slow", refused=False, progressed_ms=LONG_AGO)
    assert health.state == "suspect"
    health.probe_failed(21_000, "slow", refused=False, progressed_ms=LONG_AGO)
    assert health.state == "down"
    gone = up()
    gone.probe_failed(1, "refused", refused=True, progressed_ms=0)
    assert gone.state == "down"


def test_a_daemons_word_counts() -> None:
    """dead and stalled are down at once; back only when the daemon says running."""
    health = up()
    assert not said(health, 0)
    assert said(health, 10, "dead")
    assert health.state == "down"
    assert not said(health, 20, "dead"), "the second time it is no news"
    health.probe_ok(30, began_ms=30)
    assert health.state == "down"
    said(health, 40, "running", incarnation=2)
    health.probe_ok(50, began_ms=50)
    assert health.state == "up"


def test_a_new_incarnation_ends_the_old_life() -> None:
    """The death in between was missed."""
    health = up()
    said(health, 0)
    assert said(health, 10, incarnation=2)
    assert not said(health, 20, incarnation=2)


def test_a_restarted_daemon_says_nothing_about_the_engine() -> None:
    """absent: none registered since it started; streams go on."""
    health = up()
    said(health, 0)
    assert not said(health, 10, "absent", incarnation=0)
    assert health.state == "up"
    assert health.daemon(10) is None
    assert not said(health, 20, incarnation=1)


def test_an_old_word_is_forgotten() -> None:
    """The daemon is gone: the engine is judged as if it had none."""
    health = up()
    said(health, 0, "dead")
    health.probe_ok(500, began_ms=500)
    assert health.state == "down"
    health.probe_ok(5_000, began_ms=5_000)
    assert health.state == "up"


def test_an_engine_that_stalls_again_and_again_is_kept_out_longer() -> None:
    """Its /health may say 200 for hours."""
    health = up()
    holds = []
    now = 0.0
    for _ in range(4):
        health.stalled(now)
        start = now
        while health.state == "down":
            now += 100
            health.probe_ok(now, began_ms=now)
        holds.append(now - start)
    assert holds == sorted(holds)
    assert holds[-1] >= 8 * holds[0]
    health.token()
    health.stalled(now)
    health.probe_ok(now + 500, began_ms=now + 500)
    assert health.state == "up"


def test_the_streams_of_one_stall_count_once() -> None:
    """An engine with many streams is not kept out longer than one with few."""
    health = up()
    for _ in range(10):
        health.stalled(1_000)
    health.probe_ok(1_000 + HOLD_MS, began_ms=1_000 + HOLD_MS)
    assert health.state == "up"


def test_an_engine_that_outlived_its_daemons_word_is_used() -> None:
    """Restarted without the shim: the daemon says dead for ever, good probes well after that count."""
    health = up()
    said(health, 0, "dead")
    health.probe_ok(HOLD_MS + 10, began_ms=HOLD_MS - 10)
    assert health.state == "down", "the probe may have been answered by the one that died"
    health.probe_ok(HOLD_MS + 20, began_ms=HOLD_MS + 10)
    assert health.state == "up"
    said(health, HOLD_MS + 30, "dead")
    assert health.state == "up"
    assert health.daemon(HOLD_MS + 40) is None, "its word does not count for streams either"
    assert not is_stalled(
        Wait(HOLD_MS + 35, first_token=True),
        health,
        progressed_ms=0,
        now_ms=HOLD_MS + 40,
        stall_ms=5,
        lone_stall_ms=300_000,
        first_token_ms=300_000,
    )
    said(health, HOLD_MS + 50, "dead", incarnation=2)
    assert health.state == "down", "that is another death"


def test_a_request_that_waited_too_long_says_nothing_about_a_busy_engine() -> None:
    """It is moved; the engine that progresses with others stays up."""
    health = up()

    def still(progressed_ms: float) -> bool:
        return stands_still(health, progressed_ms=progressed_ms, now_ms=300_000, stall_ms=5_000)

    assert not still(299_000)
    assert still(200_000)
    said(health, 299_900, running=3, progress_age_ms=10)
    assert not still(200_000)
    said(health, 299_950, running=3, progress_age_ms=6_000)
    assert still(200_000)


def stalled(
    health: EngineHealth,
    silent: float,
    *,
    first: bool = False,
    other: float = 1e9,
    behind: float | None = None,
) -> bool:
    """After `silent` ms without a byte; another stream of the engine advanced `other` ms ago.

    `behind`: how long its daemon has known of tokens that the stream did not bring.
    """
    now = 1e6
    wait = Wait(now - silent, first_token=first, behind_since_ms=None if behind is None else now - behind)
    return judged(wait, health, progressed_ms=now - other, now_ms=now)


def judged(wait: Wait, health: EngineHealth, *, progressed_ms: float, now_ms: float) -> bool:
    return is_stalled(
        wait,
        health,
        progressed_ms=progressed_ms,
        now_ms=now_ms,
        stall_ms=1_000,
        lone_stall_ms=4_000,
        first_token_ms=10_000,
    )


def test_silence_without_a_daemon() -> None:
    """A stream is given up if nothing of its engine moves; before the first token much later."""
    health = up()
    assert not stalled(health, 900)
    assert stalled(health, 1_100)
    assert not stalled(health, 1_100, other=500), "other streams of the engine advance"
    assert not stalled(health, 3_900, other=0), "it may be queued in the engine"
    assert stalled(health, 4_100, other=0), "but nobody can tell, and not for long"
    assert not stalled(health, 9_000, first=True)
    assert stalled(health, 10_100, first=True)
    assert stalled(health, 10_100, other=5), "not for ever"
    health.refused("x")
    assert stalled(health, 1_100, first=True), "probes say that it is gone"


def test_silence_with_a_daemon() -> None:
    """Its word decides: stalled at once, progress waits."""
    for state, age, running, silent, first, expected in (
        ("stalled", 0, 1, 10, False, True),
        ("dead", 0, 1, 10, True, True),
        ("running", 0, 1, 5_000, False, False),
        ("running", 0, 1, 5_000, True, False),
        ("running", 1_500, 1, 1_100, False, True),
        ("running", 1_500, 1, 900, False, False),
        ("running", 1_500, 1, 1_100, True, True),
        ("running", 0, 0, 1_100, False, True),
        ("running", 0, 0, 1_100, True, False),
    ):
        health = up()
        said(health, 1e6 - 100, state, running=running, progress_age_ms=age)
        found = stalled(health, silent, first=first, other=0)
        assert found is expected, (state, age, running, silent, first)


def test_a_daemon_that_went_silent_is_not_believed() -> None:
    """Then the rules without one hold."""
    health = up()
    said(health, 1e6 - 5_000, "running", running=1)
    assert stalled(health, 1_100)


def test_an_answer_in_one_piece_is_not_judged_by_silence() -> None:
    """It comes at its end, however long that takes, unless the engine is down."""
    health = up()
    wait = Wait(0, first_token=True, whole=True)
    assert not judged(wait, health, progressed_ms=0, now_ms=1e6)
    health.refused("x")
    assert judged(wait, health, progressed_ms=0, now_ms=1e6)


def test_a_stream_whose_tokens_got_stuck_on_the_way_is_given_up() -> None:
    """The engine progresses and its daemon knows of more than arrived: only this one is lost."""
    health = up()
    said(health, 1e6 - 100, "running", running=3, progress_age_ms=0)
    assert not stalled(health, 1_100, other=0), "not ahead: it waits in the engine"
    assert not stalled(health, 1_100, other=0, behind=400), "what was just produced may be under way"
    assert not stalled(health, 900, other=0, behind=600)
    assert stalled(health, 1_100, other=0, behind=600)
    assert not stands_still(health, progressed_ms=1e6, now_ms=1e6, stall_ms=1_000), (
        "nor is its engine to blame"
    )


def test_a_daemon_is_asked_about_streams_that_began_and_fell_silent() -> None:
    """Twice within the stall time-out, so that its answer is there when the stream is judged."""
    begun, now = Wait(1_000, first_token=False), 1_500

    def ask(wait: Wait, asked_ms: float = LONG_AGO, now_ms: float = now) -> bool:
        return should_ask(wait, asked_ms=asked_ms, now_ms=now_ms, stall_ms=1_000)

    assert ask(begun)
    assert not ask(begun, now_ms=1_400)
    assert not ask(begun, asked_ms=1_100), "it was asked just now"
    assert not ask(Wait(0, first_token=True)), "its prompt is counted there before anything comes"
    assert not ask(Wait(0, first_token=False, whole=True))
    assert not ask(Wait(0, first_token=False, behind_since_ms=100)), "it is known already"


def test_only_more_tokens_at_the_daemon_are_behind() -> None:
    """A sequence that it does not know, or knows less of, proves nothing."""
    assert is_behind({"s": 10, "s.1": 10}, {"s": 10, "s.1": 11})
    assert not is_behind({"s": 10}, {"s": 10})
    assert not is_behind({"s": 10}, {"s": 9})
    assert not is_behind({"s": 10}, {})
    assert not is_behind({}, {"s": 10})


def observer() -> Observer:
    return Observer(beat_ms=100, pause_ms=1_000, together_ms=500, patience_ms=10_000)


def test_a_pause_of_the_router_is_noticed_before_and_after_its_first_beat() -> None:
    """Time-outs that passed meanwhile are not the engines' fault, whoever wakes up first."""
    watch = observer()
    assert watch.beat(0) == 0
    assert watch.beat(100) == 0
    assert watch.beat(900) == 0, "a little late is no pause"
    assert not watch.slept(0, 1_000)
    assert watch.slept(1_000, 9_000), "no beat yet since"
    assert watch.beat(9_000) == 8_000
    assert watch.slept(1_000, 9_050)
    assert not watch.slept(9_010, 9_050), "what began afterwards counts"
    assert watch.beat(9_100) == 0


def test_engines_that_fall_silent_together_are_doubted_for_a_while_only() -> None:
    """The router may be cut off; in the end they are believed."""
    watch = observer()
    for name in "abc":
        watch.probed(name, 0, silent=False)
    watch.probed("a", 1_000, silent=True)
    watch.probed("b", 1_100, silent=True)
    assert not watch.doubts(1_100), "c answers"
    watch.probed("c", 1_200, silent=True)
    assert watch.doubts(1_200)
    watch.probed("a", 5_000, silent=True)
    assert watch.doubts(11_000)
    assert not watch.doubts(11_300), "patience is over"
    watch.probed("b", 11_400, silent=False)
    assert not watch.doubts(11_400)


def test_one_engine_alone_or_one_after_another_is_not_doubted() -> None:
    """That is no mass failure."""
    watch = observer()
    watch.probed("a", 0, silent=True)
    assert not watch.doubts(0)
    watch.probed("b", 60_000, silent=True)
    assert not watch.doubts(60_000)


def test_a_doubtful_probe_is_a_suspicion_at_most() -> None:
    """An engine is not brought down by what may be the router's own fault."""
    health = up()
    for now in (20_000, 21_000, 22_000):
        health.probe_failed(now, "silent", refused=False, progressed_ms=LONG_AGO, doubtful=True)
        assert health.state == "suspect"
    health.probe_failed(23_000, "silent", refused=False, progressed_ms=LONG_AGO)
    assert health.state == "down"

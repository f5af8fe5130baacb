"""What `seguectl bench router` makes of its measurements, and the streams that it measures with."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import cast

import msgspec
import pytest

from segue_core.errors import ConfigError
from segue_ctl.bench_router import Cost, Part, RouterCost, check, percentile, render, summarize
from segue_ctl.bench_router_load import ChatRequest, ClientEnd, Events, LoadError, Run, Shape, StreamOptions
from segue_ctl.output import to_json

MS = 1_000_000
PLAIN = ChatRequest("0")
ASKING = ChatRequest("0", return_token_ids=True, stream_options=StreamOptions(include_usage=True))


def part(*, events: int, cpu_s: float, delays_ms: list[float], edges_cpu_s: float = 0.0) -> Part:
    """A run of one second with two streams."""
    delays = [round(delay * MS) for delay in delays_ms]
    return Part(events, 2, 1.0, cpu_s, edges_cpu_s, delays, [3 * MS, 5 * MS])


def events_of(*chunks: bytes) -> list[bytes]:
    """What HTTP chunks hold; each must be of the length that it names."""
    found = []
    for one in chunks:
        size, _, rest = one.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\n\n\r\n")
        found.append(rest[:-4].removeprefix(b"data: "))
    return found


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)], ids=["p50", "p99", "max", "min"]
)
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    """The smallest that so many do not exceed, whatever the order; no interpolation."""
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_no_values_have_no_percentile() -> None:
    """A run without a measured token does not break the report."""
    assert percentile([], 0.99) == 0.0


def test_rounds_are_added_up_and_direct_delay_is_taken_off() -> None:
    """Counts and CPU time are sums over the rounds, delays are pooled, and the engine's and the client's own
    share of the delay does not count for the proxy."""
    lockstep = [part(events=1000, cpu_s=0.01, delays_ms=[]), part(events=3000, cpu_s=0.03, delays_ms=[])]
    paced = [part(events=500, cpu_s=0.02, delays_ms=[0.2, 0.3], edges_cpu_s=0.012)]
    cost = summarize(lockstep, paced, direct_delay_ms=0.05)
    assert (cost.events, cost.tokens_per_s) == (4000, 2000)
    assert cost.tokens_per_cpu_s == pytest.approx(100_000)
    assert cost.cpu_us_per_event == pytest.approx(10)
    assert cost.paced_cpu_us_per_event == pytest.approx(40)
    assert (cost.added_itl_ms_p50, cost.added_itl_ms_p99) == pytest.approx((0.15, 0.25))
    assert cost.cpu_ms_per_stream == pytest.approx(2)
    assert cost.ttft_ms_p50 == 3


def test_a_way_without_a_proxy_has_no_rate_per_cpu_second() -> None:
    """Nothing is divided by no CPU time; programs find null, people a dash."""
    cost = summarize([part(events=1, cpu_s=0, delays_ms=[])], [part(events=1, cpu_s=0, delays_ms=[1])], 1)
    assert cost.tokens_per_cpu_s is None
    assert cost.cpu_us_per_event == 0


def result() -> RouterCost:
    """Direct without CPU time, the others with."""
    direct = summarize(
        [part(events=9, cpu_s=0, delays_ms=[])], [part(events=9, cpu_s=0, delays_ms=[0.05])], 0.05
    )
    proxy = summarize(
        [part(events=60_000, cpu_s=1, delays_ms=[])], [part(events=9, cpu_s=1, delays_ms=[0.25])], 0.05
    )
    return RouterCost(direct, proxy, proxy, streams=2, tokens=9, rate=5000, window=1, rounds=1, own_core=True)


def test_the_documents_keys_are_those_that_programs_read() -> None:
    """The three ways with their four main figures, and the goals beside them."""
    document = json.loads(to_json(result()))
    main = {"tokens_per_s", "added_itl_ms_p50", "added_itl_ms_p99", "cpu_us_per_event"}
    for way in ("direct", "passthrough", "segue"):
        assert main <= document[way].keys()
        assert set(document[way]) == set(Cost.__struct_fields__)
    assert document["goal_tokens_per_cpu_s"] == 45_000
    assert document["goal_added_itl_ms_p99"] == 1.0


def test_the_table_has_every_way_and_the_goal() -> None:
    """One line each, figures under their names."""
    lines = render(result()).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["direct", "passthrough", "segue", "goal"]
    assert "60,000" in lines[3] and "0.200" in lines[3]
    assert "-" in lines[1].split()
    assert "45,000" in lines[4]


@pytest.mark.parametrize("wrong", [{"streams": 0}, {"tokens": 2}, {"rate": 0}, {"window": 0}, {"rounds": 0}])
def test_what_cannot_work_out_is_refused_before_anything_starts(wrong: dict[str, int]) -> None:
    """The message names the option."""
    fine = {"streams": 1, "tokens": 3, "rate": 1, "window": 1, "rounds": 1, "json": None}
    check(argparse.Namespace(**fine))
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        check(argparse.Namespace(**(fine | wrong)))


def test_events_are_shaped_as_vllm_shapes_them() -> None:
    """Names and their order, ids only for those who ask, usage only for those who ask, a finish, [DONE]."""
    events = Events(3, ASKING)
    (role,), (token,) = events_of(events.role), events_of(events.token(7))
    *rest, end = events.last(8, 5)
    last, usage, done = events_of(*rest)
    assert [list(json.loads(event)) for event in (role, token)] == [
        ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"],
        ["id", "object", "created", "model", "choices"],
    ]
    (choice,) = json.loads(token)["choices"]
    assert list(choice) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
    assert len(choice["token_ids"]) == 1
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["completion_tokens"] == 5
    assert (done, end) == (b"[DONE]", b"0\r\n\r\n")


def test_a_client_that_asks_for_nothing_gets_no_ids_and_no_usage() -> None:
    """As from vLLM: null, and no usage event."""
    events = Events(0, PLAIN)
    (token,) = events_of(events.token(7))
    assert json.loads(token)["choices"][0]["token_ids"] is None
    assert len(events.last(8, 5)) == 3


class FakeTransport:
    """Takes what a client sends."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True


def client_of(run: Run) -> ClientEnd:
    """Stream 0 of `run`, connected."""
    client = ClientEnd(run, 0)
    run._clients.append(client)
    client.connection_made(cast("asyncio.BaseTransport", FakeTransport()))
    return client


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
async def test_tokens_are_counted_once_however_the_bytes_are_cut(size: int) -> None:
    """A proxy may cut and join as it likes: every time stamp is read once, and the end is seen."""
    run = Run(Shape(1, 4), 0, spin=False)
    client = client_of(run)
    events = Events(0, ASKING)
    sent_ns = time.monotonic_ns()
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + events.role + b"".join(events.token(sent_ns) for _ in range(3))
    answer += b"".join(events.last(sent_ns, 4))
    for start in range(0, len(answer), size):
        client.data_received(answer[start : start + size])
    assert client.tokens == 4
    assert client.done
    assert len(run.ttft_ns) == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nno engine", "refused: HTTP/1.1 503"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "0 tokens arrived of 4"),
    ],
)
async def test_a_wrong_answer_fails_the_run(answer: bytes, problem: str) -> None:
    """Figures of a proxy that lost tokens, or that refused, are worth nothing."""
    run = Run(Shape(1, 4), 0, spin=False)
    client = client_of(run)
    client.data_received(answer)
    with pytest.raises(LoadError, match=problem):
        await run.end()


async def test_a_broken_stream_fails_the_run() -> None:
    """The connection ends before the answer does."""
    run = Run(Shape(1, 4), 0, spin=False)
    client_of(run).connection_lost(None)
    with pytest.raises(LoadError, match="broke after 0 tokens"):
        await run.end()


async def test_in_lockstep_a_stream_has_no_more_than_its_window_under_way() -> None:
    """The next token is sent when one has arrived, and the last token waits for the end."""
    sent: list[bytes] = []
    run = Run(Shape(1, 6, window=2), 0, spin=False)
    run.opened(0, Events(0, PLAIN), sent.append)
    flow = asyncio.ensure_future(run.flow())
    await asyncio.sleep(0)
    before = len(sent)
    assert before == 2 + 2  # role and first token, then the window
    run.arrived(0, 1, 5)
    assert len(sent) == before + 1
    for _ in range(3):
        run.arrived(0, 1, 5)
    await flow
    assert len(sent) == 2 + 4
    assert list(run.delays_ns) == [4] * 4


async def test_paced_tokens_are_all_sent_and_spread_over_the_streams() -> None:
    """Each stream gets its own share, whoever is late."""
    sent: dict[int, int] = {0: 0, 1: 0}
    run = Run(Shape(2, 5, rate=1_000_000), 0, spin=True)
    for stream in sent:

        def count(data: bytes, stream: int = stream) -> None:
            sent[stream] += 1
            if sent[stream] > 2:  # after role and first token
                run.arrived(stream, 0, 1)

        run.opened(stream, Events(stream, PLAIN), count)
    await run.flow()
    assert sent == {0: 2 + 3, 1: 2 + 3}


def test_the_request_asks_for_what_is_measured() -> None:
    """Streaming with usage, so many tokens, and the number of the stream."""
    body = {"user": "7", "stream_options": {"include_usage": True}, "return_token_ids": True, "more": 1}
    request = msgspec.json.decode(json.dumps(body), type=ChatRequest)
    assert (request.user, request.return_token_ids) == ("7", True)

"""Streams of other APIs: cut into whole events, and ended honestly in their own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_router.errors import ClientError, UpstreamFailure
from segue_router.foreign import Api, PassedStream, api_of, error_json
from segue_router.passthrough import read_head

LIMIT = 1 << 20


def said(event: bytes) -> dict[str, Any]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    found: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return found


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/responses", "responses"),
        ("/v1/responses/r1", "responses"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses_of_mine", "other"),
        ("/v1/completions", "other"),
    ],
)
def test_the_api_is_known_by_its_path(path: str, api: Api) -> None:
    """And by nothing else: bodies are not read."""
    assert api_of(path) == api


def test_an_error_of_the_responses_api_continues_its_numbers() -> None:
    """As its clients expect: a flat event with the next sequence_number, whatever the text says."""
    stream = PassedStream("responses", LIMIT)
    text = json.dumps('"sequence_number": 99')
    stream.take(b'data: {"type":"x","sequence_number": 6}\n\ndata: {"sequence_number":7,"d":' + text.encode())
    stream.take(b"}\n\ndata: {")
    assert said(stream.error("broken", "stream_eof")) == {
        "type": "error",
        "code": "stream_eof",
        "message": "broken",
        "param": None,
        "sequence_number": 8,
    }
    assert said(PassedStream("responses", LIMIT).error("broken", "stalled"))["sequence_number"] == 0


def test_errors_of_the_other_apis() -> None:
    """Anthropic's clients look for `error.type`, OpenAI's for `error.code`."""
    assert said(PassedStream("messages", LIMIT).error("broken", "stream_eof")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken"},
    }
    assert said(PassedStream("other", LIMIT).error("broken", "stream_eof"))["error"]["code"] == "stream_eof"
    busy = ClientError(503, "no engine", code="no_engine_available", kind="server_error")
    assert json.loads(error_json("messages", busy)) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no engine"},
    }
    assert json.loads(error_json("responses", busy))["error"]["code"] == "no_engine_available"


@given(st.data())
def test_however_it_is_cut_the_same_bytes_come_out_in_whole_events(data: st.DataObject) -> None:
    """Nothing is changed, and nothing of an event is passed on before the whole of it is there."""
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    events = [b"event: x" + end[: len(end) // 2] + b"data: " + str(n).encode() * n + end for n in range(6)]
    raw = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    stream, out = PassedStream("other", LIMIT), b""
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        whole = stream.take(raw[start:stop])
        assert whole == b"" or whole.endswith(end)
        out += whole
    assert out == raw
    assert stream.rest() == b""


def test_a_last_event_without_its_empty_line_is_passed_on_at_an_orderly_end() -> None:
    """Some servers end so."""
    stream = PassedStream("other", LIMIT)
    assert stream.take(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert stream.rest() == b"data: 2\n"


def test_an_event_without_end_does_not_fill_the_memory() -> None:
    """It is a failure of the engine."""
    stream = PassedStream("other", 100)
    with pytest.raises(UpstreamFailure, match="larger than 100 bytes"):
        stream.take(b"data: " + b"x" * 100)


@pytest.mark.parametrize(
    ("api", "last", "ends"),
    [
        ("responses", b'event: response.completed\ndata: {"type":"response.completed"}', True),
        ("responses", b'data: {"type": "response.incomplete"}', True),
        ("responses", b'event: error\ndata: {"type":"error"}', True),
        ("responses", b'data: {"type":"response.output_text.delta","delta":"event: error"}', False),
        ("messages", b'event: message_stop\r\ndata: {"type":"message_stop"}', True),
        ("messages", b'event: message_delta\ndata: {"type":"message_delta"}', False),
        ("other", b"data: [DONE]", True),
        ("other", b'data: {"text":"[DONE]"}', False),
    ],
)
def test_what_an_api_calls_the_end(api: Api, last: bytes, ends: bool) -> None:
    """Without it a stream that just stops is cut short; of unknown APIs nobody can say."""
    stream = PassedStream(api, LIMIT)
    stream.take(b"data: first\n\n" + last + b"\n\n")
    assert stream.ended is ends
    assert stream.truncated is (not ends and api != "other")


@pytest.mark.parametrize(
    ("body", "model", "passed"),
    [
        (b'{"model": "m", "x":  1.50}', "m", None),
        (b'{"model": 5}', "", None),
        (b"no json", "", None),
        (b"[1]", "", None),
        (b"", "", None),
        (b'{"model": "m", "kv_transfer_params": [1]}', "m", None),
        (b'{"model": "m", "kv_transfer_params": {"mine": 1}}', "m", None),
        (
            b'{"model":"m","n":1.50,"kv_transfer_params":{"segue":{"seq":"s"},"mine":1}}',
            "m",
            b'{"model":"m","n":1.50,"kv_transfer_params":{"mine":1}}',
        ),
        (b'{"kv_transfer_params":{"seg\\u0075e":{}}}', "", b'{"kv_transfer_params":{}}'),
    ],
)
def test_a_body_is_passed_on_unchanged_but_for_segues_own_key(
    body: bytes, model: str, passed: bytes | None
) -> None:
    """A client could name somebody else's sequence under it, also in disguise."""
    assert read_head(body) == (model, body if passed is None else passed)


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": NaN, "kv_transfer_params": {"segue": {"seq": "s"}}}',
        b'{"kv_transfer_params": {"x": 1e999, "segue": {}}}',
        b'\xef\xbb\xbf{"kv_transfer_params": {"segue": {}}}',
        '{"kv_transfer_params": {"segue": {}}}'.encode("utf-16"),
        b'{"x": "\\ud800", "kv_transfer_params": {"segue": {}}}',
    ],
    ids=["NaN", "infinity", "byte order mark", "UTF-16", "half a character"],
)
def test_segues_own_key_does_not_hide_in_what_only_an_engine_reads(body: bytes) -> None:
    """Engines read more as JSON than the router does."""
    assert json.loads(body)["kv_transfer_params"]["segue"] is not None
    with pytest.raises(ClientError, match="not for clients"):
        read_head(body)
    harmless = body.replace(b"segue", b"other").replace(
        "segue".encode("utf-16-le"), "other".encode("utf-16-le")
    )
    assert read_head(harmless) == ("", harmless)

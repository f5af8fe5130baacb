"""Continued answers through vLLM's real HTTP server: what a router gets that sends delivered ids along."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue_ctl.vllm_server import EnginePlace, EngineSpec, vllm_command
from support.waiting import last_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(150)]

TOKENS = 24
END_OF_THOUGHT = 2045
"""`</think>` in the tiny model's vocabulary."""
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "67108864")
PARSERS = ("--reasoning-parser", "deepseek_r1")
COMMON = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 3, "ignore_eos": True, "return_token_ids": True}
COMPLETION = COMMON | {"prompt": list(range(100, 140))}
CHAT = COMMON | {"messages": [{"role": "user", "content": "bababa nunun"}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Server:
    """One vLLM server with the shim, and no daemon beside it."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{found.getsockname()[1]}"
        self.model = model.name
        place = EnginePlace(int(self.url.rpartition(":")[2]), folder / "none.sock", 0)
        spec = EngineSpec("a", extra_args=(*ARGUMENTS, *PARSERS))
        command = vllm_command(spec, place, model)
        env = command.env | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command.argv, env=env, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )

    def wait(self, timeout_s: float = 100) -> None:
        last_of(self._answers, lambda up: up or self.process.poll() is not None, timeout_s=timeout_s)
        assert self._answers(), self.log.read_text()[-6000:]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer as a whole. Raises HTTPError."""
        answer: dict[str, Any] = json.loads(self._post(path, body))
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """An answer's events, without the last, `[DONE]`."""
        *events, done, rest = self._post(path, body | STREAM).split("\n\n")
        assert done == "data: [DONE]" and not rest
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def _post(self, path: str, body: dict[str, Any]) -> str:
        data = json.dumps({"model": self.model} | body).encode()
        request = urllib.request.Request(f"{self.url}/v1/{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(model, tmp_path_factory.mktemp("server"))
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def segue(*delivered: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The part of the body that the router adds."""
    return {"kv_transfer_params": {"segue": {"seq": "s", "epoch": 2, "delivered": delivered} | more}}


def deltas(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The deltas of one choice that carry tokens, or its end."""
    found = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice for choice in found if choice.get("token_ids") or choice["finish_reason"]]


def said(choices: list[dict[str, Any]], key: str) -> str:
    """The pieces of one kind of text, put together."""
    return "".join(choice.get("delta", choice).get(key) or "" for choice in choices)


def ids(choices: list[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice["token_ids"] or ()]


@pytest.mark.parametrize("place", [1, 10, TOKENS - 1])
def test_a_completion_begins_with_what_was_delivered(server: Server, place: int) -> None:
    """In one event with what is new; all that counts, and the text, is that of the whole answer."""
    whole = server.ask("completions", COMPLETION)
    (choice,) = whole["choices"]
    body = COMPLETION | {"logprobs": 1} | segue({"ids": choice["token_ids"][:place]})
    events = server.stream("completions", body)
    found = deltas(events)
    assert len(found[0]["token_ids"]) == len(found[0]["logprobs"]["token_logprobs"]) > place
    assert all(delta["token_ids"] for delta in found)  # a slow client gets several at once
    assert ids(found) == choice["token_ids"] and said(found, "text") == choice["text"]
    assert found[-1]["finish_reason"] == "length"
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == TOKENS and usage["prompt_tokens"] == len(COMPLETION["prompt"])
    again = server.ask("completions", COMPLETION | segue({"ids": choice["token_ids"][:place]}))
    assert again["choices"] == whole["choices"] and again["usage"] == whole["usage"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_one_by_one_every_delivered_token_is_an_event(server: Server, path: str) -> None:
    """As parsers were fed the first time; with a row of log probabilities each."""
    body = (COMPLETION | {"logprobs": 1}) if path == "completions" else CHAT | {"logprobs": True}
    first = deltas(server.stream(path, body))
    whole = ids(first)
    found = deltas(server.stream(path, body | segue({"ids": whole[:15]}, one_by_one=True)))
    assert [len(delta["token_ids"]) for delta in found[:16]] == [1] * 16
    assert ids(found) == whole
    for key in ("text", "content", "reasoning"):
        assert [delta.get("delta", delta).get(key) for delta in found[:16]] == [
            delta.get("delta", delta).get(key) for delta in first[:16]
        ]
    assert found[16:] == first[16:]


def test_an_answer_without_streaming_is_the_whole_one(server: Server) -> None:
    """Message, token ids and usage."""
    whole = server.ask("chat/completions", CHAT)
    delivered = {"ids": whole["choices"][0]["token_ids"][:9]}
    for more in ({}, {"one_by_one": True}):
        again = server.ask("chat/completions", CHAT | segue(delivered, **more))
        assert (again["choices"], again["usage"]) == (whole["choices"], whole["usage"])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_choices_that_are_over_are_said_again(server: Server, one_by_one: bool) -> None:
    """One that goes on, one that is over and one that has not begun, with one usage for all of them."""
    body = CHAT | {"n": 3}
    whole = server.ask("chat/completions", body)
    first, second, _ = (choice["token_ids"] for choice in whole["choices"])
    parts = segue({"ids": first[:5]}, {"ids": second, "finish_reason": "length"}, {}, one_by_one=one_by_one)
    again = server.ask("chat/completions", body | parts)
    assert (again["choices"], again["usage"]) == (whole["choices"], whole["usage"])
    events = server.stream("chat/completions", body | {"logprobs": True} | parts)
    for choice in whole["choices"]:
        found = deltas(events, choice["index"])
        assert ids(found) == choice["token_ids"]
        assert said(found, "content") == (choice["message"]["content"] or "")
        assert said(found, "reasoning") == (choice["message"]["reasoning"] or "")
        assert [delta["finish_reason"] for delta in found if delta["finish_reason"]] == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 3 * TOKENS


def test_a_grammar_goes_on_before_at_and_after_the_end_of_a_thought(server: Server) -> None:
    """The grammar holds for what comes after `</think>` only, and knows what was delivered of that."""
    body = CHAT | {
        "ignore_eos": False,
        "max_tokens": 60,
        "logit_bias": {str(END_OF_THOUGHT): 6.0},
        "structured_outputs": {"regex": "[a-z]{6}-[0-9]{4}"},
    }
    whole = server.ask("chat/completions", body)
    (choice,) = whole["choices"]
    end = choice["token_ids"].index(END_OF_THOUGHT) + 1
    assert 2 < end < len(choice["token_ids"]) - 4 and choice["finish_reason"] == "stop", choice
    for place in (end - 2, end - 1, end, end + 1, len(choice["token_ids"]) - 1):
        delivered = {"ids": choice["token_ids"][:place]}
        again = server.ask("chat/completions", body | segue(delivered))
        assert again["choices"] == whole["choices"], place
        found = deltas(server.stream("chat/completions", body | segue(delivered, one_by_one=True)))
        assert said(found, "content") == choice["message"]["content"], place
        assert said(found, "reasoning") == choice["message"]["reasoning"], place


@pytest.mark.parametrize(
    "delivered",
    [[{"ids": [1 << 20]}], [{"ids": "x"}], [{"ids": [5] * TOKENS}], [{"ids": [5]}, {"ids": [6]}]],
    ids=["vocabulary", "type", "too many", "choices"],
)
def test_what_cannot_be_continued_is_an_error_and_no_answer(server: Server, delivered: Any) -> None:
    """Status 500, or an error event in a stream; the engine serves on."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.ask("completions", COMPLETION | segue(*delivered))
    assert caught.value.code == 500
    caught.value.close()
    events = server.stream("completions", COMPLETION | segue(*delivered))
    assert [set(event) for event in events] == [{"error"}]
    assert len(ids(deltas(server.stream("completions", COMPLETION)))) == TOKENS

"""What tests ask of a router, and what an answer without a failure is."""

from __future__ import annotations

from typing import Any

from system.router.fake_tokens import generate, text_of
from system.router.harness import Answer, Client, eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

LENGTH = 24


def request(path: str, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "fake", "max_tokens": LENGTH, "stream": True}
    if path == CHAT:
        base["messages"] = [{"role": "user", "content": "hello there"}]
    else:
        base["prompt"] = "hello there"
    return base | more


def assert_uninterrupted(answer: Answer, path: str, body: dict[str, Any]) -> None:
    """The answer is the one of an engine that never failed."""
    prompt, output, finish = generate(path, body)
    if not body.get("stream"):
        assert answer.status == 200, answer.body
        choice = answer.body["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert (text, choice["finish_reason"]) == (text_of(output), finish)
        assert answer.body["usage"]["completion_tokens"] == len(output)
        assert answer.body["usage"]["prompt_tokens"] == len(prompt)
        if body.get("return_token_ids"):
            assert choice["token_ids"] == output
        return
    assert answer.error is None, answer.error
    assert answer.done
    assert answer.text == text_of(output)
    assert answer.finishes == [finish]
    for key in ("id", "created", "model", "object"):
        assert len({event[key] for event in answer.events}) == 1, key
    assert all(choice["index"] == 0 for choice in answer.choices)
    if path == CHAT:
        assert [c["delta"].get("role") for c in answer.choices].count("assistant") == 1
        assert "role" in answer.choices[0]["delta"]
    if body.get("return_token_ids"):
        assert answer.ids == output
        holders = answer.events if path == CHAT else answer.choices
        assert [h["prompt_token_ids"] for h in holders if h.get("prompt_token_ids")] == [prompt]
    else:
        assert not any("token_ids" in c or "prompt_token_ids" in c for c in answer.choices)
    options = body.get("stream_options") or {}
    usages = [event["usage"] for event in answer.events if event.get("usage")]
    if options.get("include_usage"):
        total = len(prompt) + len(output)
        assert usages[-1] == {
            "prompt_tokens": len(prompt),
            "total_tokens": total,
            "completion_tokens": len(output),
        }
        assert answer.events[-1]["choices"] == []
    else:
        assert usages == []


async def all_up(client: Client) -> None:
    engines = client.context.registry.engines
    await eventually(lambda: all(e.health.state == "up" for e in engines), "all engines are up again")

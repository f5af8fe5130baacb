"""A fake engine with the shim: it takes delivered ids as output, and its stream begins with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from system.router.fake_engine import FakeEngine


class ExactEngine(FakeEngine):
    """`other_words`: it says another answer than the one it is to go on with."""

    other_words = False

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        told = (body.get("kv_transfer_params") or {}).get("segue", {}).get("delivered")
        if not told:
            yield from super()._events(path, body)
            return
        if self.other_words:
            body = body | {"messages": [{"role": "user", "content": "other"}], "prompt": "other"}
        owed = [len(choice.get("ids", ())) for choice in told]
        merged: dict[int, tuple[int, dict[str, Any]]] = {}
        for tokens, event in super()._events(path, body):
            choice = event["choices"][0] if event["choices"] else None
            if choice is None or not tokens or owed[choice["index"]] < 0:
                yield tokens, event
                continue
            index = choice["index"]
            count, whole = merged.pop(index, (0, event))
            if whole is not event:
                _append(whole["choices"][0], choice)
                whole |= {key: value for key, value in event.items() if key != "choices"}
            owed[index] -= tokens
            if owed[index] < 0 or choice["finish_reason"]:
                owed[index] = -1
                yield count + tokens, whole
            else:
                merged[index] = (count + tokens, whole)


def _append(choice: dict[str, Any], more: dict[str, Any]) -> None:
    """Two events of a choice as one."""
    if "text" in choice:
        choice["text"] += more["text"]
    else:
        choice["delta"]["content"] += more["delta"]["content"]
    choice["token_ids"] = choice["token_ids"] + more["token_ids"]
    choice |= {key: more[key] for key in ("finish_reason", "stop_reason") if key in more}

"""Asks one engine for whole answers and for continued ones, and tells them apart."""

from __future__ import annotations

import random
from typing import Any


class Asker:
    """Runs requests on an in-process engine. An answer is what a client would see of it."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.pieces: dict[str, list[dict[str, Any]]] = {}
        self.steps = 0

    def add(
        self,
        prompt: list[int],
        settings: dict[str, Any],
        delivered: list[dict[str, Any]] | None = None,
        **segue: Any,
    ) -> str:
        """Start a request; `delivered` and `segue` are Segue's parameters."""
        from vllm import SamplingParams

        name = f"r{len(self.pieces)}-{random.random()}"
        if delivered is not None:
            segue["delivered"] = delivered
        if segue:
            segue = {"seq": name, "epoch": 1} | segue
        extra = {"kv_transfer_params": {"segue": segue}} if segue else None
        parameters = SamplingParams(extra_args=extra, **settings)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        self.pieces[name] = []
        return name

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            self.pieces[output.request_id].append(
                {
                    "finished": output.finished,
                    "cached": output.num_cached_tokens,
                    "choices": {choice.index: _choice(choice) for choice in output.outputs},
                }
            )

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def answer(self, name: str, choice: int = 0) -> dict[str, Any]:
        """The answer, whole: the last that was said of the choice."""
        said = [piece["choices"][choice] for piece in self.pieces[name] if choice in piece["choices"]]
        return said[-1] if said else {}

    def ask(self, *arguments: Any, choice: int = 0, **more: Any) -> dict[str, Any]:
        """One request from beginning to end."""
        name = self.add(*arguments, **more)
        self.run()
        return self.answer(name, choice)

    def choices(self, prompt: list[int], settings: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """One request with several choices."""
        name = self.add(prompt, settings, **more)
        self.run()
        return [self.answer(name, index) for index in range(settings["n"])]


def different(whole: dict[str, Any], said: dict[str, Any], delivered: int) -> list[str]:
    """What of a continued answer is not as in the whole one. Log probabilities count from the seam on;
    before it there is a row for every id."""
    found = [key for key in ("ids", "text", "finish", "stop") if said.get(key) != whole[key]]
    if whole["logprobs"] is not None:
        rows = said["logprobs"] or []
        if rows[delivered:] != whole["logprobs"][delivered:]:
            found.append("logprobs")
        if [next(iter(row)) for row in rows] != [str(token) for token in said["ids"]]:
            found.append("rows")
    return found


def _choice(choice: Any) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = [
            {str(token): round(value.logprob, 4) for token, value in position.items()}
            for position in choice.logprobs
        ]
    return {
        "ids": list(choice.token_ids),
        "text": choice.text,
        "finish": choice.finish_reason,
        "stop": choice.stop_reason,
        "logprobs": logprobs,
    }

"""Scenario: continued answers where memory and steps are short: chunks, preemptions, prefix hits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine import make_engine, prompt
from exact import Asker, different

TOKENS = 70
SETTINGS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 1.0, "seed": 5},
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.4},
    "presence": {"temperature": 1.0, "seed": 8, "presence_penalty": 1.5},
}


def forget(asker: Asker) -> None:
    """Forget what the prefix cache holds."""
    asker.engine.reset_prefix_cache()


def chunks(asker: Asker) -> dict[str, Any]:
    """Seeded requests whose prompt takes several steps: fatal to vLLM on a CPU without the guard."""
    report = {}
    settings = {"max_tokens": TOKENS, "ignore_eos": True} | SETTINGS["seeded"]
    long = prompt(3, 150)
    plain = asker.ask(long, settings)
    report["plain"] = different(plain, asker.ask(long, settings), 0)  # at once: its prefix is cached
    for place in (1, 42, TOKENS - 1):
        forget(asker)
        said = asker.ask(long, settings, delivered=[{"ids": plain["ids"][:place]}])
        report[f"continued at {place}"] = different(plain, said, place)
    # Several in one step's budget.
    forget(asker)
    names = [asker.add(prompt(30 + number, 40), settings) for number in range(4)]
    asker.run()
    report["together"] = [
        different(asker.ask(prompt(30 + number, 40), settings), asker.answer(name), 0)
        for number, name in enumerate(names)
    ]
    return report


def prefix_hits(asker: Asker) -> dict[str, Any]:
    """The cache holds more than the prompt: the prompt and what was delivered."""
    report = {}
    ids = prompt(4, 40)
    for name, setting in SETTINGS.items():
        settings = {"max_tokens": TOKENS, "ignore_eos": True} | setting
        whole = asker.ask(ids, settings)
        for place in (1, 60):
            continued = asker.add(ids, settings, delivered=[{"ids": whole["ids"][:place]}])
            asker.run()
            report[f"{name} at {place}"] = {
                "different": different(whole, asker.answer(continued), place),
                "cached": asker.pieces[continued][-1]["cached"],
            }
    return report


def prompt_logprobs(asker: Asker) -> dict[str, Any]:
    """Prompts that are complete before the last step of a prefill, and those that take one step."""
    settings = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 1}
    report = {}
    for name, length, place in (("several steps", 50, 48), ("one step", 20, 20)):
        whole = asker.ask(prompt(5, length), settings)
        said = asker.ask(prompt(5, length), settings, delivered=[{"ids": whole["ids"][:place]}])
        report[name] = [said["finish"], different(whole, said, place)]
    return report


def preemptions(asker: Asker) -> dict[str, Any]:
    """More answers at once than there are blocks for, some continued and some fresh."""
    places = [33, 5, 20, 60, 1, 40, 0, 0]
    prompts = [prompt(50 + number, 45) for number in range(len(places))]
    kinds = [*SETTINGS.values()] * 3
    every = [{"max_tokens": 100, "ignore_eos": True} | kinds[number] for number in range(len(places))]
    alone = [asker.ask(ids, settings) for ids, settings in zip(prompts, every, strict=True)]
    forget(asker)
    names = [
        asker.add(ids, settings, delivered=[{"ids": whole["ids"][:place]}])
        for ids, settings, whole, place in zip(prompts, every, alone, places, strict=True)
    ]
    scheduler = asker.engine.engine_core.engine_core.scheduler
    preempted: set[str] = set()
    while asker.engine.has_unfinished_requests():
        asker.step()
        preempted |= {
            request.request_id.rpartition("-")[0]
            for request in scheduler.requests.values()
            if request.num_preemptions
        }
    return {
        "preempted": len(preempted & set(names[:6])),
        "different": [
            different(whole, asker.answer(name), place)
            for whole, name, place in zip(alone, names, places, strict=True)
        ],
    }


def main(model: str, folder: str) -> None:
    llm = make_engine(
        model,
        f"{folder}/none.sock",
        num_gpu_blocks_override=17,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        enable_prefix_caching=True,
    )
    asker = Asker(llm)
    report = {
        "chunks": chunks(asker),
        "prefix_hits": prefix_hits(asker),
        "prompt_logprobs": prompt_logprobs(asker),
        "preemptions": preemptions(asker),
    }
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])

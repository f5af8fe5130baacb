"""Scenario: whole answers, and the same answers continued from what was delivered; nothing is cached."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from engine import make_engine, prompt
from exact import Asker, different

PROMPT = prompt(1, 50)
TOKENS = 40
PLACES = (1, 14, 20, TOKENS - 1)
"""14 is where a block begins: 50 prompt ids and 14 more are two blocks of 32."""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "top_k": {"temperature": 0.8, "seed": 9, "top_k": 40, "top_p": 0.9},
    "presence": {"temperature": 0.0, "presence_penalty": 1.9},
    "frequency": {"temperature": 1.0, "seed": 6, "frequency_penalty": 1.1},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    "narrow": {"temperature": 1.0, "seed": 2, "allowed_token_ids": list(range(300, 320))},
    # Few tokens to choose from, so that a penalty that counts wrongly shows at once.
    "counted": {
        "temperature": 0.0,
        "allowed_token_ids": list(range(300, 320)),
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "size", "kind"],
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "([a-z]{3} ){9}[0-9]{2}"},
    "grammar": {"grammar": 'root ::= ("ab" | "cde" | [x-z])+ "." [0-9] [0-9] [0-9]'},
}


def each_place(asker: Asker, settings: dict[str, Any], whole: dict[str, Any], places: Any) -> dict[str, Any]:
    """The answer continued at each place, all of them in one batch with as many fresh ones."""
    names = {}
    for place in sorted(places):
        names[place] = asker.add(PROMPT, settings, delivered=[{"ids": whole["ids"][:place]}])
        asker.add(PROMPT[:20], settings | {"max_tokens": 20})
    asker.run()
    return {str(place): different(whole, asker.answer(name), place) for place, name in names.items()}


def plain(asker: Asker) -> dict[str, Any]:
    report = {}
    for name, setting in SETTINGS.items():
        settings = {"max_tokens": TOKENS, "ignore_eos": True} | setting
        whole = asker.ask(PROMPT, settings)
        report[name] = each_place(asker, settings, whole, PLACES)
    return report


def ends(asker: Asker, tokenizer: Any) -> dict[str, Any]:
    """Answers that end by themselves, close to where they are continued."""
    report = {}
    greedy = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    whole = asker.ask(PROMPT, greedy)
    # A stop string with its first half in what was delivered.
    place, stop = straddling(whole, tokenizer)
    settings = greedy | {"stop": [stop]}
    stopped = asker.ask(PROMPT, settings)
    assert stopped["finish"] == "stop" and len(stopped["ids"]) > place, stopped
    report["stop_string"] = each_place(asker, settings, stopped, {1, place})
    settings |= {"include_stop_str_in_output": True}
    report["stop_string_included"] = each_place(asker, settings, asker.ask(PROMPT, settings), {place})
    # A stop token right behind.
    place = next(p for p in range(10, TOKENS) if whole["ids"].index(whole["ids"][p]) == p)
    settings = greedy | {"stop_token_ids": [whole["ids"][place]]}
    report["stop_token"] = each_place(asker, settings, asker.ask(PROMPT, settings), {1, place})
    # The end of the answer as soon as it is allowed.
    settings = {"max_tokens": TOKENS, "temperature": 0.0, "min_tokens": 20, "logit_bias": {1: 100.0}}
    early = asker.ask(PROMPT, settings)
    assert (early["finish"], len(early["ids"])) == ("stop", 21), early
    report["min_tokens"] = each_place(asker, settings, early, {1, 19, 20})
    # A word of two tokens that is not allowed, with its first token in what was delivered.
    place, word = of_two_tokens(whole, tokenizer)
    settings = greedy | {"bad_words": [word]}
    without = asker.ask(PROMPT, settings)
    assert without["ids"][:place] == whole["ids"][:place] and without["ids"][place] != whole["ids"][place]
    report["bad_words"] = each_place(asker, settings, without, {1, place})
    return report


def straddling(whole: dict[str, Any], tokenizer: Any) -> tuple[int, str]:
    """(place, four characters around it that occur nowhere before)."""
    text = whole["text"]
    for place in range(8, TOKENS - 4):
        middle = len(tokenizer.decode(whole["ids"][:place]))
        stop = text[middle - 2 : middle + 2]
        if stop.isascii() and stop.isprintable() and text.find(stop) == middle - 2:
            return place, stop
    raise AssertionError(text)


def of_two_tokens(whole: dict[str, Any], tokenizer: Any) -> tuple[int, str]:
    """(place, text of the tokens before and after it, which is encoded as these two)."""
    for place in range(5, TOKENS):
        pair = whole["ids"][place - 1 : place + 1]
        word = tokenizer.decode(pair)
        if (
            tokenizer.encode(word, add_special_tokens=False) == pair
            and pair[0] not in whole["ids"][: place - 1]
        ):
            return place, word
    raise AssertionError(whole["text"])


def structured(asker: Asker) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    report: dict[str, Any] = {}
    for name, structure in STRUCTURES.items():
        for how, sampling in {
            "greedy": {"temperature": 0.0},
            "seeded": {"temperature": 1.0, "seed": 3},
        }.items():
            settings = sampling | {
                "max_tokens": 120,
                "structured_outputs": StructuredOutputsParams(**structure),
            }
            whole = asker.ask(PROMPT, settings)
            count = len(whole["ids"])
            report[f"{name} {how}"] = {
                "finish": whole["finish"],
                "places": each_place(asker, settings, whole, {1, count // 2, count - 2, count - 1}),
            }
    settings = {
        "temperature": 0.0,
        "max_tokens": 60,
        "structured_outputs": StructuredOutputsParams(regex="[a-z]{9}"),
    }
    report["rejected"] = asker.ask(PROMPT, settings, delivered=[{"ids": [300, 45, 46]}])
    return report


def choices(asker: Asker) -> dict[str, Any]:
    """Several choices: begun, over in each way, and not begun."""
    report = {}
    settings = {"temperature": 1.0, "seed": 11, "n": 4, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    whole = asker.choices(PROMPT, settings)
    settings |= {"stop": [whole[1]["text"][9:12]], "stop_token_ids": [whole[2]["ids"][7]]}
    whole = asker.choices(PROMPT, settings)
    report["finish"] = [(choice["finish"], type(choice["stop"]).__name__) for choice in whole]
    delivered: list[dict[str, Any]] = [
        {"ids": choice["ids"], "finish_reason": choice["finish"], "stop_reason": choice["stop"]}
        for choice in whole
    ]
    delivered[3] = {"ids": whole[3]["ids"][:6]}
    for name, more in {"at_once": {}, "one_by_one": {"one_by_one": True}}.items():
        said = asker.choices(PROMPT, settings, delivered=delivered, seq=name, **more)
        report[name] = [
            different(whole[index], said[index], len(delivered[index]["ids"])) for index in range(4)
        ]
    delivered[0] = {"ids": []}
    said = asker.choices(PROMPT, settings, delivered=delivered)
    report["not_begun"] = [
        different(whole[index], said[index], len(delivered[index]["ids"])) for index in range(4)
    ]
    settings = {"temperature": 1.0, "n": 3, "max_tokens": 12, "ignore_eos": True}
    whole = asker.choices(PROMPT, settings)
    said = asker.choices(PROMPT, settings, delivered=[{"ids": choice["ids"][:8]} for choice in whole])
    report["unseeded"] = [one["ids"][:8] == other["ids"][:8] for one, other in zip(whole, said, strict=True)]
    return report


def wrong(asker: Asker) -> dict[str, Any]:
    """What cannot be right ends in an error, or at least does not begin with what was delivered."""
    settings = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    cases: dict[str, Any] = {
        "not in the vocabulary": [{"ids": [4, 2048]}],
        "huge": [{"ids": [1 << 40]}],
        "negative": [{"ids": [-1]}],
        "all there may be": [{"ids": [4] * 10}],
        "no list": "garbage",
        "no ids": [{"ids": "garbage"}],
        "too many choices": [{"ids": [4]}, {"ids": [5]}],
        "unknown end": [{"ids": [4], "finish_reason": "tool_calls"}],
        "over, but no token": [{"ids": [1 << 30], "finish_reason": "stop"}],
    }
    report = {name: asker.ask(PROMPT, settings, delivered=delivered) for name, delivered in cases.items()}
    report["too long"] = asker.ask(prompt(2, 500), settings, delivered=[{"ids": [4] * 12}])
    report["over by a stop token"] = asker.ask(
        PROMPT, settings | {"stop_token_ids": [5]}, delivered=[{"ids": [4, 5]}]
    )
    # Such a request never asks for cached KV, and vLLM would start it.
    report["prompt_logprobs"] = asker.ask(
        PROMPT, settings | {"prompt_logprobs": 1}, delivered=[{"ids": [4, 2048]}]
    )
    several = settings | {"n": 3, "temperature": 1.0}
    for number, choice in enumerate(asker.choices(PROMPT, several, delivered=[{"ids": [4]}])):
        report[f"too few choices {number}"] = choice
    return report


def left_behind(asker: Asker) -> dict[str, Any]:
    """Aborted before anything was computed."""
    settings = {"temperature": 1.0, "seed": 1, "max_tokens": 30, "ignore_eos": True}
    names = [asker.add(PROMPT, settings, delivered=[{"ids": [40, 41]}]) for _ in range(3)]
    for name in names:
        asker.engine.abort_request([name])
    asker.ask(PROMPT, settings)
    core = asker.engine.engine_core.engine_core
    return {
        "front_end": len(asker.engine.output_processor.__dict__.get("_segue_replays", ())),
        "scheduler": len(core.scheduler.connector._resumer._resumed),
    }


def bugs(asker: Asker) -> dict[str, Any]:
    """Hooks that fail: the engine lives, and nothing is said to be a continuation that is none."""
    from segue_shim import vllm_front_end
    from segue_shim.vllm_resume import OutputResumer

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("made to fail")

    settings = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    whole = asker.ask(PROMPT, settings)
    delivered = [{"ids": [whole["ids"][0], 77, 78]}]
    report: dict[str, Any] = {}
    begin, vllm_front_end._begin = vllm_front_end._begin, fail
    report["front_end"] = asker.ask(PROMPT, settings, delivered=delivered)
    vllm_front_end._begin = begin
    report["front_end_after"] = asker.ask(PROMPT, settings, delivered=delivered)["ids"][:3]
    build, OutputResumer._start = OutputResumer._start, fail
    report["scheduler"] = asker.ask(PROMPT, settings, delivered=delivered)
    OutputResumer._start = build
    report["scheduler_after"] = asker.ask(PROMPT, settings, delivered=delivered)
    report["whole"] = asker.ask(PROMPT, settings)["ids"] == whole["ids"]
    report["beginning"] = whole["ids"]
    return report


def main(model: str, folder: str) -> None:
    llm = make_engine(
        model,
        f"{folder}/none.sock",
        num_gpu_blocks_override=160,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    asker = Asker(llm)
    tokenizer = llm.get_tokenizer()
    report: dict[str, Any] = {}
    for name, part in {
        "plain": lambda: plain(asker),
        "ends": lambda: ends(asker, tokenizer),
        "structured": lambda: structured(asker),
        "choices": lambda: choices(asker),
        "wrong": lambda: wrong(asker),
        "left_behind": lambda: left_behind(asker),
        "bugs": lambda: bugs(asker),
    }.items():
        began = time.monotonic()
        report[name] = part()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    Path(folder, "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
